// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Registers of ACPI memory devices (ACPI 6.5, section 9.11). The guest's ACPI methods read the registers to learn the addresses and sizes
//! of the RAM that was added since the guest booted.
//!
//! | offset | register |
//! | --- | --- |
//! | 16 n | GPA of memory device n, 64 bits |
//! | 16 n + 8 | size of memory device n in bytes, 64 bits; 0 if the device does not exist |
//! | 512 | memory devices added since the last read, 32 bits, bit n for device n; a read clears the register |
//!
//! The registers are read-only and accept only 32-bit reads. Reads of another width return zero. The interrupt line is active while the
//! register at offset 512 has a bit set. So a guest that enables the interrupt late misses no event. Added RAM is never removed.

use std::sync::Mutex;

use log::debug;
use serde::{Deserialize, Serialize};

use crate::platform::{BusDevice, InterruptLine};
use crate::state::{DeviceState, StateError};
use crate::sync::lock;

/// Maximum number of memory devices.
pub const MAX_MEMORY_DEVICES: usize = 32;
/// Size of the registers of one device in bytes.
pub const DEVICE_LEN: u64 = 16;
/// Offset of the register of added devices.
pub const CAME: u64 = DEVICE_LEN * MAX_MEMORY_DEVICES as u64;
/// Size of all registers in bytes.
pub const REGISTERS_LEN: u64 = CAME + 4;

/// Kind and version of the saved state.
const STATE: (&str, u32) = ("memory-devices", 1);

/// RAM of one memory device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryDevice {
    /// Guest-physical address.
    pub gpa: u64,
    /// Size in bytes, not 0.
    pub len: u64,
}

#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    devices: Vec<MemoryDevice>,
    /// Bit n is set if device n was added and the guest has not read this bit yet.
    came: u32,
}

/// Registers of the memory devices.
pub struct MemoryDevices {
    state: Mutex<State>,
    line: Box<dyn InterruptLine>,
}

impl MemoryDevices {
    /// Creates the registers of a VM that was booted with these devices. Ignores devices beyond [`MAX_MEMORY_DEVICES`].
    pub fn new(mut devices: Vec<MemoryDevice>, line: Box<dyn InterruptLine>) -> Self {
        devices.truncate(MAX_MEMORY_DEVICES);
        Self { state: Mutex::new(State { devices, came: 0 }), line }
    }

    /// True if no further device can be added.
    pub fn is_full(&self) -> bool {
        lock(&self.state).devices.len() >= MAX_MEMORY_DEVICES
    }

    /// Returns the memory devices, ordered by their numbers.
    pub fn devices(&self) -> Vec<MemoryDevice> {
        lock(&self.state).devices.clone()
    }

    /// Adds a memory device, and notifies the guest. If the maximum number of devices exists already, changes nothing and returns `false`.
    pub fn announce(&self, device: MemoryDevice) -> bool {
        let mut state = lock(&self.state);
        let number = state.devices.len();
        if number >= MAX_MEMORY_DEVICES {
            return false;
        }
        state.devices.push(device);
        state.came |= 1 << number;
        self.drive(&state);
        true
    }

    /// Resets the registers for a guest that boots. The guest finds all RAM at boot, so no device is reported as added.
    pub fn reset(&self) {
        let mut state = lock(&self.state);
        state.came = 0;
        self.drive(&state);
    }

    /// Returns the state of the registers. Call this function while all vCPUs are stopped.
    ///
    /// # Errors
    /// This function never fails today.
    pub fn save(&self) -> Result<DeviceState, StateError> {
        DeviceState::new(STATE.0, STATE.1, &*lock(&self.state))
    }

    /// Restores `saved` into registers that were just created for the same RAM, and sets the interrupt line.
    ///
    /// # Errors
    /// The saved state is invalid, or does not match this VM. In this case nothing has changed.
    pub fn restore(&self, saved: &DeviceState) -> Result<(), StateError> {
        let new: State = saved.payload(STATE.0, STATE.1)?;
        let mut state = lock(&self.state);
        if new.devices != state.devices {
            return Err(StateError::rule(
                "devices",
                "the saved memory devices differ from the RAM of this VM: restore with the configuration that was saved",
            ));
        }
        if u64::from(new.came) >> new.devices.len() != 0 {
            return Err(StateError::rule(
                "came",
                format!(
                    "the saved bits {:#x} include memory devices that do not exist: restore from an unmodified snapshot",
                    new.came
                ),
            ));
        }
        state.came = new.came;
        self.drive(&state);
        Ok(())
    }

    fn drive(&self, state: &State) {
        if let Err(error) = self.line.set(state.came != 0) {
            // Log this at debug level, because a guest could flood the log with warnings.
            debug!("memory devices: cannot set the interrupt line: {error}");
        }
    }
}

impl BusDevice for MemoryDevices {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let Ok(data) = <&mut [u8; 4]>::try_from(data) else { return };
        let mut state = lock(&self.state);
        if offset == CAME {
            *data = std::mem::take(&mut state.came).to_le_bytes();
            self.drive(&state);
            return;
        }
        let number = usize::try_from(offset / DEVICE_LEN).unwrap_or(usize::MAX);
        let Some(device) = state.devices.get(number) else { return };
        let (gpa, len) = (device.gpa.to_le_bytes(), device.len.to_le_bytes());
        let half = match offset % DEVICE_LEN {
            0 => gpa.first_chunk(),
            4 => gpa.last_chunk(),
            8 => len.first_chunk(),
            12 => len.last_chunk(),
            _ => None,
        };
        *data = half.copied().unwrap_or_default();
    }

    /// Ignores writes, because the guest cannot change the RAM of the VM.
    fn write(&self, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::test_support::FakeLine;

    const FIRST: MemoryDevice = MemoryDevice { gpa: 0x1_4000_0000, len: 0x800_0000 };
    const SECOND: MemoryDevice = MemoryDevice { gpa: 0x1_4800_0000, len: 0x2_0000_0000 };

    fn registers(devices: &[MemoryDevice]) -> (MemoryDevices, FakeLine) {
        let line = FakeLine::default();
        (MemoryDevices::new(devices.to_vec(), Box::new(line.clone())), line)
    }

    fn read(registers: &MemoryDevices, offset: u64) -> u32 {
        let mut data = [0xff; 4];
        registers.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn added_ram_is_reported_once_and_its_address_always() {
        let (registers, line) = registers(&[]);
        assert!(registers.announce(FIRST) && registers.announce(SECOND));
        assert!(line.is_up());
        assert_eq!(read(&registers, CAME), 0b11);
        assert!(!line.is_up());
        assert_eq!(read(&registers, CAME), 0);
        let words: Vec<u32> = (0..10).map(|word| read(&registers, word * 4)).collect();
        assert_eq!(words, [0x4000_0000, 1, 0x800_0000, 0, 0x4800_0000, 1, 0, 2, 0, 0]);
    }

    #[test]
    fn other_accesses_read_zero_and_change_nothing() {
        let (registers, line) = registers(&[]);
        registers.announce(FIRST);
        for len in [0, 1, 2, 3, 8] {
            let mut data = vec![0xff; len];
            registers.read(CAME, &mut data);
            assert_eq!(data, vec![0; len]);
        }
        for offset in [1, 2, 6, 14, CAME - 1, CAME + 1, CAME + 4, u64::MAX] {
            assert_eq!(read(&registers, offset), 0, "{offset:#x}");
            registers.write(offset, &[0xff; 4]);
        }
        registers.write(CAME, &[0xff; 4]);
        assert!(line.is_up());
        assert_eq!((read(&registers, CAME), registers.devices()), (1, vec![FIRST]));
    }

    #[test]
    fn ram_beyond_the_last_device_is_refused() {
        let (registers, _) = registers(&[FIRST; MAX_MEMORY_DEVICES - 1]);
        assert!(!registers.is_full() && registers.announce(SECOND) && registers.is_full());
        assert_eq!(read(&registers, CAME), 1 << 31);
        assert!(!registers.announce(FIRST));
        assert_eq!(read(&registers, CAME), 0);
    }

    #[test]
    fn ram_stays_after_reset_and_is_not_reported_again() {
        let (registers, line) = registers(&[]);
        registers.announce(FIRST);
        registers.reset();
        assert!(!line.is_up());
        assert_eq!((read(&registers, CAME), registers.devices()), (0, vec![FIRST]));
    }

    #[test]
    fn restored_registers_report_what_was_not_reported_yet() {
        let (old, _) = registers(&[FIRST]);
        old.announce(SECOND);
        let state = old.save().unwrap();
        let (new, line) = registers(&[FIRST, SECOND]);
        new.restore(&state).unwrap();
        assert!(line.is_up());
        assert_eq!(new.save().unwrap(), state);
        assert_eq!(read(&new, CAME), 0b10);
        let (other, line) = registers(&[FIRST]);
        assert_eq!(
            other.restore(&state).unwrap_err().to_string(),
            "devices: the saved memory devices differ from the RAM of this VM: restore with the configuration that was saved"
        );
        let wrong = DeviceState::new(STATE.0, STATE.1, &State { devices: vec![FIRST], came: 2 }).unwrap();
        let refused = other.restore(&wrong).unwrap_err().to_string();
        assert_eq!(
            refused,
            "came: the saved bits 0x2 include memory devices that do not exist: restore from an unmodified snapshot"
        );
        assert!(!line.is_up());
    }
}
