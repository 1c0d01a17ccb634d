// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's ways to access configuration space: memory-mapped (ECAM), and two legacy ports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use serde::{Deserialize, Serialize};

use super::{PciAddress, PciRoot};
use crate::platform::BusDevice;
use crate::state::{DeviceState, StateError};

/// Enhanced configuration access mechanism (PCI Express Base, section 7.2.2), with 4 KiB for each function. The range covers bus 0 of each
/// segment, in the order of the segments.
pub struct Ecam {
    root: Arc<PciRoot>,
}

impl Ecam {
    /// Size of the guest-physical memory range for one bus, in bytes.
    pub const SIZE: u64 = 1 << 20;

    /// Creates the mechanism for the buses of `root`.
    pub fn new(root: Arc<PciRoot>) -> Self {
        Self { root }
    }

    /// Returns the size of the guest-physical memory range for all segments, in bytes.
    pub fn size(&self) -> u64 {
        Self::SIZE * u64::from(self.root.segments())
    }

    /// Decodes an offset: segment in bits 20 and up, device in 19 to 15, function in 14 to 12, register in 11 to 0. The bus is 0.
    fn decode(offset: u64) -> Option<(PciAddress, u16)> {
        let segment = u16::try_from(offset / Self::SIZE).ok()?;
        let [register_low, low, high, ..] = offset.to_le_bytes();
        let (device, function) = (((high & 0xf) << 1) | (low >> 7), (low >> 4) & 7);
        let address = PciAddress { segment, bus: 0, device, function };
        Some((address, u16::from_le_bytes([register_low, low & 0xf])))
    }
}

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some((address, register)) = Self::decode(offset) {
            self.root.read_config(address, register, data);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some((address, register)) = Self::decode(offset) {
            self.root.write_config(address, register, data);
        }
    }
}

/// Kind and version of the saved state of [`ConfigPorts`].
const PORTS_STATE: (&str, u32) = ("pci-config-ports", 1);

/// Saved state of [`ConfigPorts`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigPortsState {
    /// Value of the address port.
    address: u32,
}

/// Configuration mechanism #1 (PCI Local Bus 3.0, section 3.2.2.3.2): an address port and a data port, for the first 256 bytes of
/// configuration space. The second byte of the address port is the reset control register of Intel's chipsets (ICH9 datasheet, section
/// 13.7.5). Firmware uses this register to reset the machine.
pub struct ConfigPorts {
    root: Arc<PciRoot>,
    address: AtomicU32,
    reset: Box<dyn Fn() + Send + Sync>,
}

impl ConfigPorts {
    /// First port.
    pub const BASE: u64 = 0xcf8;
    /// Number of ports: four for the address, four for the data.
    pub const SIZE: u64 = 8;
    /// Bit of the address port that enables accesses to configuration space through the data port.
    const ENABLE: u32 = 1 << 31;
    /// Offset of the reset control register from the first port. The register accepts only writes of one byte.
    const RESET_CONTROL: u64 = 1;
    /// Bit of the reset control register that resets the machine.
    const RESET_CPU: u8 = 1 << 2;

    /// Creates the ports for the buses of `root`. `reset` is called when the guest asks for a reset.
    pub fn new(root: Arc<PciRoot>, reset: Box<dyn Fn() + Send + Sync>) -> Self {
        Self { root, address: AtomicU32::new(0), reset }
    }

    /// Returns the state of the ports. Call this function while all vCPUs are stopped.
    ///
    /// # Errors
    /// This function never fails today.
    pub fn save(&self) -> Result<DeviceState, StateError> {
        let address = self.address.load(Ordering::Relaxed);
        DeviceState::new(PORTS_STATE.0, PORTS_STATE.1, &ConfigPortsState { address })
    }

    /// Restores `state`. Every address is valid, because a guest can write any value.
    ///
    /// # Errors
    /// The saved state is invalid. In this case nothing has changed.
    pub fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let ConfigPortsState { address } = state.payload(PORTS_STATE.0, PORTS_STATE.1)?;
        self.address.store(address, Ordering::Relaxed);
        Ok(())
    }

    /// Decodes an access: bus in bits 23 to 16 of the address port, device in 15 to 11, function in 10 to 8, register in 7 to 2.
    fn decode(&self, offset: u64) -> Option<(PciAddress, u16)> {
        let place = u8::try_from(offset.checked_sub(4)?).ok().filter(|place| *place < 4)?;
        let value = self.address.load(Ordering::Relaxed);
        let [register, low, bus, _] = value.to_le_bytes();
        let address = PciAddress { segment: 0, bus, device: low >> 3, function: low & 7 };
        (value & Self::ENABLE != 0).then_some((address, u16::from((register & 0xfc) | place)))
    }
}

impl BusDevice for ConfigPorts {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let (0, 4) = (offset, data.len()) {
            data.copy_from_slice(&self.address.load(Ordering::Relaxed).to_le_bytes());
        } else if let Some((address, register)) = self.decode(offset) {
            // Ignore the part of an access that is beyond the data port.
            let within = data.len().min(usize::from(4 - (register & 3)));
            self.root.read_config(address, register, &mut data[..within]);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (0, Ok(value)) = (offset, <[u8; 4]>::try_from(data)) {
            self.address.store(u32::from_le_bytes(value), Ordering::Relaxed);
        } else if let (Self::RESET_CONTROL, [value]) = (offset, data) {
            if value & Self::RESET_CPU != 0 {
                (self.reset)();
            }
        } else if let Some((address, register)) = self.decode(offset) {
            let within = data.len().min(usize::from(4 - (register & 3)));
            self.root.write_config(address, register, &data[..within]);
        }
    }
}
