// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is saved of a virtio-pmem device. Its bytes are the file's.

use serde::{Deserialize, Serialize};

/// Kind and version.
pub(super) const STATE: (&str, u32) = ("pmem", 1);

/// What the device is beside the transport's registers and the queue: it is restored with a file that has room for as much.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PmemState {
    /// Bytes of its memory.
    pub(super) size: u64,
}
