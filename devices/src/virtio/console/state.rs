// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a virtio-console device.

use serde::{Deserialize, Serialize};

use super::Size;

/// Kind and version of the saved state.
pub(super) const STATE: (&str, u32) = ("console", 1);

/// Saved device state, in addition to the transport's registers and queues.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConsoleState {
    /// Input that the driver has not received yet.
    pub(super) input: Vec<u8>,
    /// Terminal size in the last notification to the driver. `None` before the first notification.
    #[serde(rename = "told")]
    pub(super) announced: Option<Size>,
    /// Number of bytes of the next print request that are already printed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) printed: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}
