// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-iommu engine and its bounce windows.
//!
//! [`Engine`] holds the state of one virtio-iommu device. The state contains the domain of each endpoint, the mappings of each domain, and
//! the chunks of host memory in each domain's bounce window. [`Engine`] takes a request as the bytes that the driver put on the request
//! queue, and returns the bytes of the answer. The engine calls the host through these traits:
//!
//! - [`DmaMapper`]: IOMMU address space of one or more endpoints (VFIO, or any other mapper),
//! - [`GuestRam`]: the guest's memory,
//! - [`ChunkStore`]: the host memory of bounce windows.
//!
//! The crate does not depend on virtqueues, KVM or PCI. So a test, a model or a fuzzer can drive the engine without a VM.
//!
//! Wire format and state are separate. [`spec`] contains the numbers and layouts of the specification. The wire module decodes requests and
//! encodes replies. The modules that keep the state never handle bytes from the guest.
#![forbid(unsafe_code)]

mod activity;
mod backend;
mod config;
mod counters;
mod domain;
mod endpoint;
mod engine;
mod fault;
mod histogram;
mod interrupt;
mod latency;
mod mapping;
mod probe;
mod report;
mod space;
pub mod spec;
mod state;
mod table_pages;
#[cfg(any(test, feature = "test-utils"))]
pub mod test_utils;
mod tree;
mod windows;
mod wire;

pub use activity::Activity;
pub use backend::{
    ChunkError, ChunkStore, DeviceMemoryKind, DmaMapper, GuestRam, MapError, MapperGroup, MapperLimits, Permissions,
    ThenDevice, UnmapError,
};
pub use config::{ConfigError, EngineConfig, Limits, WindowConfig};
pub use counters::{Counters, RequestCounts};
pub use engine::{DomainWindow, Engine, Target, Translation, UnmapRequest};
pub use fault::{Fault, FaultReason};
pub use histogram::{BUCKETS, Histogram};
pub use interrupt::Interrupt;
pub use latency::{HostLatency, RequestLatency};
pub use report::{DomainReport, EndpointReport, Report};
pub use spec::MAX_REPLY;
pub use state::{ChunkState, DomainState, EngineState, MappingState, RestoreError, STATE_VERSION, WindowState};
pub use wire::WindowVersion;

/// Identifies an endpoint. On PCI, this is the requester ID, as VIOT reports it to the guest (virtio 1.3, section 5.13.6.1).
pub type EndpointId = u32;

/// Identifies a domain. The driver chooses the number (virtio 1.3, section 5.13.6.1).
pub type DomainId = u32;

/// Identifies a host address space within the engine.
type SpaceId = usize;
