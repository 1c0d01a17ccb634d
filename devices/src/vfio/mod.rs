// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VFIO: functions of the host passed through to the guest, and the host side of their DMA.
//!
//! A device behind the virtual IOMMU gets an address space of its own ([`DmaSpace`]), which starts empty and holds what
//! [`VfioMapper`] puts there; devices without one share a space that holds all guest RAM ([`map_guest_ram`]). Spaces are
//! containers of VFIO's type 1 back end or IOASes of IOMMUFD ([`HostIommu`]).
//!
//! Functions that another process emulates come by [`user`].

mod bars;
mod capabilities;
mod device;
mod error;
#[cfg(test)]
mod fake;
mod guest_ram;
mod host;
mod interrupts;
mod ioas;
mod ioctl;
mod iommu_info;
mod iommufd_ioctl;
mod layout;
mod mapper;
mod mmap;
mod notices;
mod pieces;
mod residents;
mod space;
mod sysfs;
#[cfg(test)]
mod tests;
mod throttle;
pub mod user;
mod view;

pub use device::VfioPciDevice;
pub use error::{Holder, VfioPciError};
pub use guest_ram::{GuestRamMapping, map_guest_ram};
pub use mapper::VfioMapper;
pub use space::{DmaSpace, HostIommu};
pub use sysfs::HostFunctionPath;
