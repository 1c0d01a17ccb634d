// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The engine's state in a form that can be saved: for snapshots and migration.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::spec::Status;
use crate::{DomainId, EndpointId, Fault};

/// The version of [`EngineState`] that this engine writes, and the only one that it reads.
pub const STATE_VERSION: u32 = 1;

/// The state that a guest has made. Neither the bytes of chunks nor parked chunks are part of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineState {
    /// [`STATE_VERSION`].
    pub version: u32,
    /// The device-specific features that the driver accepted.
    pub accepted: u64,
    /// The configuration's field `bypass`.
    pub bypass: bool,
    /// Budget in bytes and threshold; `None` without bounce windows.
    pub window: Option<WindowState>,
    /// The most bytes of guest RAM that may be mapped; `None` without a limit. A state may have more: the limit was lowered.
    #[serde(default)]
    pub max_mapped_bytes: Option<u64>,
    /// All domains.
    pub domains: Vec<DomainState>,
    /// Faults that wait for the driver, the oldest first.
    pub faults: Vec<Fault>,
}

impl EngineState {
    /// Bytes of all windows, with chunks of `chunk_size` bytes.
    pub fn window_bytes(&self, chunk_size: u64) -> u64 {
        let chunks: usize = self.domains.iter().map(|domain| domain.chunks.len()).sum();
        (chunks as u64).saturating_mul(chunk_size)
    }

    /// Indices of all chunks, in no order.
    pub fn chunks(&self) -> impl Iterator<Item = u32> + '_ {
        self.domains.iter().flat_map(|domain| &domain.chunks).map(|chunk| chunk.index)
    }
}

/// What can change of the windows' configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowState {
    /// Bytes of window memory that all domains may use.
    pub budget: u64,
    /// The size in bytes at or below which the driver is advised to copy.
    pub threshold: u32,
    /// First and last IOVA of the aperture, which the driver keeps in mind; `None` in states of before they were in it.
    #[serde(default)]
    pub aperture: Option<(u64, u64)>,
}

/// A domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DomainState {
    /// Its number.
    pub domain: DomainId,
    /// Whether it is a bypass domain.
    pub bypass: bool,
    /// The endpoints that are attached, one at least.
    pub endpoints: Vec<EndpointId>,
    /// The driver's mappings.
    pub mappings: Vec<MappingState>,
    /// The chunks of its window.
    pub chunks: Vec<ChunkState>,
}

/// A mapping of guest RAM, or of a device's memory, which always has the MMIO flag here. The guest must see the device's memory at
/// the same address before [`Engine::restore_device_memory`](crate::Engine::restore_device_memory).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MappingState {
    /// First IOVA.
    pub start: u64,
    /// Last IOVA.
    pub last: u64,
    /// Guest-physical address.
    pub gpa: u64,
    /// As in MAP.
    pub flags: u32,
}

/// A chunk of window memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkState {
    /// Where it is mapped.
    pub iova: u64,
    /// Its index in the shared region: `shm_offset` divided by the chunk size.
    pub index: u32,
    /// As in WINDOW_ADD.
    pub flags: u32,
}

/// Why a state cannot be restored. The engine is as after a reset then.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RestoreError {
    /// The state was written by another version.
    #[error("the state has version {0}: this engine reads version {STATE_VERSION}")]
    Version(u32),
    /// The engine is not fresh.
    #[error("the engine has domains already: a state can only be restored to one that was just made or reset")]
    NotFresh,
    /// The state has features that this engine does not offer.
    #[error("accepted is {0:#x}: it has features that this engine does not offer ({1:#x})")]
    Features(u64, u64),
    /// The windows' configuration does not suit this engine.
    #[error("window: {0}")]
    Window(String),
    /// The cap on mapped bytes is none that can be.
    #[error("max_mapped_bytes is 0: it must be at least 1")]
    MappedBytes,
    /// The host does not map RAM for endpoints in bypass mode.
    #[error("bypass is on, and the host does not map RAM for all endpoints ({0:?})")]
    Bypass(Status),
    /// A fault is of an endpoint that there is not.
    #[error("faults: there is no endpoint {0:#x}")]
    Fault(EndpointId),
    /// More faults wait than ever can.
    #[error("faults: {0} wait, which are more than ever can")]
    TooManyFaults(usize),
    /// Something of a domain is refused.
    #[error("domain {domain}: {what}: {status:?}")]
    Domain {
        /// The domain.
        domain: DomainId,
        /// What is refused.
        what: String,
        /// Why, as the driver would be told.
        status: Status,
    },
}
