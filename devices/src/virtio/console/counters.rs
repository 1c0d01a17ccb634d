// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a virtio-console device counts.

use crate::counters::counters;

counters! {
    /// Counters of the device since it was made.
    ConsoleCounters {
        tx_bytes: "Bytes that the guest printed on its console.",
        rx_bytes: "Bytes that the guest read of its console.",
        resizes: "How often the guest was told of the terminal's size.",
    }
}
