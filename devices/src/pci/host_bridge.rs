// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host bridge of a segment, at `ssss:00:00.0`.

use std::io;

use super::{ConfigSpace, FunctionConfig, Identity, PciDevice};
use crate::state::{DeviceState, StateError};

/// Identity of a host bridge. Firmware recognises the machine by this identity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostBridgeKind {
    /// Generic PCI Express host bridge of the Linux PCI ID list.
    #[default]
    Generic,
    /// Cloud Hypervisor's host bridge. EDK2's build for Cloud Hypervisor recognises its machine by this host bridge
    /// (`OvmfPkg/Include/IndustryStandard/CloudHv.h`).
    CloudHypervisor,
}

impl HostBridgeKind {
    /// Returns vendor and device ID.
    const fn identity(self) -> (u16, u16) {
        match self {
            Self::Generic => (0x1b36, 0x0008),
            Self::CloudHypervisor => (0x8086, 0x0d57),
        }
    }
}

/// Base class bridge, subclass host.
const CLASS: u32 = 0x06_0000;

/// Kind and version of the saved state.
const STATE: (&str, u32) = ("host-bridge", 1);

/// Host bridge without registers beyond the standard header.
pub(super) struct HostBridge {
    id: String,
    config: FunctionConfig,
}

impl HostBridge {
    pub(super) fn new(kind: HostBridgeKind, segment: u16) -> Self {
        let id = if segment == 0 { "_host_bridge".to_string() } else { format!("_host_bridge{segment}") };
        let (vendor, device) = kind.identity();
        let identity = Identity { vendor, device, subsystem_vendor: 0, subsystem: 0, class: CLASS, revision: 0 };
        Self { id, config: FunctionConfig::new(ConfigSpace::new(identity)) }
    }
}

impl PciDevice for HostBridge {
    fn id(&self) -> &str {
        &self.id
    }
    fn config(&self) -> Option<&FunctionConfig> {
        Some(&self.config)
    }
    fn reset(&self) -> io::Result<()> {
        self.config.reset();
        Ok(())
    }
    fn save(&self) -> Result<DeviceState, StateError> {
        DeviceState::new(STATE.0, STATE.1, &self.config.state())
    }
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        self.config.restore(&state.payload(STATE.0, STATE.1)?)
    }
}
