// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a disk.

use serde::{Deserialize, Serialize};

/// Kind and version of the saved state.
pub(super) const STATE: (&str, u32) = ("block", 1);

/// Fields of the device configuration that the driver has read and relies on. The transport saves the registers and queues. When a device
/// is saved, no request is under way.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BlockState {
    /// Size of the disk, in sectors of 512 bytes.
    pub(super) sectors: u64,
    /// Block size in bytes. The offset and length of each request must be multiples of the block size.
    pub(super) block_size: u32,
}
