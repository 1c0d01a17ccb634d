// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a vsock device.

use serde::{Deserialize, Serialize};

/// Kind and version of the saved state.
pub(super) const STATE: (&str, u32) = ("vsock", 1);

/// Saved device state, which has no fields. The transport saves the registers and queues. Connections are never saved, because their other
/// ends are host processes. The restored guest is notified of the loss, and then reads its CID again.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VsockState {}
