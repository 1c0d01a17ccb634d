// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a virtio-pmem device counts.

use crate::counters::counters;

counters! {
    /// Counters of the device since it was made. Reads and writes of the memory leave the guest for nothing, and are not seen.
    PmemCounters {
        flushes: "Flushes of persistent memory that were done.",
        errors: "Flushes of persistent memory at which the host failed.",
    }
}
