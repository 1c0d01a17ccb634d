// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a virtio-rng device.

use serde::{Deserialize, Serialize};

/// Kind and version.
pub(super) const STATE: (&str, u32) = ("rng", 1);

/// All that it has is in the transport's registers and in the queue. Random bytes are never saved: two guests that were
/// restored from one state must not get the same.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RngState {}
