// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a network device.

use crate::counters::counters;

counters! {
    /// Counters of the device since its creation. "Received" means received by the guest.
    NetCounters {
        rx_frames: "Packets received by the guest.",
        rx_bytes: "Bytes received by the guest.",
        rx_dropped: "Packets dropped because they were too large for the guest's buffers.",
        tx_frames: "Packets sent by the guest.",
        tx_bytes: "Bytes sent by the guest.",
        tx_dropped: "Packets from the guest that were dropped: they were malformed, or the host did not accept them.",
        host_errors: "Failed reads from the host interface.",
        rate_waits: "Times that a network queue waited for its rate limit.",
    }
}
