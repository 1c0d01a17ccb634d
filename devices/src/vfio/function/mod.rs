// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI function outside this process, exposed as a function of the guest: configuration space, BARs and
//! interrupts.

mod bar_mapping;
mod bars;
mod capabilities;
mod config_view;
mod direct_areas;
mod examine;
#[cfg(test)]
pub(super) mod fake;
mod host_function;
mod host_watch;
mod interrupts;
mod intx;
mod open_device;
mod sysfs;
#[cfg(test)]
mod tests;
mod vfio_function;
mod vfio_pci_device;

pub(super) use bar_mapping::BarMapping;
pub(super) use host_function::{ConfigAccess, HostFunction, IrqKind, Region};
pub use host_watch::NOTICES_ROLE;
pub use sysfs::HostFunctionPath;
pub use vfio_pci_device::VfioPciDevice;
