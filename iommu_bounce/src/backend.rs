// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host services that the engine needs: mappers, guest RAM and window memory.

use std::io;
use std::ops::RangeInclusive;

use thiserror::Error;
use vm_memory::VolatileSlice;

use crate::EndpointId;

bitflags::bitflags! {
    /// Allowed accesses of a device to mapped memory. The bits are the same as `VIRTIO_IOMMU_MAP_F_READ` and `VIRTIO_IOMMU_MAP_F_WRITE`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Permissions: u32 {
        /// The device may read the memory.
        const READ = 1;
        /// The device may write the memory.
        const WRITE = 2;
    }
}

/// Reason why a mapper could not map memory.
#[derive(Debug, Error)]
pub enum MapError {
    /// The host or the server of the device has reached a limit on mappings, regions or pinned memory. The guest sees `NOMEM`.
    #[error(
        "the number of mappings or the pinned memory has reached a limit: for a host device, raise dma_entry_limit of vfio_iommu_type1 or ulimit -l; for a vfio-user or vhost-user device, the limit is the server's"
    )]
    NoResources,
    /// The range overlaps an existing mapping. The engine checks for overlaps before it calls the mapper, so this is a failure of the host.
    /// The guest sees `DEVERR`.
    #[error("the range overlaps an existing mapping")]
    Exists,
    /// The host rejected the operation for another reason. The guest sees `DEVERR`.
    #[error("the host's map call failed: {0}")]
    Host(#[from] io::Error),
}

/// Reason why a mapper could not unmap a range.
#[derive(Debug, Error)]
pub enum UnmapError {
    /// The range does not consist of complete mappings.
    #[error("the range is not mapped, or it starts or ends inside a mapping")]
    NotMapped,
    /// The host rejected the unmap. The mapping still exists.
    #[error("the host's unmap call failed: {0}")]
    Host(#[from] io::Error),
}

/// Limits of a mapper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapperLimits {
    /// Supported page sizes: bit n stands for pages of 2^n bytes. The lowest set bit is the granule.
    pub page_size_mask: u64,
    /// IOVAs that can be mapped. The host reserves all other IOVAs.
    pub iova_ranges: Vec<RangeInclusive<u64>>,
    /// Maximum number of mappings at a time, or `None` if the host states no limit. The mapper enforces the limit with
    /// [`MapError::NoResources`]. The engine also rejects an ATTACH early if the mappings of the domain exceed the limit.
    pub max_mappings: Option<u32>,
}

/// Number that identifies a set of address spaces, such as the address spaces of one iommufd. The host can move running endpoints between
/// the address spaces of a set. The VMM chooses the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MapperGroup(pub u32);

/// I/O address space of the host, which translates for one or more endpoints.
///
/// An address space starts empty, and holds only what the engine maps. The engine receives one address space for each endpoint, with the
/// endpoint attached. If the endpoints of a domain are in the same [`group`](Self::group), they share one address space. A mapping then
/// takes one call instead of one call for each endpoint. The engine also keeps address spaces without endpoints. When an endpoint leaves a
/// shared address space, it moves into one of these empty address spaces.
pub trait DmaMapper: Send {
    /// Maps `memory` at `iova` for the device, with exactly these `permissions`.
    ///
    /// The engine guarantees that the range is aligned to the engine's granule, does not overlap an existing mapping, and lies within
    /// [`MapperLimits::iova_ranges`]. The memory stays valid as long as the mapping exists.
    ///
    /// # Errors
    /// After an error, nothing is mapped.
    fn map(&mut self, iova: u64, memory: VolatileSlice<'_>, permissions: Permissions) -> Result<(), MapError>;

    /// Unmaps `[iova, iova + len)`: exactly the range of one [`map`](Self::map) call, or of several calls with adjacent ranges.
    /// On return, the device can no longer access the memory (translation caches are flushed).
    ///
    /// # Errors
    /// After an error, the whole range is still mapped.
    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError>;

    /// Returns the limits of this mapper. The limits do not change.
    fn limits(&self) -> MapperLimits;

    /// True if a mapped chunk stays valid for the device while the chunk is hidden from the guest. False if the device accesses a chunk by
    /// the chunk's guest-physical address, which a hidden chunk does not have. If the answer is false, the engine unmaps all chunks of the
    /// device on a reset of the VM, instead of parking them. The answer does not change.
    fn maps_hidden_chunks(&self) -> bool {
        true
    }

    /// True if the host kernel pins mapped memory and builds page tables for this address space. The kernel may keep the page
    /// tables after an unmap. The answer does not change. There is no default, because a wrapper of a mapper must forward the
    /// answer.
    fn keeps_page_tables(&self) -> bool;

    /// Returns the group of this address space. The group does not change. `None` means that the endpoint cannot leave the address space,
    /// as with a VFIO type 1 container while the device is open.
    fn group(&self) -> Option<MapperGroup> {
        None
    }

    /// Attaches `endpoint` to this address space, and detaches it from its previous address space in the same [`group`](Self::group).
    /// During the change, the endpoint may have no access to memory at all. The endpoint can never access memory that neither the old nor
    /// the new address space maps.
    ///
    /// The engine calls this method only if the address space has a group, and only for endpoints that were added with a mapper of this
    /// group. Everything that this address space maps lies within the limits of the mapper that `endpoint` was added with.
    ///
    /// # Errors
    /// After an error, the endpoint is still in its previous address space.
    fn adopt(&mut self, endpoint: EndpointId) -> io::Result<()> {
        let _ = endpoint;
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Kind of guest-visible memory that is not RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceMemoryKind {
    /// Registers or memory of a device. The host pins no pages for such a mapping.
    Registers,
    /// Pages of the host, such as pages of a file. The host pins them like RAM, so they count towards
    /// [`max_mapped_bytes`](crate::Limits::max_mapped_bytes).
    Pages,
}

/// Callback of [`GuestRam::device`] that receives the memory.
pub type ThenDevice<'t> = &'t mut dyn FnMut(VolatileSlice<'_>, DeviceMemoryKind);

/// Guest RAM, and other mappable memory of the guest.
pub trait GuestRam: Send + Sync {
    /// Returns the memory at `[gpa, gpa + len)`. Returns `None` unless all of the range is guest RAM and contiguous in host
    /// memory. Device memory, such as the shared memory region of the windows, is not RAM.
    fn slice(&self, gpa: u64, len: u64) -> Option<VolatileSlice<'_>>;

    /// Returns the longest part of `[gpa, gpa + len)` that starts at `gpa` and is contiguous in host memory. Returns `None` if there is no
    /// RAM at `gpa`. If [`slice`](Self::slice) fails, the engine asks for the parts one by one, so that a guest can map a range that spans
    /// memory regions. The default implementation is only for RAM without adjacent regions.
    fn prefix(&self, gpa: u64, len: u64) -> Option<VolatileSlice<'_>> {
        self.slice(gpa, len)
    }

    /// Returns the guest-physical address and length in bytes of each region of RAM. Bypass maps these regions.
    fn regions(&self) -> Vec<(u64, u64)>;

    /// True if the virtio-iommu offers the feature `MMIO`. A MAP without the MMIO flag can map device memory even if the feature is not
    /// offered. The answer does not change.
    fn offers_mmio(&self) -> bool {
        false
    }

    /// Calls `then` with the memory at `[gpa, gpa + len)` and its kind, if the guest sees memory of one device in the whole range. The
    /// memory must also be contiguous in host memory and allow `permissions`. Otherwise, `then` is not called. The slice is valid during
    /// the call of `then`. Mappers use only the address of the slice.
    ///
    /// Before the guest's view of the memory is removed, the VMM must call
    /// [`Engine::revoke_device_memory`](crate::Engine::revoke_device_memory).
    fn device(&self, gpa: u64, len: u64, permissions: Permissions, then: ThenDevice<'_>) {
        let _ = (gpa, len, permissions, then);
    }
}

/// Reason why window memory could not be backed or released.
#[derive(Debug, Error)]
pub enum ChunkError {
    /// No chunk is free, or the host is out of a resource, such as memory or open files. The guest sees `NOMEM`.
    #[error(
        "no window chunk is free, or the host is out of memory or open files: use larger windows, free host memory, or raise the limit on open files (ulimit -n)"
    )]
    NoResources,
    /// The host rejected the operation for another reason. The guest sees `DEVERR`.
    #[error("the host rejected the operation: {0}")]
    Host(#[from] io::Error),
}

/// Host memory of the shared memory region, in chunks of one size.
///
/// The index of a chunk gives its offset in the region: `index * chunk_size`.
pub trait ChunkStore: Send {
    /// Returns the size of a chunk in bytes, a power of two. The size does not change.
    fn chunk_size(&self) -> u64;

    /// Returns the size of the whole region in bytes, a multiple of the chunk size. The size does not change.
    fn region_size(&self) -> u64;

    /// Backs one chunk with zeroed memory, makes it visible to the guest, and returns its index.
    ///
    /// # Errors
    /// After an error, nothing has changed.
    fn back(&mut self) -> Result<u32, ChunkError>;

    /// Does the same as [`back`](Self::back), with the chunk whose index is `index`. The engine calls this method when it restores a state.
    ///
    /// # Errors
    /// After an error, nothing has changed. The error is [`io::ErrorKind::InvalidInput`] if the index is out of range or the
    /// chunk is already backed.
    fn back_at(&mut self, index: u32) -> Result<(), ChunkError> {
        let _ = index;
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    /// Returns the memory of a backed chunk, or `None` for any other index.
    fn memory(&self, index: u32) -> Option<VolatileSlice<'_>>;

    /// Parks a backed chunk: hides it from the guest, then zeroes it. The chunk's memory stays allocated, because mappers still map it for
    /// devices. If the chunk is already parked, the store zeroes it again.
    ///
    /// # Errors
    /// After an error, the chunk may still be visible to the guest, and the engine may only call [`release`](Self::release) for the chunk.
    fn park(&mut self, index: u32) -> Result<(), ChunkError> {
        let _ = index;
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    /// Makes a parked chunk visible to the guest again, at the same place and with the same memory. The chunk then counts as backed again.
    ///
    /// # Errors
    /// After an error, the chunk is still parked.
    fn unpark(&mut self, index: u32) -> Result<(), ChunkError> {
        let _ = index;
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    /// Hides a backed or parked chunk from the guest, and drops or zeroes its memory. The engine calls this only after every
    /// mapper has unmapped the chunk.
    ///
    /// # Errors
    /// After an error, the chunk is lost. The store does not return the lost chunk from `back`. The engine counts the chunk as backed until
    /// [`recover`](Self::recover) returns it.
    fn release(&mut self, index: u32) -> Result<(), ChunkError>;

    /// Retries the release of one lost chunk. Successive calls retry the lost chunks in turn. Returns the chunk if it is now released, or
    /// `None` if no chunk is lost or the retry failed. The engine calls this function once for each valid WINDOW_ADD and WINDOW_DEL. On a
    /// reset of the device, the engine calls the function until it returns `None`.
    fn recover(&mut self) -> Option<u32> {
        None
    }
}
