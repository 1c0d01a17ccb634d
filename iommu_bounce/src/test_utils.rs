// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Test host of the engine. It provides guest RAM, window chunks in anonymous memory, and a mapper that records its mappings and fails on
//! request.
//!
//! Each part checks what the engine promises to the host, and panics if the engine breaks a promise.

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
pub use requests::{
    attach, attach_bypass, detach, map, map_list, probe, unmap, window_add, window_add_v2, window_del, window_del_v2,
};
