// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VFIO passthrough. Exposes functions of the host to the guest, and manages the host side of their DMA.
//!
//! - [`function`] exposes a host function as a PCI function of the guest ([`VfioPciDevice`]).
//! - [`space`] holds the host's I/O address spaces ([`DmaSpace`]): containers of VFIO's type 1 back end or IOASes of
//!   IOMMUFD ([`HostIommu`]). A device behind the virtual IOMMU gets its own address space, which starts empty and holds
//!   the mappings of its [`VfioMapper`]. Devices without a virtual IOMMU share an address space that holds all guest RAM
//!   ([`map_guest_ram`]).
//! - [`user`] adds functions that another process emulates (vfio-user).

mod error;
mod function;
mod ioctl;
mod space;
pub mod user;

pub use error::{Holder, VfioPciError};
pub use function::{HostFunctionPath, NOTICES_ROLE, VfioPciDevice};
pub use space::{DmaSpace, GuestRamMapping, HostIommu, VfioMapper, map_guest_ram};
