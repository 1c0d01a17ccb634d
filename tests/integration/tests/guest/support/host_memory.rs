// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A host that keeps equal pages of its VMMs once.

use std::fs;
use std::path::Path;

/// Where the kernel has the switches of its merging of equal pages (Linux Documentation/admin-guide/mm/ksm.rst).
const MERGING: &str = "/sys/kernel/mm/ksm";

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

    /// The host merges no more, and what it has merged stays so: from now on the saved pages only get fewer.
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
