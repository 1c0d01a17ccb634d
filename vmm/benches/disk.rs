// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Measures reads of 4 KiB from an emulated disk. A guest without an operating system makes one read at a time, then 64 at a time. The
//! image is in the host's RAM, so the measured time is spent in the VMM, not in a storage device. The benchmark appends the value of
//! `CAROM_DISK` to the value of `--disk`.

#![expect(clippy::unwrap_used, reason = "a benchmark may panic")]

#[path = "../tests/c_guest/mod.rs"]
mod c_guest;
mod guest_cycles;
#[path = "guest_cycles/image.rs"]
mod image;
#[path = "../tests/tiny_guest/mod.rs"]
mod tiny_guest;

use std::env;

fn main() {
    guest_cycles::compare("disk_reads_guest", &["BLOCK=4096"], "a read", |dir| {
        let more = env::var("CAROM_DISK").unwrap_or_default();
        vec!["--disk".into(), image::disk(dir, &more)]
    });
}
