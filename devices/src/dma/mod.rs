// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! DMA of devices whose accesses go through this process: emulated devices, and devices of vfio-user servers.
//!
//! A device accesses memory through [`DeviceMemory`]. Without an IOMMU, the device can access all guest RAM. Behind the virtio-iommu, the
//! device can access only the mappings of its domain. A table ([`DmaTable`]) contains these mappings. The engine fills the table through a
//! [`TableMapper`]. The table has its own lock, separate from the engine's lock. So a device that copies data does not wait for a MAP of
//! another device.
//!
//! - **Copies** use a [`DmaView`], which holds a read lock on the table. An UNMAP takes the write lock, so it waits for copies in progress.
//!   Slices of memory cannot outlive their view. Keep views short: do not hold a view while a device waits for anything.
//! - **I/O of the host kernel** in guest memory uses a [`HostIo`]. An UNMAP first denies new accesses to the range. Then the UNMAP cancels
//!   the I/O, and waits at most [`IO_DEADLINE`] until the I/O ends. If the I/O still runs, the device fails until its driver resets it, and
//!   the UNMAP fails. The range stays inaccessible for new accesses. An UNMAP never succeeds while the kernel may still write.
//! - **Denied accesses** are reported on the virtio-iommu's event queue ([`FaultSender`]).
//!
//! # Why not `vm_memory::iommu`
//! `IommuMemory` translates addresses with an `Iotlb` and one `GuestMemoryBackend`. Window chunks could be a region of this back end. But
//! `IommuMemory` is unsuitable for these reasons:
//! - `IommuMemory` tracks writes in a bitmap by IOVA, for vhost-user, and its documentation advises against other uses of this bitmap.
//!   Carom needs a bitmap of written RAM by guest-physical address.
//! - Slices may outlive the guard of the translation, because they borrow from the memory object. So an UNMAP could succeed while another
//!   thread still uses a slice.
//! - `IommuMemory` does not support I/O of the host kernel.
//! - Each access costs two range queries and two look-ups.
//! - `IommuMemory` panics if bounds wrap around, and the guest controls these bounds.

#[cfg(test)]
mod batch_tests;
mod faults;
mod host_io;
mod memory;
mod near_memory;
mod table;
mod table_mapper;
mod view;

pub use self::faults::{FAULTS_ROLE, FaultRelay, FaultReporter, FaultReports, FaultSender, Stopped, fault_relay};
pub use self::host_io::{HostIo, IO_DEADLINE, IoOwner};
pub use self::memory::DeviceMemory;
pub(crate) use self::near_memory::NearMemory;
pub use self::table::{Backing, DmaTable};
pub use self::table_mapper::TableMapper;
pub(crate) use self::table_mapper::{MapperTable, table_limits};
pub use self::view::DmaView;
