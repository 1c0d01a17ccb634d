// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a network device.

use serde::{Deserialize, Serialize};

/// Kind and version of the saved state.
pub(super) const STATE: (&str, u32) = ("net", 1);

/// Saved device state: configuration fields that the driver relies on, and the number of pairs that the driver has set. The state contains
/// no packets. A packet that the guest has not received yet is lost, as on a wire.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NetState {
    /// MAC address of the device.
    pub(super) mac: [u8; 6],
    /// Maximum size of a packet in bytes, without the Ethernet header.
    pub(super) mtu: u16,
    /// Number of pairs of queues that the driver uses.
    pub(super) pairs: u16,
}
