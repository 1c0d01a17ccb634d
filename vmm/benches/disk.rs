// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reads of 4 KiB from an emulated disk by a guest without an operating system, one and 64 at a time. The image is in the host's RAM,
//! so only the VMM takes time. `CAROM_DISK` is more options of the disk.

#![expect(clippy::unwrap_used, reason = "a benchmark may panic")]

#[path = "../tests/c_guest/mod.rs"]
mod c_guest;
mod guest_cycles;
#[path = "../tests/tiny_guest/mod.rs"]
mod tiny_guest;

use std::{env, fs};

/// Length of the image, which the guest reads whole.
const IMAGE: usize = 32 << 20;

fn main() {
    guest_cycles::compare("disk_reads_guest", "a read", |dir| {
        let image = dir.join("image");
        fs::write(&image, vec![1; IMAGE]).unwrap();
        let more = env::var("CAROM_DISK").map_or(String::new(), |options| format!(",{options}"));
        // Processes share the lock of a disk that is only read: builds before this one gave it back late.
        let disk = format!("path={},image_type=raw,queue_size=256,readonly=on{more}", image.display());
        vec!["--disk".into(), disk]
    });
}
