// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is saved of a virtio-console device.

use serde::{Deserialize, Serialize};

use super::Size;

/// Kind and version.
pub(super) const STATE: (&str, u32) = ("console", 1);

/// What is not in the transport's registers and in the queues.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConsoleState {
    /// What was typed and the driver has not got yet.
    pub(super) input: Vec<u8>,
    /// The size that the driver was told of.
    pub(super) told: Option<Size>,
    /// Bytes of the next request that are printed already.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) printed: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}
