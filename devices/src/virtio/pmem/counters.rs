// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a virtio-pmem device.

use crate::counters::counters;

counters! {
    /// Counters of the device. All counters are 0 when the device is created. Reads and writes of the memory cause no exits, so they cannot
    /// be counted.
    PmemCounters {
        flushes: "Completed flushes of persistent memory.",
        errors: "Flushes of persistent memory that failed on the host.",
    }
}
