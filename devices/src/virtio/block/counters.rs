// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a disk.

use crate::counters::counters;

counters! {
    /// Counters of the device. All counters are 0 when the device is created.
    BlockCounters {
        read_ops: "Reads from disks.",
        read_bytes: "Bytes read from disks.",
        write_ops: "Writes to disks.",
        write_bytes: "Bytes written to disks.",
        flushes: "Flushes of disks.",
        discards: "Discards on disks.",
        write_zeroes: "Write-zeroes requests to disks.",
        errors: "Failed requests to disks.",
        host_errors: "Requests to disks that failed because of an error of the host.",
        rate_waits: "Times that a disk queue waited for its rate limit.",
    }
}
