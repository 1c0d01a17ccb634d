// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guests that touch memory when the test says so.

/// Words by which the guest and the test talk: in the first zone, whose file the test has.
pub(crate) const READY: u32 = 0x30_0000;
pub(crate) const GO: u32 = READY + 4;
pub(crate) const AFTER: u32 = READY + 8;
/// Where the second zone begins, and what of it the guest touches.
pub(crate) const ZONE: u32 = 64 << 20;
pub(crate) const LOST: u32 = ZONE + 0x10_0000;
/// Configuration space of the device in slot 2, and where its registers or its memory are to be.
pub(crate) const CONFIG: u32 = 0xf800_0000 + (2 << 15);
pub(crate) const REGISTERS: u32 = 0xf000_0000;
pub(crate) const SHOWN: u32 = 0xf400_0000;

/// Instructions of a guest.
#[derive(Clone, Default)]
pub(crate) struct Code(Vec<u8>);

impl Code {
    /// `mov [address], value`, of so many bytes.
    pub(crate) fn store(mut self, address: u32, bytes: usize, value: u32) -> Self {
        let opcode: &[u8] = match bytes {
            1 => &[0xc6, 0x05],
            2 => &[0x66, 0xc7, 0x05],
            _ => &[0xc7, 0x05],
        };
        self.0.extend(opcode);
        self.0.extend(address.to_le_bytes());
        self.0.extend(&value.to_le_bytes()[..bytes]);
        self
    }

    /// `mov eax, [address]`
    pub(crate) fn load(mut self, address: u32) -> Self {
        self.0.push(0xa1);
        self.0.extend(address.to_le_bytes());
        self
    }

    /// `rep movsd` of four words.
    pub(crate) fn copy(mut self, from: u32, to: u32) -> Self {
        for (opcode, value) in [(0xbe, from), (0xbf, to), (0xb9, 4)] {
            self.0.push(opcode);
            self.0.extend(value.to_le_bytes());
        }
        self.0.extend([0xfc, 0xf3, 0xa5]);
        self
    }

    /// Says that it is ready, and waits until it is to go on: `again: cmp dword [GO], 0; je again`
    pub(crate) fn wait(self) -> Self {
        let mut code = self.store(READY, 4, 1);
        code.0.extend([0x83, 0x3d]);
        code.0.extend(GO.to_le_bytes());
        code.0.extend([0, 0x74, 0xf7]);
        code
    }

    /// Says that it has run on, and halts: `again: hlt; jmp again`
    pub(crate) fn end(self) -> Vec<u8> {
        let mut code = self.store(AFTER, 4, 1);
        code.0.extend([0xf4, 0xeb, 0xfd]);
        code.0
    }

    /// `ud2`: a triple fault, as no exception has a handler.
    pub(crate) fn triple_fault(mut self) -> Self {
        self.0.extend([0x0f, 0x0b]);
        self
    }

    /// Sets up the disk in slot 2, whose rings are at these addresses.
    pub(crate) fn set_up_disk(mut self, rings: [u32; 3]) -> Self {
        // Command register, BAR 0.
        for (offset, value) in [(4, 0), (0x10, REGISTERS), (4, 6)] {
            self = self.store(CONFIG + offset, 4, value);
        }
        // ACKNOWLEDGE and DRIVER, VERSION_1, FEATURES_OK, the queue's size.
        for (offset, bytes, value) in [(20, 1, 1), (20, 1, 3), (8, 4, 1), (12, 4, 1), (20, 1, 11), (24, 2, 8)] {
            self = self.store(REGISTERS + offset, bytes, value);
        }
        for (offset, ring) in [32, 40, 48].into_iter().zip(rings) {
            self = self.store(REGISTERS + offset, 4, ring).store(REGISTERS + offset + 4, 4, 0);
        }
        // The queue, DRIVER_OK.
        self.store(REGISTERS + 28, 2, 1).store(REGISTERS + 20, 1, 15)
    }

    /// Notifies the disk.
    pub(crate) fn notify_disk(self) -> Self {
        self.store(REGISTERS + 0x3000, 2, 0)
    }
}
