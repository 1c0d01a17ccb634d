// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a vsock device.

use crate::counters::counters;

counters! {
    /// Counters of the device since its creation.
    VsockCounters {
        tx_packets: "Packets sent by the guest's sockets.",
        tx_bytes: "Bytes sent by the guest's sockets.",
        rx_packets: "Packets sent to the guest's sockets.",
        rx_bytes: "Bytes sent to the guest's sockets.",
        connections: "Connections between guest and host.",
        refused: "Connections refused by the host's side.",
        resets: "Connections reset because the guest broke a rule.",
    }
}
