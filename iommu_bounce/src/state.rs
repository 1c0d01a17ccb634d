// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! State of the engine in a serializable form, for snapshots and migration.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::spec::Status;
use crate::{DomainId, EndpointId, Fault};

/// Version of [`EngineState`] that this engine writes. The engine can read no other version.
pub const STATE_VERSION: u32 = 1;

/// State that results from the guest's requests. Includes neither the contents of chunks nor any parked chunks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineState {
    /// [`STATE_VERSION`].
    pub version: u32,
    /// Device-specific features that the driver accepted.
    pub accepted: u64,
    /// Configuration field `bypass`.
    pub bypass: bool,
    /// Window configuration, or `None` without bounce windows.
    pub window: Option<WindowState>,
    /// Maximum bytes of mapped guest RAM, or `None` without a limit. The mappings in a state may exceed this limit, because the limit may
    /// have been lowered.
    #[serde(default)]
    pub max_mapped_bytes: Option<u64>,
    /// All domains.
    pub domains: Vec<DomainState>,
    /// Faults pending for the driver, oldest first.
    pub faults: Vec<Fault>,
}

impl EngineState {
    /// Returns the total size of all windows in bytes, if a chunk has `chunk_size` bytes.
    pub fn window_bytes(&self, chunk_size: u64) -> u64 {
        let chunks: usize = self.domains.iter().map(|domain| domain.chunks.len()).sum();
        (chunks as u64).saturating_mul(chunk_size)
    }

    /// Returns the indices of all chunks, in no particular order.
    pub fn chunks(&self) -> impl Iterator<Item = u32> + '_ {
        self.domains.iter().flat_map(|domain| &domain.chunks).map(|chunk| chunk.index)
    }
}

/// Parts of the window configuration that can change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowState {
    /// Maximum bytes of window memory over all domains.
    pub budget: u64,
    /// Maximum size in bytes of a DMA that the driver is advised to copy.
    pub threshold: u32,
    /// The same for DMA that devices write. 0 stands for `threshold`. Older states do not have this field.
    #[serde(default)]
    pub threshold_write: u32,
    /// First and last IOVA of the aperture, which the driver has read and keeps using. `None` in older states, which do not have
    /// this field.
    #[serde(default)]
    pub aperture: Option<(u64, u64)>,
}

/// State of a domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DomainState {
    /// Domain number.
    pub domain: DomainId,
    /// True for a bypass domain.
    pub bypass: bool,
    /// Attached endpoints, at least one.
    pub endpoints: Vec<EndpointId>,
    /// Mappings that the driver made.
    pub mappings: Vec<MappingState>,
    /// Chunks of the domain's window.
    pub chunks: Vec<ChunkState>,
}

/// Mapping of guest RAM or device memory. In this structure, a mapping of device memory always has the MMIO flag. Before
/// [`Engine::restore_device_memory`](crate::Engine::restore_device_memory) is called, the guest must see the device memory at the same
/// address again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MappingState {
    /// First IOVA.
    pub start: u64,
    /// Last IOVA.
    pub last: u64,
    /// Guest-physical address.
    pub gpa: u64,
    /// Flags as in MAP.
    pub flags: u32,
}

/// Chunk of window memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkState {
    /// IOVA of the chunk.
    pub iova: u64,
    /// Index in the shared region: `shm_offset` divided by the chunk size.
    pub index: u32,
    /// Flags as in WINDOW_ADD.
    pub flags: u32,
}

/// Reason why a state cannot be restored. After the failed restore, the engine has the same state as after a reset.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RestoreError {
    /// Another version wrote the state.
    #[error(
        "the state has version {0}, but this engine reads only version {STATE_VERSION}: restore it with the release that saved it"
    )]
    Version(u32),
    /// The engine already has domains.
    #[error("the engine already has domains: restore a state only to an engine that was just created or reset")]
    NotFresh,
    /// The driver had accepted features that this engine does not offer.
    #[error(
        "the driver accepted the features {0:#x}, but this engine offers only the features {1:#x}: restore with the configuration that was saved"
    )]
    Features(u64, u64),
    /// The window configuration does not match this engine.
    #[error("window: {0}")]
    Window(String),
    /// The cap on mapped bytes is invalid.
    #[error("max_mapped_bytes is 0: it must be at least 1")]
    MappedBytes,
    /// The host cannot map RAM for endpoints in bypass mode.
    #[error(
        "bypass is on, but the host cannot map RAM for all endpoints (status {0:?}): check the limit on locked memory (ulimit -l)"
    )]
    Bypass(Status),
    /// A fault belongs to an endpoint that does not exist.
    #[error(
        "faults: a pending fault names endpoint {0:#x}, which does not exist: restore with the configuration that was saved"
    )]
    Fault(EndpointId),
    /// More faults are pending than the engine accepts.
    #[error("faults: {0} faults are pending, more than this engine accepts: restore from an unmodified snapshot")]
    TooManyFaults(usize),
    /// A part of a domain is rejected.
    #[error(
        "domain {domain}: cannot restore {what} (status {status:?}): restore an unmodified snapshot with the configuration that was saved; for NoMem, check the limit on locked memory (ulimit -l)"
    )]
    Domain {
        /// Number of the domain.
        domain: DomainId,
        /// Rejected part.
        what: String,
        /// Status that a driver would get.
        status: Status,
    },
}
