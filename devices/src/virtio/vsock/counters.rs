// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a vsock device counts.

use crate::counters::counters;

counters! {
    /// Counters of the device since it was made.
    VsockCounters {
        tx_packets: "Packets of the guest's sockets.",
        tx_bytes: "Bytes that the guest sent by sockets.",
        rx_packets: "Packets for the guest's sockets.",
        rx_bytes: "Bytes that the guest got by sockets.",
        connections: "Connections between guest and host.",
        refused: "Connections that the host's side did not take.",
        resets: "Connections that were reset as the guest broke a rule.",
    }
}
