// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guests that wait for the test before they access memory.

use crate::guest_code::Code;

/// Words that the guest and the test share, in the file of the first zone.
pub(crate) const READY: u32 = 0x30_0000;
pub(crate) const GO: u32 = READY + 4;
pub(crate) const AFTER: u32 = READY + 8;
/// Start of the second zone, and the page in it that the guest accesses.
pub(crate) const ZONE: u32 = 64 << 20;
pub(crate) const LOST: u32 = ZONE + 0x10_0000;
/// Address that the guest assigns to persistent memory.
pub(crate) const SHOWN: u32 = 0xf400_0000;

impl Code {
    /// Appends `mov eax, [address]`.
    pub(crate) fn load(mut self, address: u32) -> Self {
        self.0.push(0xa1);
        self.0.extend(address.to_le_bytes());
        self
    }

    /// Appends `rep movsd` of four words.
    pub(crate) fn copy(mut self, from: u32, to: u32) -> Self {
        for (opcode, value) in [(0xbe, from), (0xbf, to), (0xb9, 4)] {
            self.0.push(opcode);
            self.0.extend(value.to_le_bytes());
        }
        self.0.extend([0xfc, 0xf3, 0xa5]);
        self
    }

    /// Appends code that reports that the guest is ready, and waits for the test: `again: cmp dword [GO], 0; je again`
    pub(crate) fn wait(self) -> Self {
        let mut code = self.store(READY, 4, 1);
        code.0.extend([0x83, 0x3d]);
        code.0.extend(GO.to_le_bytes());
        code.0.extend([0, 0x74, 0xf7]);
        code
    }

    /// Appends code that reports that the guest has continued, and halts.
    pub(crate) fn end(self) -> Vec<u8> {
        self.store(AFTER, 4, 1).halt()
    }

    /// Appends `ud2`: a triple fault, because no exception has a handler.
    pub(crate) fn triple_fault(mut self) -> Self {
        self.0.extend([0x0f, 0x0b]);
        self
    }
}
