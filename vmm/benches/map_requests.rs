// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Measures pairs of MAP and UNMAP requests. A guest without an operating system maps and unmaps one page at a time, then 64 pages at a
//! time. The times include the exits, the work on the queue and the engine's work. The endpoint is an emulated disk, so the host's
//! kernel maps nothing.

#![expect(clippy::unwrap_used, reason = "a benchmark may panic")]

#[path = "../tests/c_guest/mod.rs"]
mod c_guest;
mod guest_cycles;
#[path = "../tests/tiny_guest/mod.rs"]
mod tiny_guest;

use std::fs;

fn main() {
    guest_cycles::compare("map_requests_guest", &[], "a pair", |dir| {
        let image = dir.join("image");
        fs::write(&image, vec![1; 1 << 20]).unwrap();
        vec!["--disk".into(), format!("path={},image_type=raw,readonly=on,iommu=on", image.display())]
    });
}
