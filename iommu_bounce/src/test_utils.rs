// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A host for tests: a mapper that records and can be told to fail, guest RAM, and window chunks on the heap.
//!
//! Each checks what the engine promises its host, and panics where a promise is broken.

mod chunks;
mod corpus;
pub mod fuzz;
mod mapper;
mod null;
mod ram;
mod requests;

pub use chunks::{ChunkProbe, TestChunks};
pub use corpus::replay;
pub use mapper::{HostMapping, MapperProbe, RecordingMapper, TestGroup};
pub use null::NullMapper;
pub use ram::TestRam;
pub use requests::{attach, attach_bypass, detach, map, probe, unmap, window_add, window_del};
