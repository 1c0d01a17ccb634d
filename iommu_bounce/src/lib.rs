// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-iommu engine and its bounce windows: requests in, status out.
//!
//! [`Engine`] holds the state of one virtio-iommu device: which endpoint is attached to which domain, what each domain
//! maps, and which chunks of host memory back its bounce window. It takes a request as the bytes that the driver put
//! on the request queue, and returns the bytes of the answer. It reaches the host by the traits below:
//!
//! - [`DmaMapper`]: an IOMMU address space of an endpoint, or of several (VFIO, or anything that can map),
//! - [`GuestRam`]: the guest's memory,
//! - [`ChunkStore`]: the host memory behind bounce windows.
//!
//! Nothing here knows of virtqueues, KVM or PCI, so a test, a model or a fuzzer drives the engine without a VM.
//!
//! Format and state are apart: [`spec`] has the numbers and layouts of the specification, the wire module decodes and
//! encodes them, and the modules that keep the state never see a byte of the guest's.
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

/// Names an endpoint: on PCI the requester ID, as VIOT tells the guest (virtio 1.3, section 5.13.6.1).
pub type EndpointId = u32;

/// Names a domain. The driver chooses the number (virtio 1.3, section 5.13.6.1).
pub type DomainId = u32;

/// Names an address space of the host within the engine.
type SpaceId = usize;
