// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Command port of the PC's keyboard controller (0x64). Carom emulates no other part of this controller, and the port has only one command,
//! which resets the machine. EDK2 uses the command for a warm reset, which Linux requests on hardware-reduced ACPI machines
//! (`efi_reboot_required`).

use crate::platform::BusDevice;

/// Size of the register in bytes.
pub const REGISTERS_LEN: u64 = 1;

/// Command that pulses the reset line of the processor.
const RESET: u8 = 0xfe;

/// Command port. The port calls a function when the guest requests a reset.
pub struct KeyboardReset<F: Fn() + Send + Sync>(F);

impl<F: Fn() + Send + Sync> KeyboardReset<F> {
    /// Creates a port that calls `reset` when the guest requests a reset.
    pub fn new(reset: F) -> Self {
        Self(reset)
    }
}

impl<F: Fn() + Send + Sync> BusDevice for KeyboardReset<F> {
    /// Leaves `data` at its preset value of all ones, as if no controller existed.
    fn read(&self, _offset: u64, _data: &mut [u8]) {}

    fn write(&self, offset: u64, data: &[u8]) {
        if let (0, Some(&RESET)) = (offset, data.first()) {
            (self.0)();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn only_the_reset_command_resets_and_reads_are_all_ones() {
        let asked = AtomicU32::new(0);
        let port = KeyboardReset::new(|| {
            asked.fetch_add(1, Ordering::Relaxed);
        });
        for (offset, data) in [(0, &[0xffu8][..]), (0, &[0xd1]), (1, &[0xfe]), (0, &[])] {
            port.write(offset, data);
        }
        assert_eq!(asked.load(Ordering::Relaxed), 0);
        port.write(0, &[0xfe]);
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        let mut data = [0xff];
        port.read(0, &mut data);
        assert_eq!(data, [0xff]);
    }
}
