// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VFIO: functions of the host passed through to the guest, and the host side of their DMA.
//!
//! A device behind the virtual IOMMU gets a container of its own, which starts empty and holds what [`VfioMapper`] puts
//! there; devices without one share a container that holds all guest RAM ([`map_guest_ram`]).

mod bars;
mod capabilities;
mod container;
mod device;
mod error;
#[cfg(test)]
mod fake;
mod host;
mod interrupts;
mod ioctl;
mod iommu_info;
mod layout;
mod mapper;
mod mmap;
mod pieces;
mod sysfs;
#[cfg(test)]
mod tests;
mod throttle;
mod view;

pub use container::{GuestRamMapping, map_guest_ram, open_container};
pub use device::VfioPciDevice;
pub use error::{Holder, VfioPciError};
pub use mapper::VfioMapper;
pub use sysfs::HostFunctionPath;
