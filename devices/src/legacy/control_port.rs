// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! System control port B of the PC (port 0x61), as far as a guest without timer and speaker of the PC looks at it: it says that
//! an NMI has no reason that the chipset knows of. Without it all ones would be read there, and a guest would take each NMI for
//! a parity error of memory or bus, and not for one that it was told to panic of.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::platform::BusDevice;

/// Bytes of the register.
pub const REGISTERS_LEN: u64 = 1;

/// Bits that can be written: gate of timer 2, speaker, and whether the two errors are off. They do nothing.
const WRITABLE: u8 = 0x0f;

/// Changes with each refresh of memory: here with each look, as there are programs that wait for a change.
const REFRESH: u8 = 1 << 4;

/// Output of timer 2: always high, so that who waits for the timer, which is not there, need not do so for ever.
const TIMER_2_OUT: u8 = 1 << 5;

/// The register.
#[derive(Default)]
pub struct ControlPort(AtomicU8);

impl BusDevice for ControlPort {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        if let Some(first) = data.first_mut() {
            *first = self.0.fetch_xor(REFRESH, Ordering::Relaxed) | TIMER_2_OUT;
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (0, Some(value)) = (offset, data.first()) {
            self.0.store(value & WRITABLE, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(port: &ControlPort) -> u8 {
        let mut data = [0xff; 1];
        port.read(0, &mut data);
        data[0]
    }

    #[test]
    fn no_error_is_reported_whatever_is_written() {
        let port = ControlPort::default();
        for value in 0..=u8::MAX {
            port.write(0, &[value]);
            assert_eq!(read(&port) & 0xc0, 0);
        }
    }

    #[test]
    fn gate_and_masks_are_kept_and_refresh_changes_with_each_look() {
        let port = ControlPort::default();
        port.write(0, &[0xff]);
        assert_eq!([read(&port), read(&port), read(&port)], [0x2f, 0x3f, 0x2f]);
        port.write(0, &[0]);
        assert_eq!(read(&port), 0x20);
    }

    #[test]
    fn accesses_of_any_length_are_taken() {
        let port = ControlPort::default();
        let mut data = [0xff; 4];
        port.read(0, &mut data);
        assert_eq!(data, [0x20, 0xff, 0xff, 0xff]);
        port.write(0, &[]);
        port.write(1, &[0x0f]);
        assert_eq!(read(&port), 0x30);
    }
}
