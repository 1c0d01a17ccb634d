// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a virtio-balloon device.

use serde::{Deserialize, Serialize};

/// Kind and version of the saved state.
pub(super) const STATE: (&str, u32) = ("balloon", 1);

/// Fields of the device configuration. The transport does not save these fields.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BalloonState {
    /// Target size of the balloon, in pages.
    pub(super) wanted: u32,
    /// Size of the balloon in pages, as reported by the driver.
    pub(super) actual: u32,
}
