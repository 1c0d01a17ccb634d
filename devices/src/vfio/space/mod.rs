// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host I/O address spaces and their mappings.

mod dma_space;
mod endpoint_devices;
mod guest_ram;
mod host_iommu;
mod ioas;
mod iommufd_ioctl;
mod type1_info;
mod unmaps;
mod vfio_mapper;

pub use dma_space::DmaSpace;
pub(super) use endpoint_devices::Attachable;
pub use guest_ram::{GuestRamMapping, map_guest_ram};
pub use host_iommu::HostIommu;
pub use vfio_mapper::VfioMapper;
