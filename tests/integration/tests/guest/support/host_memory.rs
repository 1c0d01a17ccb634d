// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A host that keeps equal pages of its VMMs once.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Where the kernel has the switches of its merging of equal pages (Linux Documentation/admin-guide/mm/ksm.rst).
const MERGING: &str = "/sys/kernel/mm/ksm";

const PAGE: u64 = 4096;

/// An entry of `/proc/PID/pagemap` of a page that is in memory, and the bits that say which one (Linux
/// Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// The bit of `/proc/kpageflags` of a page that others share as they are equal (`KPF_KSM`, the same document).
const MERGED: u64 = 1 << 21;

/// The host merges equal pages of those who agree, as long as this value lives. They stay merged afterwards.
pub(crate) struct Merging(Vec<(&'static str, String)>);

impl Merging {
    /// At a rate at which all pages of a small guest are looked at within seconds.
    pub(crate) fn on() -> Self {
        let wanted = [("pages_to_scan", "1000"), ("sleep_millisecs", "20"), ("run", "1")];
        let before = wanted.map(|(name, _)| (name, fs::read_to_string(Path::new(MERGING).join(name)).unwrap()));
        for (name, value) in wanted {
            fs::write(Path::new(MERGING).join(name), value).unwrap();
        }
        Self(before.into())
    }

    /// The host merges no more, and what it has merged stays so until somebody writes to it.
    pub(crate) fn pause(&self) {
        fs::write(Path::new(MERGING).join("run"), "0").unwrap();
    }

    /// Pages of the whole host that are saved now, as others are the same (`pages_sharing`).
    pub(crate) fn pages_saved(&self) -> u64 {
        fs::read_to_string(Path::new(MERGING).join("pages_sharing")).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Merging {
    fn drop(&mut self) {
        for (name, value) in &self.0 {
            fs::write(Path::new(MERGING).join(name), value).unwrap();
        }
    }
}

/// Pages of a process that are merged now. The kernel's own counts learn of a page that was written to, and is not merged any more, when
/// it looks at that the next time.
pub(crate) fn merged_pages(pid: u32) -> u64 {
    let proc = |name: &str| format!("/proc/{pid}/{name}");
    let (pagemap, flags) = (File::open(proc("pagemap")).unwrap(), File::open("/proc/kpageflags").unwrap());
    let entry = |file: &File, number: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, number * 8).unwrap();
        u64::from_ne_bytes(bytes)
    };
    let is_merged = |page: &u64| {
        let entry_of_page = entry(&pagemap, *page);
        entry_of_page & PRESENT != 0 && entry(&flags, entry_of_page & FRAME) & MERGED != 0
    };
    let mergeable = mergeable_ranges(&fs::read_to_string(proc("smaps")).unwrap());
    let pages = mergeable.into_iter().flat_map(|(start, end)| start / PAGE..end / PAGE);
    pages.filter(is_merged).count().try_into().unwrap()
}

/// Addresses of the mappings whose pages may be merged (`mg` among the `VmFlags` of proc_pid_smaps(5)).
fn mergeable_ranges(smaps: &str) -> Vec<(u64, u64)> {
    let (mut ranges, mut range) = (Vec::new(), None);
    for line in smaps.lines() {
        let first = line.split(' ').next().unwrap_or_default();
        let hex = |text| u64::from_str_radix(text, 16).ok();
        if let Some((start, end)) = first.split_once('-').and_then(|(start, end)| hex(start).zip(hex(end))) {
            range = Some((start, end));
        } else if line.starts_with("VmFlags:") && line.split(' ').any(|flag| flag == "mg") {
            ranges.extend(range.take());
        }
    }
    ranges
}
