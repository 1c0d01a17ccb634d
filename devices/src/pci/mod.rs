// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI Express: configuration space, MSI-X, the root bus with its ECAM.

mod address;
mod bar;
mod config_space;
mod device;
mod msix;
pub mod regs;

pub use address::PciAddress;
pub use bar::{Bar, BarKind};
pub use config_space::{Capability, ConfigSpace, Identity};
pub use device::PciDevice;
pub use msix::{CONTROL_ENABLE, CONTROL_FUNCTION_MASK, ENTRY_SIZE, MsixError, MsixTable};
