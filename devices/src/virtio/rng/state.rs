// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a virtio-rng device.

use serde::{Deserialize, Serialize};

/// Kind and version of the saved state.
pub(super) const STATE: (&str, u32) = ("rng", 1);

/// Saved device state, which has no fields. The transport saves the registers and the queue. The device does not save random bytes, because
/// two guests that are restored from one state must not receive the same bytes.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RngState {}
