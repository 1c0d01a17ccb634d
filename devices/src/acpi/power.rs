// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Sleep and reset registers of hardware-reduced ACPI (ACPI 6.5, sections 4.8.3.6 and 4.8.3.7).

use crate::platform::BusDevice;

/// Offset of the sleep control register in bytes.
pub const SLEEP_CONTROL_OFFSET: u64 = 0;
/// Offset of the sleep status register in bytes.
pub const SLEEP_STATUS_OFFSET: u64 = 1;
/// Offset of the reset register in bytes.
pub const RESET_OFFSET: u64 = 2;
/// Size of all registers in bytes.
pub const REGISTERS_LEN: u64 = 3;
/// Value that resets the machine when the guest writes it to the reset register.
pub const RESET_VALUE: u8 = 1;
/// Sleep type of the state S5 (power-off).
pub const SLEEP_TYPE_S5: u8 = 5;
/// Bit of the sleep control register that makes the machine enter the sleep state.
const SLEEP_ENABLE: u8 = 1 << 5;
/// Position of the sleep type in the sleep control register. The sleep type has 3 bits.
const SLEEP_TYPE_SHIFT: u8 = 2;

/// Guest request for power-off or a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerRequest {
    /// Power off.
    PowerOff,
    /// Restart.
    Reset,
}

/// Sleep and reset registers. Each guest request for power-off or a reset is passed to the function of type `F`.
pub struct PowerRegisters<F: Fn(PowerRequest) + Send + Sync>(F);

impl<F: Fn(PowerRequest) + Send + Sync> PowerRegisters<F> {
    /// Creates registers that call `request` for each of the guest's requests.
    pub fn new(request: F) -> Self {
        Self(request)
    }
}

impl<F: Fn(PowerRequest) + Send + Sync> BusDevice for PowerRegisters<F> {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        for (at, value) in (offset..REGISTERS_LEN).zip(data) {
            let sleep = SLEEP_ENABLE | (SLEEP_TYPE_S5 << SLEEP_TYPE_SHIFT);
            match at {
                SLEEP_CONTROL_OFFSET if value & (SLEEP_ENABLE | (7 << SLEEP_TYPE_SHIFT)) == sleep => {
                    (self.0)(PowerRequest::PowerOff);
                }
                RESET_OFFSET if *value == RESET_VALUE => (self.0)(PowerRequest::Reset),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn requests(writes: &[(u64, &[u8])]) -> Vec<PowerRequest> {
        let seen = Mutex::new(Vec::new());
        for (offset, data) in writes {
            PowerRegisters::new(|request| seen.lock().unwrap().push(request)).write(*offset, data);
        }
        seen.into_inner().unwrap()
    }

    #[test]
    fn s5_with_enable_powers_off() {
        assert_eq!(requests(&[(0, &[0x34])]), [PowerRequest::PowerOff]);
    }

    #[test]
    fn other_sleep_types_and_missing_enable_do_nothing() {
        assert_eq!(requests(&[(0, &[0x14]), (0, &[0x24]), (1, &[0x34]), (0, &[])]), []);
    }

    #[test]
    fn reset_register_accepts_only_its_value() {
        assert_eq!(requests(&[(2, &[0]), (2, &[1]), (7, &[1])]), [PowerRequest::Reset]);
    }
}
