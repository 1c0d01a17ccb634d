// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A host that keeps equal pages of its VMMs once, and makes huge pages of small ones.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Where the kernel has the switches of its merging of equal pages (Linux Documentation/admin-guide/mm/ksm.rst).
const MERGING: &str = "/sys/kernel/mm/ksm";

/// And those of its thread that makes huge pages of small ones (Linux Documentation/admin-guide/mm/transhuge.rst).
const COLLAPSING: &str = "/sys/kernel/mm/transparent_hugepage/khugepaged";

const PAGE: u64 = 4096;

/// An entry of `/proc/PID/pagemap` of a page that is in memory, and the bits that say which one (Linux
/// Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// The bit of `/proc/kpageflags` of a page that others share as they are equal (`KPF_KSM`, the same document).
const MERGED: u64 = 1 << 21;

/// Switches in a directory of the kernel's, which are again as they were once this value is gone.
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
                eprintln!("{} is not {} again: {error}", self.file(name).display(), value.trim());
            }
        }
    }
}

/// The host merges equal pages of those who agree, as long as this value lives. They stay merged afterwards.
pub(crate) struct Merging(Switches);

impl Merging {
    /// At a rate at which all pages of a small guest are looked at within seconds.
    pub(crate) fn on() -> Self {
        Self(Switches::set(MERGING, &[("pages_to_scan", "1000"), ("sleep_millisecs", "20"), ("run", "1")]))
    }

    /// The host merges no more, and what it has merged stays so until somebody writes to it.
    pub(crate) fn pause(&self) {
        self.0.write("run", "0");
    }

    /// Pages of the whole host that are saved now, as others are the same (`pages_sharing`).
    pub(crate) fn pages_saved(&self) -> u64 {
        self.0.number("pages_sharing")
    }
}

/// The host's making of huge pages from small ones is this value's, as long as it lives.
pub(crate) struct Collapsing(Switches);

impl Collapsing {
    /// It makes none.
    pub(crate) fn paused() -> Self {
        let wanted = [
            // Half of the small pages have to be there.
            ("max_ptes_none", "256"),
            ("pages_to_scan", "65536"),
            ("alloc_sleep_millisecs", "100"),
            ("scan_sleep_millisecs", "3600000"),
        ];
        Self(Switches::set(COLLAPSING, &wanted))
    }

    /// At a rate at which all pages of a small guest are looked at within a second or two.
    pub(crate) fn go_on(&self) {
        self.0.write("scan_sleep_millisecs", "100");
    }

    /// Huge pages of the whole host that were made so since it started, about.
    pub(crate) fn made(&self) -> u64 {
        self.0.number("pages_collapsed")
    }
}

/// Bytes of a process that are in transparent huge pages, mapped as such (`AnonHugePages` of proc_pid_smaps(5)).
pub(crate) fn in_huge_pages(pid: u32) -> u64 {
    number_after(&format!("/proc/{pid}/smaps_rollup"), "AnonHugePages:") << 10
}

/// How often a huge page of the whole host was cut into small ones for those who have it mapped, since it started.
pub(crate) fn huge_pages_cut() -> u64 {
    number_after("/proc/vmstat", "thp_split_pmd ")
}

/// The number in the line of a file that begins with `key`.
fn number_after(file: &str, key: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap();
    let number = text.lines().find_map(|line| line.strip_prefix(key)?.trim().trim_end_matches(" kB").parse().ok());
    number.unwrap_or_else(|| panic!("{file} has no {key}"))
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
