// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a network device.

use serde::{Deserialize, Serialize};

/// Kind and version.
pub(super) const STATE: (&str, u32) = ("net", 1);

/// What the driver has read of the configuration and relies on, and what it has set. A packet that has not reached the guest is lost
/// like one on a wire.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NetState {
    /// The device's address.
    pub(super) mac: [u8; 6],
    /// Most bytes of a packet, without the Ethernet header.
    pub(super) mtu: u16,
    /// Pairs of queues that the driver uses.
    pub(super) pairs: u16,
}
