// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the engine needs of the host: mappers, guest RAM and window memory.

use std::io;
use std::ops::RangeInclusive;

use thiserror::Error;
use vm_memory::VolatileSlice;

use crate::EndpointId;

bitflags::bitflags! {
    /// What a device may do with mapped memory. Same bits as `VIRTIO_IOMMU_MAP_F_READ` and `_WRITE`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Permissions: u32 {
        /// The device may read the memory.
        const READ = 1;
        /// The device may write the memory.
        const WRITE = 2;
    }
}

/// Why a mapper could not map.
#[derive(Debug, Error)]
pub enum MapError {
    /// A limit of the host is reached: its number of mappings, or the memory that may be pinned. The guest sees
    /// `NOMEM`.
    #[error("a host limit on mappings or pinned memory is reached")]
    NoResources,
    /// Something is mapped in the range already. The guest sees `DEVERR`: the engine checks before it asks.
    #[error("a mapping exists in the range already")]
    Exists,
    /// The host refused for another reason. The guest sees `DEVERR`.
    #[error("the host refused to map: {0}")]
    Host(#[from] io::Error),
}

/// Why a mapper could not unmap.
#[derive(Debug, Error)]
pub enum UnmapError {
    /// The range is not exactly one or several mappings.
    #[error("the range is not made of whole mappings")]
    NotMapped,
    /// The host refused. The mapping is still there.
    #[error("the host refused to unmap: {0}")]
    Host(#[from] io::Error),
}

/// What a mapper can translate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapperLimits {
    /// Bit n: pages of 2^n bytes can be mapped. The lowest bit is the granule.
    pub page_size_mask: u64,
    /// The IOVAs that can be mapped. The host reserves all others.
    pub iova_ranges: Vec<RangeInclusive<u64>>,
    /// How many mappings there can be at once; `None` when the host names no limit. The mapper enforces it with
    /// [`MapError::NoResources`]. The engine uses it to refuse early what cannot fit.
    pub max_mappings: Option<u32>,
}

/// Names a set of address spaces among which the host can move endpoints while they run, such as those of one iommufd.
/// The numbers are the VMM's to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MapperGroup(pub u32);

/// An I/O address space of the host, which translates for one endpoint or several.
///
/// It starts empty and holds only what the engine maps. The engine is given one for each endpoint, with that endpoint
/// attached. Where a [`group`](Self::group) allows it, the endpoints of a domain share one of them, so that a mapping
/// costs one call and not one for each endpoint. Address spaces without endpoints are kept until endpoints leave
/// their domain.
pub trait DmaMapper: Send {
    /// Lets the device reach `memory` at `iova`, `memory.len()` bytes long, with `permissions` and no more.
    ///
    /// The engine calls it with ranges that are aligned on its granule, overlap no former mapping, and lie within
    /// [`MapperLimits::iova_ranges`]. The memory stays valid until the mapping is gone.
    ///
    /// # Errors
    /// On error nothing is mapped.
    fn map(&mut self, iova: u64, memory: VolatileSlice<'_>, permissions: Permissions) -> Result<(), MapError>;

    /// Unmaps `[iova, iova + len)`: exactly what one [`map`](Self::map) call mapped, or several whose ranges follow
    /// each other. When it returns, the device no longer reaches any of the memory (translation caches are flushed).
    ///
    /// # Errors
    /// On error everything in the range is still mapped.
    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError>;

    /// What this mapper can translate. It does not change.
    fn limits(&self) -> MapperLimits;

    /// Whether the device still reaches the very memory of a chunk that the guest does not see. It does not change. `false`: it
    /// reaches chunks through the place where the guest sees them, which holds other memory then; no chunk stays mapped for
    /// it over a reset of the VM.
    fn reaches_hidden_chunks(&self) -> bool {
        true
    }

    /// Whether the host makes page tables for it, in the kernel's memory, which it may keep after an unmap, and pins what is
    /// mapped. It does not change. No default: whoever wraps a mapper has to pass its answer on.
    fn keeps_page_tables(&self) -> bool;

    /// The group of address spaces that this one belongs to. It does not change. `None`: its endpoint cannot leave
    /// it, as with a VFIO type 1 container while the device is open.
    fn group(&self) -> Option<MapperGroup> {
        None
    }

    /// Attaches `endpoint` to this address space and detaches it from the one of the same [`group`](Self::group) that
    /// it was in. Meanwhile the endpoint may reach nothing. It never reaches anything that neither of the two maps.
    ///
    /// The engine calls it only for a group, and only for endpoints that were added with a mapper of that group. What
    /// this address space maps lies within the limits of the mapper that `endpoint` was added with.
    ///
    /// # Errors
    /// On error the endpoint stays where it was.
    fn adopt(&mut self, endpoint: EndpointId) -> io::Result<()> {
        let _ = endpoint;
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Kind of memory that the guest sees and that is not RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceMemoryKind {
    /// Registers or memory on a device. The host pins nothing to map it.
    Registers,
    /// Pages of the host, such as those of a file. The host pins them like RAM, so they count toward
    /// [`max_mapped_bytes`](crate::Limits::max_mapped_bytes).
    Pages,
}

/// Callback of [`GuestRam::device`], which gets the memory.
pub type ThenDevice<'t> = &'t mut dyn FnMut(VolatileSlice<'_>, DeviceMemoryKind);

/// Guest RAM, and what else of the guest's memory can be mapped.
pub trait GuestRam: Send + Sync {
    /// The memory at `[gpa, gpa + len)`; `None` unless all of it is guest RAM and contiguous in host memory. Device
    /// memory, such as the shared memory region of the windows, is not RAM.
    fn slice(&self, gpa: u64, len: u64) -> Option<VolatileSlice<'_>>;

    /// The longest part of `[gpa, gpa + len)` that begins at `gpa` and is contiguous in host memory; `None` when there
    /// is no RAM at `gpa`. The engine asks for it when [`slice`](Self::slice) fails, part by part, so that a guest may
    /// map a range that spans memory regions. The default serves implementations where regions never touch.
    fn prefix(&self, gpa: u64, len: u64) -> Option<VolatileSlice<'_>> {
        self.slice(gpa, len)
    }

    /// All of it: guest-physical address and length in bytes of each region. Bypass maps these.
    fn regions(&self) -> Vec<(u64, u64)>;

    /// True if the device offers `MMIO`. A MAP without the flag finds memory of devices anyway. It does not change.
    fn offers_mmio(&self) -> bool {
        false
    }

    /// Calls `then` with the memory at `[gpa, gpa + len)` and its kind. All of it must be memory of one device that the guest
    /// sees there, be contiguous in host memory, and allow `permissions`. The slice is valid during
    /// the call. Mappers only take its address.
    ///
    /// Before the guest's view of the memory goes,
    /// [`Engine::revoke_device_memory`](crate::Engine::revoke_device_memory) must be called.
    fn device(&self, gpa: u64, len: u64, permissions: Permissions, then: ThenDevice<'_>) {
        let _ = (gpa, len, permissions, then);
    }
}

/// Why window memory could not be backed or given back.
#[derive(Debug, Error)]
pub enum ChunkError {
    /// No chunk is free, or the host is out of memory. The guest sees `NOMEM`.
    #[error("no memory for another chunk")]
    NoResources,
    /// The host refused for another reason. The guest sees `DEVERR`.
    #[error("the host refused: {0}")]
    Host(#[from] io::Error),
}

/// Host memory behind the shared memory region, in chunks of one size.
///
/// A chunk's index says where it is in the region: at `index * chunk_size`.
pub trait ChunkStore: Send {
    /// Bytes per chunk, a power of two. It does not change.
    fn chunk_size(&self) -> u64;

    /// Bytes of the whole region, a multiple of the chunk size. It does not change.
    fn region_size(&self) -> u64;

    /// Backs one chunk with memory that reads as zero, shows it to the guest, and returns its index.
    ///
    /// # Errors
    /// On error nothing has changed.
    fn back(&mut self) -> Result<u32, ChunkError>;

    /// As [`back`](Self::back), for the chunk of this index. A restored state needs this.
    ///
    /// # Errors
    /// On error nothing has changed; [`io::ErrorKind::InvalidInput`] if there is no such place, or a chunk is there.
    fn back_at(&mut self, index: u32) -> Result<(), ChunkError> {
        let _ = index;
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    /// The memory of a backed chunk; `None` for any other index.
    fn memory(&self, index: u32) -> Option<VolatileSlice<'_>>;

    /// Parks a backed chunk: hides it from the guest, then zeroes it. Its memory stays, since mappers have it mapped.
    /// A chunk that is parked already is zeroed again.
    ///
    /// # Errors
    /// On error the guest may still see the chunk, and only [`release`](Self::release) may follow.
    fn park(&mut self, index: u32) -> Result<(), ChunkError> {
        let _ = index;
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    /// Shows a parked chunk to the guest again, at the same place and with the same memory. It counts as backed from
    /// then on.
    ///
    /// # Errors
    /// On error it is still parked.
    fn unpark(&mut self, index: u32) -> Result<(), ChunkError> {
        let _ = index;
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    /// Hides a backed or parked chunk from the guest, and drops or zeroes its memory. The engine calls it only after
    /// every mapper has unmapped the chunk.
    ///
    /// # Errors
    /// On error the chunk is lost: the store does not hand it out again, and the engine goes on counting it as backed, until
    /// [`recover`](Self::recover) returns it.
    fn release(&mut self, index: u32) -> Result<(), ChunkError>;

    /// Tries once more to give back one of the chunks that were lost, each in its turn. Returns the chunk, which is released then like any
    /// other; `None` if there is none, or it is still lost. The engine calls it once with each WINDOW_ADD and WINDOW_DEL, and when it is reset
    /// until it returns `None`.
    fn recover(&mut self) -> Option<u32> {
        None
    }
}
