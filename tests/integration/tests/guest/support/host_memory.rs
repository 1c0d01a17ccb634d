// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Merging of equal pages (KSM) and collapsing of small pages into huge pages (khugepaged) on the host.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Settings for merging equal pages (Linux Documentation/admin-guide/mm/ksm.rst).
const MERGING: &str = "/sys/kernel/mm/ksm";

/// Settings of khugepaged (Linux Documentation/admin-guide/mm/transhuge.rst).
const COLLAPSING: &str = "/sys/kernel/mm/transparent_hugepage/khugepaged";

const PAGE: u64 = 4096;

/// Flag of a present page in `/proc/PID/pagemap`, and the bits of the page frame number (Linux
/// Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// Flag of a merged page in `/proc/kpageflags` (`KPF_KSM` in pagemap.rst).
const MERGED: u64 = 1 << 21;

/// Kernel settings in a directory. Their previous values are restored when this value is dropped.
struct Switches {
    dir: &'static str,
    before: Vec<(&'static str, String)>,
}

impl Switches {
    fn set(dir: &'static str, wanted: &[(&'static str, &str)]) -> Self {
        let mut switches = Self { dir, before: Vec::new() };
        for &(name, value) in wanted {
            let before = fs::read_to_string(switches.file(name)).unwrap();
            switches.before.push((name, before));
            switches.write(name, value);
        }
        switches
    }

    fn file(&self, name: &str) -> PathBuf {
        PathBuf::from(self.dir).join(name)
    }

    fn write(&self, name: &str, value: &str) {
        fs::write(self.file(name), value).unwrap();
    }

    fn number(&self, name: &str) -> u64 {
        fs::read_to_string(self.file(name)).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Switches {
    fn drop(&mut self) {
        for (name, value) in &self.before {
            if let Err(error) = fs::write(self.file(name), value) {
                eprintln!("cannot reset {} to {}: {error}", self.file(name).display(), value.trim());
            }
        }
    }
}

/// Merging of equal pages in processes that permit it, as long as this value lives. Merged pages stay merged afterwards.
pub(crate) struct Merging(Switches);

impl Merging {
    /// Enables merging, and makes the kernel scan a small guest within seconds.
    pub(crate) fn on() -> Self {
        Self(Switches::set(MERGING, &[("pages_to_scan", "1000"), ("sleep_millisecs", "20"), ("run", "1")]))
    }

    /// Stops merging. Merged pages stay merged until they are written.
    pub(crate) fn pause(&self) {
        self.0.write("run", "0");
    }

    /// Returns the number of pages that the whole host saves by merging (`pages_sharing`).
    pub(crate) fn pages_saved(&self) -> u64 {
        self.0.number("pages_sharing")
    }
}

/// Control of khugepaged as long as this value lives. khugepaged collapses small pages of the host into huge pages.
pub(crate) struct Collapsing(Switches);

impl Collapsing {
    /// Takes control of khugepaged, and pauses its scans.
    pub(crate) fn paused() -> Self {
        let wanted = [
            // Collapse a range only if at least half of its small pages are present.
            ("max_ptes_none", "256"),
            ("pages_to_scan", "65536"),
            ("alloc_sleep_millisecs", "100"),
            ("scan_sleep_millisecs", "3600000"),
        ];
        Self(Switches::set(COLLAPSING, &wanted))
    }

    /// Makes khugepaged scan so fast that it scans a small guest within two seconds.
    pub(crate) fn go_on(&self) {
        self.0.write("scan_sleep_millisecs", "100");
    }

    /// Returns the approximate number of huge pages that khugepaged has made since the host's start.
    pub(crate) fn made(&self) -> u64 {
        self.0.number("pages_collapsed")
    }
}

/// Returns the bytes of a process that its page tables map as huge pages (`AnonHugePages` of proc_pid_smaps(5)).
pub(crate) fn in_huge_pages(pid: u32) -> u64 {
    number_after(&format!("/proc/{pid}/smaps_rollup"), "AnonHugePages:") << 10
}

/// Returns how often the mapping of a huge page has been split on the whole host, since the host's start.
pub(crate) fn huge_pages_cut() -> u64 {
    number_after("/proc/vmstat", "thp_split_pmd ")
}

/// Returns the number after `key` in the first line of a file that begins with `key`.
fn number_after(file: &str, key: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap();
    let number = text.lines().find_map(|line| line.strip_prefix(key)?.trim().trim_end_matches(" kB").parse().ok());
    number.unwrap_or_else(|| panic!("{file} has no {key}"))
}

/// Returns the number of merged pages of a process. This function reads the pages' flags, because the kernel's counters include
/// a written page until the next scan.
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

/// Returns the address ranges whose pages may be merged (`mg` in the `VmFlags` of proc_pid_smaps(5)).
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
