// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a vsock device.

use serde::{Deserialize, Serialize};

/// Kind and version.
pub(super) const STATE: (&str, u32) = ("vsock", 1);

/// All that it has is in the transport's registers and in the queues. Connections are never saved: their other ends are processes of
/// the host. The guest is told that they are gone, and reads its CID again then.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VsockState {}
