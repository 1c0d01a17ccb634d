// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a disk.

use serde::{Deserialize, Serialize};

/// Kind and version.
pub(super) const STATE: (&str, u32) = ("block", 1);

/// What the driver has read of the configuration and relies on. All else is in the transport's registers, in the queues and in
/// the image: no request is under way when a device is saved.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BlockState {
    /// Size of the disk, in sectors of 512 bytes.
    pub(super) sectors: u64,
    /// What requests are multiples of, in bytes.
    pub(super) block_size: u32,
}
