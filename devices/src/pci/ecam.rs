// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's ways to configuration space: memory-mapped (ECAM) and the two ports of old.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use serde::{Deserialize, Serialize};

use super::{PciAddress, PciRoot};
use crate::platform::BusDevice;
use crate::state::{DeviceState, StateError};

/// The enhanced configuration access mechanism (PCI Express Base, section 7.2.2): 4 KiB a function. That of bus 0 of each segment
/// follows on that of the one before.
pub struct Ecam {
    root: Arc<PciRoot>,
}

impl Ecam {
    /// Bytes of guest-physical memory that one bus takes.
    pub const SIZE: u64 = 1 << 20;

    /// The mechanism that leads to `root`.
    pub fn new(root: Arc<PciRoot>) -> Self {
        Self { root }
    }

    /// Bytes of guest-physical memory that it takes.
    pub fn size(&self) -> u64 {
        Self::SIZE * u64::from(self.root.segments())
    }

    /// Bus 0 of the segment in bits 20 and up, device in 19 to 15, function in 14 to 12, register below.
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
    /// The address port.
    address: u32,
}

/// Configuration mechanism #1 (PCI Local Bus 3.0, section 3.2.2.3.2): an address port and a data port, for the first
/// 256 bytes of configuration space. The second byte of the address port is the reset control register of Intel's chipsets (ICH9
/// datasheet, section 13.7.5), which firmware resets the machine by.
pub struct ConfigPorts {
    root: Arc<PciRoot>,
    address: AtomicU32,
    reset: Box<dyn Fn() + Send + Sync>,
}

impl ConfigPorts {
    /// First port.
    pub const BASE: u64 = 0xcf8;
    /// Ports: four of the address, four of the data.
    pub const SIZE: u64 = 8;
    /// Bit of the address port that makes the data port lead to configuration space.
    const ENABLE: u32 = 1 << 31;
    /// The reset control register: what is written to it is one byte.
    const RESET_CONTROL: u64 = 1;
    /// Of the reset control register: reset now.
    const RESET_CPU: u8 = 1 << 2;

    /// The ports that lead to `root`. A reset that the guest asks for is handed to `reset`.
    pub fn new(root: Arc<PciRoot>, reset: Box<dyn Fn() + Send + Sync>) -> Self {
        Self { root, address: AtomicU32::new(0), reset }
    }

    /// What the ports are. Called with all vCPUs stopped.
    ///
    /// # Errors
    /// None of today.
    pub fn save(&self) -> Result<DeviceState, StateError> {
        let address = self.address.load(Ordering::Relaxed);
        DeviceState::new(PORTS_STATE.0, PORTS_STATE.1, &ConfigPortsState { address })
    }

    /// Makes them what `state` says. Any address is one that a guest can have written.
    ///
    /// # Errors
    /// What of the state is refused. Nothing has changed then.
    pub fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let ConfigPortsState { address } = state.payload(PORTS_STATE.0, PORTS_STATE.1)?;
        self.address.store(address, Ordering::Relaxed);
        Ok(())
    }

    /// Bus in bits 23 to 16, device in 15 to 11, function in 10 to 8, register in 7 to 2.
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
            // An access that runs beyond the data port reaches no register there.
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
