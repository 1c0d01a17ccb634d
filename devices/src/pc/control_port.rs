// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! System control port B of the PC (port 0x61), without the PC's timer and speaker. After an NMI, a guest reads this port to learn whether
//! the chipset reports an error. This port never reports an error. Without this device, the port would read as all ones. The guest would
//! then mistake each NMI for a memory or bus error, even an NMI that the user sends to make the guest panic.

use std::sync::atomic::{AtomicU8, Ordering};

use serde::{Deserialize, Serialize};

use crate::platform::BusDevice;
use crate::state::{DeviceState, StateError};

/// Size of the register in bytes.
pub const REGISTERS_LEN: u64 = 1;

/// Writable bits: gate of timer 2, speaker, and the masks of memory and bus errors. These bits have no effect.
const WRITABLE: u8 = 0x0f;

/// Refresh bit. On a PC, the bit changes with each memory refresh. On this port, the bit changes with each read, because some programs wait
/// for a change.
const REFRESH: u8 = 1 << 4;

/// Output of timer 2. The output is always high, so that software does not wait for ever for the missing timer.
const TIMER_2_OUT: u8 = 1 << 5;

/// Kind and version of the saved state.
const STATE: (&str, u32) = ("control-port", 1);

/// Saved state of the port.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ControlPortState {
    /// Bits that the guest has written, and the refresh bit.
    value: u8,
}

/// System control port B.
#[derive(Default)]
pub struct ControlPort(AtomicU8);

impl ControlPort {
    /// Returns the state of the port. Call this function while all vCPUs are stopped.
    ///
    /// # Errors
    /// This function never fails today.
    pub fn save(&self) -> Result<DeviceState, StateError> {
        DeviceState::new(STATE.0, STATE.1, &ControlPortState { value: self.0.load(Ordering::Relaxed) })
    }

    /// Restores `state`.
    ///
    /// # Errors
    /// The saved state is invalid. In this case nothing has changed.
    pub fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let ControlPortState { value } = state.payload(STATE.0, STATE.1)?;
        if value & !(WRITABLE | REFRESH) != 0 {
            return Err(StateError::rule(
                "value",
                "the saved value has bits that the control port's register does not keep: restore from an unmodified snapshot",
            ));
        }
        self.0.store(value, Ordering::Relaxed);
        Ok(())
    }

    /// Resets the port to its state at power-on. Call this function while all vCPUs are stopped.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

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
    fn no_error_is_reported_after_any_write() {
        let port = ControlPort::default();
        for value in 0..=u8::MAX {
            port.write(0, &[value]);
            assert_eq!(read(&port) & 0xc0, 0);
        }
    }

    #[test]
    fn gate_and_masks_are_kept_and_refresh_toggles_on_read() {
        let port = ControlPort::default();
        port.write(0, &[0xff]);
        assert_eq!([read(&port), read(&port), read(&port)], [0x2f, 0x3f, 0x2f]);
        port.write(0, &[0]);
        assert_eq!(read(&port), 0x20);
    }

    #[test]
    fn restored_port_continues_and_bad_values_are_refused() {
        let (old, new) = (ControlPort::default(), ControlPort::default());
        old.write(0, &[0x03]);
        read(&old);
        let mut state = old.save().unwrap();
        new.restore(&state).unwrap();
        assert_eq!(new.save().unwrap(), state);
        assert_eq!(read(&new), 0x33);
        state.payload = serde_json::json!({ "value": 0x80 });
        assert_eq!(
            new.restore(&state).unwrap_err().to_string(),
            "value: the saved value has bits that the control port's register does not keep: restore from an unmodified snapshot"
        );
    }

    #[test]
    fn reset_port_equals_a_new_one() {
        let port = ControlPort::default();
        port.write(0, &[0x03]);
        read(&port);
        port.reset();
        assert_eq!(port.save().unwrap(), ControlPort::default().save().unwrap());
    }

    #[test]
    fn accesses_of_any_length_are_accepted() {
        let port = ControlPort::default();
        let mut data = [0xff; 4];
        port.read(0, &mut data);
        assert_eq!(data, [0x20, 0xff, 0xff, 0xff]);
        port.write(0, &[]);
        port.write(1, &[0x0f]);
        assert_eq!(read(&port), 0x30);
    }
}
