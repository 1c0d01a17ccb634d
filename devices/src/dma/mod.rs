// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! DMA of devices whose accesses go through this process: those that the VMM emulates, and those of vfio-user servers.
//!
//! A device sees memory as [`DeviceMemory`]: all guest RAM, or, behind the virtio-iommu, the table of what its domain maps
//! ([`DmaTable`]). The engine fills the table by a [`TableMapper`] as it fills an address space of the host by others. The
//! table has a lock of its own, never the engine's: a device that copies does not wait for a MAP of another device.
//!
//! - **A copy** is made through a [`DmaView`], which holds the table for reading. An UNMAP takes it for writing, so it waits
//!   for copies under way, and slices of memory cannot outlive the view that they came from. Views are to be short: no view
//!   is held while a device waits for anything.
//! - **I/O of the host's kernel** into guest memory is a [`HostIo`]. An UNMAP has it cancelled and waits for its end, up to
//!   [`IO_DEADLINE`]. After that the device is given up, nothing of the range can be accessed anew, and the UNMAP fails: it
//!   is never answered while the kernel may still write.
//! - **An access that is not allowed** goes to the virtio-iommu's event queue ([`FaultSender`]).
//!
//! # Why not `vm_memory::iommu`
//! `IommuMemory` translates with an `Iotlb` in front of one `GuestMemoryBackend`. Chunks of windows could be a region of
//! such a back end, so the first three points could be built on it; the others speak against it:
//! - It tracks writes in a bitmap by IOVA, as vhost-user wants it, and its documentation sends everybody else away. Dirty
//!   RAM must be known by guest-physical address.
//! - Its slices live as long as the memory object, not as long as the guard of the translation: an UNMAP could be answered
//!   while somebody still holds one.
//! - It knows nothing of I/O of the host's kernel.
//! - Each access costs two range queries and two look-ups, and bounds that wrap around panic: they come from the guest.

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
