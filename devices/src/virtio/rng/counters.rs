// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a virtio-rng device.

use crate::counters::counters;

counters! {
    /// Counters of the device. All counters are 0 when the device is created.
    RngCounters {
        requests: "Served requests for random bytes.",
        bytes: "Random bytes given to the guest.",
        source_errors: "Failed reads from the source.",
    }
}
