// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI Express: configuration space, MSI-X, and the root buses with their ECAM.

mod address;
mod bar;
mod claims;
mod config_space;
mod device;
mod ecam;
mod error;
mod function_config;
mod host_bridge;
mod hotplug;
mod msix;
pub mod regs;
mod root;
mod split;
#[cfg(test)]
mod tests;

pub use address::PciAddress;
pub use bar::{Bar, BarKind};
pub use claims::BarWindows;
pub use config_space::{Capability, ConfigSpace, ConfigState, Identity, WrittenBytes};
pub use device::PciDevice;
pub use ecam::{ConfigPorts, Ecam};
pub use error::PciError;
pub use function_config::FunctionConfig;
pub use host_bridge::HostBridgeKind;
pub use hotplug::{HotplugBank, HotplugRegisters};
pub use msix::{CONTROL_ENABLE, CONTROL_FUNCTION_MASK, ENTRY_SIZE, MsixError, MsixState, MsixTable, MsixVectorState};
pub use root::{FunctionState, PciRoot};
