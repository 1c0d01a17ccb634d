// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a disk counts.

use crate::counters::counters;

counters! {
    /// Counters of the device since it was made.
    BlockCounters {
        read_ops: "Reads of disks.",
        read_bytes: "Bytes that were read of disks.",
        write_ops: "Writes to disks.",
        write_bytes: "Bytes that were written to disks.",
        flushes: "Flushes of disks.",
        discards: "Discards on disks.",
        write_zeroes: "Requests to set parts of disks to zero.",
        errors: "Requests to disks that failed.",
        host_errors: "Of these, the ones that the host could not do.",
        rate_waits: "How often queues of disks have waited because of a limit on the rate.",
    }
}
