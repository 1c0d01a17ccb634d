// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a virtio-pmem device. The content of the memory is in the file.

use serde::{Deserialize, Serialize};

/// Kind and version of the saved state.
pub(super) const STATE: (&str, u32) = ("pmem", 1);

/// Saved device state. The transport saves the registers and the queue. The restored device must have the same size.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PmemState {
    /// Size of the memory in bytes.
    pub(super) size: u64,
}
