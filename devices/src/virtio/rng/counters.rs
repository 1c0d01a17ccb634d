// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a virtio-rng device counts.

use crate::counters::counters;

counters! {
    /// Counters of the device since it was made.
    RngCounters {
        requests: "Requests for random bytes that were served.",
        bytes: "Random bytes that the guest got.",
        source_errors: "How often the source could not be read.",
    }
}
