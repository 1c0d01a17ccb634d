// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VFIO: functions of the host passed through to the guest, and the host side of their DMA.
//!
//! - [`function`] makes a function of the host a PCI function of the guest ([`VfioPciDevice`]).
//! - [`space`] holds the host's I/O address spaces ([`DmaSpace`]): containers of VFIO's type 1 back end or IOASes of
//!   IOMMUFD ([`HostIommu`]). A device behind the virtual IOMMU gets a space of its own, which starts empty and holds what
//!   [`VfioMapper`] puts there. Devices without a virtual IOMMU share a space that holds all guest RAM ([`map_guest_ram`]).
//! - [`user`] brings functions that another process emulates (vfio-user).

mod error;
mod function;
mod ioctl;
mod space;
pub mod user;

pub use error::{Holder, VfioPciError};
pub use function::{HostFunctionPath, NOTICES_ROLE, VfioPciDevice};
pub use space::{DmaSpace, GuestRamMapping, HostIommu, VfioMapper, map_guest_ram};
