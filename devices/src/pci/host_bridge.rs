// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The host bridge of a segment, at `ssss:00:00.0`.

use std::io;
use std::sync::Mutex;

use super::{Bar, ConfigSpace, Identity, PciDevice};
use crate::state::{DeviceState, StateError};
use crate::sync::lock;

/// Vendor and device ID of a generic PCI Express host bridge, as the Linux PCI ID list has them.
const VENDOR: u16 = 0x1b36;
const DEVICE: u16 = 0x0008;
/// Base class bridge, subclass host.
const CLASS: u32 = 0x06_0000;

/// Kind and version of its saved state.
const STATE: (&str, u32) = ("host-bridge", 1);

/// A host bridge with no register of its own beyond the standard header.
pub(super) struct HostBridge {
    id: String,
    config: Mutex<ConfigSpace>,
}

impl HostBridge {
    pub(super) fn new(segment: u16) -> Self {
        let id = if segment == 0 { "_host_bridge".to_string() } else { format!("_host_bridge{segment}") };
        Self { id, config: Mutex::new(Self::power_on()) }
    }

    fn power_on() -> ConfigSpace {
        ConfigSpace::new(Identity {
            vendor: VENDOR,
            device: DEVICE,
            subsystem_vendor: 0,
            subsystem: 0,
            class: CLASS,
            revision: 0,
        })
    }
}

impl PciDevice for HostBridge {
    fn id(&self) -> &str {
        &self.id
    }
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        lock(&self.config).read(offset, data);
    }
    fn write_config(&self, offset: u16, data: &[u8]) {
        lock(&self.config).write(offset, data);
    }
    fn bars(&self) -> Vec<Bar> {
        Vec::new()
    }
    fn assign_bar(&self, _: u8, _: u64) {}
    fn bar_address(&self, _: u8) -> Option<u64> {
        None
    }
    fn bar_moved(&self, _: u8, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn read_bar(&self, _: u8, _: u64, _: &mut [u8]) {}
    fn write_bar(&self, _: u8, _: u64, _: &[u8]) {}
    fn reset(&self) -> io::Result<()> {
        *lock(&self.config) = Self::power_on();
        Ok(())
    }
    fn save(&self) -> Result<DeviceState, StateError> {
        DeviceState::new(STATE.0, STATE.1, &lock(&self.config).state())
    }
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        lock(&self.config).restore(&state.payload(STATE.0, STATE.1)?)
    }
}
