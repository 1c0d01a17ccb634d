// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disk for the guests that read blocks.

use std::fs;
use std::path::Path;

use crate::guest_cycles::two_cpus;

/// Length of the disk's image, which the guest reads completely.
const IMAGE: usize = 32 << 20;

/// Creates a disk image in `dir`, and returns the value of `--disk`, which ends with `more`.
///
/// The vCPU is pinned to the first host CPU, and the thread of the disk's queue to the second. So the scheduler does
/// not move the threads.
pub(crate) fn disk(dir: &Path, more: &str) -> String {
    let image = dir.join("image");
    fs::write(&image, vec![1; IMAGE]).unwrap();
    let comma = if more.is_empty() { "" } else { "," };
    let affinity = two_cpus().map_or(String::new(), |[_, cpu]| format!(",queue_affinity=[0@[{cpu}]]"));
    // The disk is read-only, so that several processes can lock the image at the same time. A process of an older build may still hold its
    // lock when the next process starts.
    format!("path={},image_type=raw,queue_size=256,readonly=on{affinity}{comma}{more}", image.display())
}
