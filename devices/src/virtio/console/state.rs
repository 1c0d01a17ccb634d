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
}
