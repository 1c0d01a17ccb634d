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
    /// A limit of the host is reached: its number of mappings, or the memory that may be pinned. The guest sees `NOMEM`.
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
    /// The IOVAs that can be mapped; what lies between is reserved by the host.
    pub iova_ranges: Vec<RangeInclusive<u64>>,
    /// How many `map` calls can be outstanding at once; `None` when the host names no limit. The mapper itself enforces
    /// it with [`MapError::NoResources`]; the engine uses it to refuse early what cannot fit.
    pub max_mappings: Option<u32>,
}

/// Names a set of address spaces among which the host can move endpoints while they run, such as those of one iommufd.
/// The numbers are the VMM's to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MapperGroup(pub u32);

/// An I/O address space of the host, and the endpoint that it translates, or several of them.
///
/// An address space starts empty and holds only what the engine has put there. The engine is given one for each endpoint,
/// with that endpoint in it. Where a [`group`](Self::group) allows it, the endpoints of a domain then share one of them,
/// so that a mapping costs one call and not one for each endpoint; those left over wait for when endpoints part again.
pub trait DmaMapper: Send {
    /// Lets the device reach `memory` at `iova`, `memory.len()` bytes long, with `permissions` and no more.
    ///
    /// The engine calls it with ranges that are aligned on its granule, overlap no former mapping, and lie within
    /// [`MapperLimits::iova_ranges`]. The memory stays valid until the mapping is gone.
    ///
    /// # Errors
    /// On error nothing is mapped.
    fn map(&mut self, iova: u64, memory: VolatileSlice<'_>, permissions: Permissions) -> Result<(), MapError>;

    /// Takes `[iova, iova + len)` away: exactly one or several former [`map`](Self::map) calls that follow each other.
    /// When it returns, the device reaches none of the memory any more (translation caches are flushed).
    ///
    /// # Errors
    /// On error everything in the range is still mapped.
    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError>;

    /// What this mapper can translate. It does not change.
    fn limits(&self) -> MapperLimits;

    /// The set of address spaces that this one belongs to. It does not change. `None`: its endpoint is bound to it, as
    /// that of a VFIO type 1 container is while its device is open.
    fn group(&self) -> Option<MapperGroup> {
        None
    }

    /// Has the host translate `endpoint` with this address space from now on, instead of with the one that did so until
    /// now, which is of the same [`group`](Self::group). On the way the endpoint may reach nothing, but never anything
    /// else than what one of the two maps.
    ///
    /// The engine calls it only for a group, and only for endpoints that were added with a mapper of that group. What
    /// this address space maps lies within the limits of the mapper that `endpoint` was added with.
    ///
    /// # Errors
    /// On error the endpoint is translated as before.
    fn adopt(&mut self, endpoint: EndpointId) -> io::Result<()> {
        let _ = endpoint;
        Err(io::ErrorKind::Unsupported.into())
    }
}

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

    /// Whether there can be memory of devices beside it, which [`device`](Self::device) knows. It does not change.
    fn has_devices(&self) -> bool {
        false
    }

    /// Calls `then` with the memory at `[gpa, gpa + len)`, if all of it belongs to one device of the host whose memory the guest
    /// sees there, is contiguous in host memory, and allows `permissions`. It is valid for the call. Mappers only
    /// take its address; nobody reads or writes it.
    ///
    /// Before the guest ceases to see it there, [`Engine::revoke_device_memory`](crate::Engine::revoke_device_memory) must
    /// be called.
    fn device(&self, gpa: u64, len: u64, permissions: Permissions, then: &mut dyn FnMut(VolatileSlice<'_>)) {
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
/// A chunk's index is its place in the region: it appears at `index * chunk_size`.
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

    /// As [`back`](Self::back), for the chunk of this index and no other: to restore what was.
    ///
    /// # Errors
    /// On error nothing has changed; [`io::ErrorKind::InvalidInput`] if there is no such place, or a chunk is there.
    fn back_at(&mut self, index: u32) -> Result<(), ChunkError> {
        let _ = index;
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    /// The memory of a backed chunk; `None` for any other index.
    fn memory(&self, index: u32) -> Option<VolatileSlice<'_>>;

    /// Takes a backed chunk out of the guest's view and then zeroes it; its memory stays the same that mappers have. Of a
    /// parked chunk it only zeroes the memory again.
    ///
    /// # Errors
    /// On error the chunk may be in view still, and is good for [`release`](Self::release) only.
    fn park(&mut self, index: u32) -> Result<(), ChunkError> {
        let _ = index;
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    /// Shows a parked chunk to the guest again, at the same place and with the same memory: it is backed from then on.
    ///
    /// # Errors
    /// On error it is still parked.
    fn unpark(&mut self, index: u32) -> Result<(), ChunkError> {
        let _ = index;
        Err(io::Error::from(io::ErrorKind::Unsupported).into())
    }

    /// Takes a chunk, backed or parked, out of the guest's view and drops or zeroes its memory. The engine calls it only
    /// after every mapper let go of the chunk.
    ///
    /// # Errors
    /// On error the chunk is lost: the store never hands it out again, and the engine goes on counting it as backed.
    fn release(&mut self, index: u32) -> Result<(), ChunkError>;
}
