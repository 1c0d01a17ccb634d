// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a virtio-console device.

use crate::counters::counters;

counters! {
    /// Counters of the device. All counters are 0 when the device is created.
    ConsoleCounters {
        tx_bytes: "Bytes that the guest printed on its console.",
        rx_bytes: "Bytes that the guest read from its console.",
        resizes: "Notifications of the guest about the terminal's size.",
    }
}
