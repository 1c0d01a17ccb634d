// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Instructions of a guest, and a driver for the disk in slot 2.

/// Configuration space of the device in slot 2.
pub(crate) const CONFIG: u32 = 0xf800_0000 + (2 << 15);
/// Address that the guest assigns to the registers of that device.
const REGISTERS: u32 = 0xf000_0000;

/// List of instructions.
#[derive(Clone, Default)]
pub(crate) struct Code(pub(crate) Vec<u8>);

impl Code {
    /// Appends `mov [address], value` for a value of `bytes` bytes.
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

    /// Appends code that sets up the disk in slot 2, with rings at these addresses.
    pub(crate) fn set_up_disk(mut self, rings: [u32; 3]) -> Self {
        // Disables decoding, writes BAR 0, and enables decoding and bus mastering.
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
        // Queue enable, DRIVER_OK.
        self.store(REGISTERS + 28, 2, 1).store(REGISTERS + 20, 1, 15)
    }

    /// Appends code that notifies the disk.
    pub(crate) fn notify_disk(self) -> Self {
        self.store(REGISTERS + 0x3000, 2, 0)
    }

    /// Appends the end of the code: `again: hlt; jmp again`
    pub(crate) fn halt(mut self) -> Vec<u8> {
        self.0.extend([0xf4, 0xeb, 0xfd]);
        self.0
    }
}
