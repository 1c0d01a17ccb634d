// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Measures reads of 4 KiB and 64 KiB from an emulated disk into a bounce window. A guest without an operating system makes one read at a
//! time, then 64 at a time. During the reads, the guest sends no request to the virtio-iommu. So the VMM only looks up IOVAs of the window
//! and of the queue, and copies the data.

#![expect(clippy::unwrap_used, reason = "a benchmark may panic")]

#[path = "../tests/c_guest/mod.rs"]
mod c_guest;
mod guest_cycles;
#[path = "guest_cycles/image.rs"]
mod image;
#[path = "../tests/tiny_guest/mod.rs"]
mod tiny_guest;

fn main() {
    for (size, what) in [("BLOCK=4096", "a bounced read of 4 KiB"), ("BLOCK=65536", "a bounced read of 64 KiB")] {
        guest_cycles::compare("disk_reads_guest", &[size], what, |dir| {
            let disk = image::disk(dir, "iommu=on");
            vec!["--disk".into(), disk, "--iommu-bounce".into(), "size=2M".into()]
        });
    }
}
