// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is saved of a virtio-balloon device.

use serde::{Deserialize, Serialize};

/// Kind and version.
pub(super) const STATE: (&str, u32) = ("balloon", 1);

/// The configuration, which is in no register of the transport.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BalloonState {
    /// Pages that the balloon should have.
    pub(super) wanted: u32,
    /// Pages that it has, as the driver says.
    pub(super) actual: u32,
}
