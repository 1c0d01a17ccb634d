// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a network device counts.

use crate::counters::counters;

counters! {
    /// Counters of the device since it was made. Received is what the guest has received.
    NetCounters {
        rx_frames: "Packets that the guest has received.",
        rx_bytes: "Bytes that the guest has received.",
        rx_dropped: "Packets too large for the guest's buffers.",
        tx_frames: "Packets that the guest has sent.",
        tx_bytes: "Bytes that the guest has sent.",
        tx_dropped: "Packets of the guest that the host did not take.",
        host_errors: "How often the host's interface could not be read.",
        rate_waits: "How often queues of network devices have waited because of a limit on the rate.",
    }
}
