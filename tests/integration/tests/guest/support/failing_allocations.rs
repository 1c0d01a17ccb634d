// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Allocations of the host's kernel that fail where a test asks for it, and only those of the processes and threads that it names
//! (Linux `Documentation/fault-injection/fault-injection.rst`).

use std::fs;
use std::path::{Path, PathBuf};

use carom_integration::api::ApiVmm;
use carom_integration::harness::FAILING_ALLOCATIONS;

/// What allocates: the slab allocator, and that of pages.
const PLACES: [&str; 2] = [FAILING_ALLOCATIONS, "/sys/kernel/debug/fail_page_alloc"];

/// An allocator of the kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Allocator {
    /// Of objects smaller than a page, for the most part.
    Slab = 0,
    /// Of pages; those of user space do not fail.
    Pages = 1,
}

/// Allocations can fail as long as this value lives; none does by itself.
pub(crate) struct FailingAllocations(());

impl FailingAllocations {
    pub(crate) fn new() -> Self {
        for place in PLACES {
            // Those that may wait for memory can fail too.
            set(place, "ignore-gfp-wait", "N");
            set(place, "task-filter", "Y");
            set(place, "verbose", "0");
            set(place, "probability", "0");
        }
        set(PLACES[1], "min-order", "0");
        Self(())
    }

    /// Of the processes that are [told](subject) to, one allocation fails: the first one after so many bytes.
    pub(crate) fn once_after(&self, allocator: Allocator, bytes: u64) {
        let place = PLACES[allocator as usize];
        self.stop();
        set(place, "space", &bytes.to_string());
        set(place, "times", "1");
        set(place, "probability", "100");
    }

    /// Bytes that are left until then.
    pub(crate) fn left(&self, allocator: Allocator) -> u64 {
        number(PLACES[allocator as usize], "space")
    }

    /// Whether the one that was to fail [once](Self::once_after) has done so.
    pub(crate) fn has_failed(&self) -> bool {
        PLACES.iter().any(|place| number(place, "times") == 0)
    }

    /// No more fail.
    pub(crate) fn stop(&self) {
        for place in PLACES {
            set(place, "probability", "0");
            set(place, "times", "-1");
        }
    }
}

impl Drop for FailingAllocations {
    fn drop(&mut self) {
        self.stop();
    }
}

fn number(place: &str, name: &str) -> u64 {
    let file = Path::new(place).join(name);
    let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    // It has no upper limit to how often as -1.
    text.trim().parse().unwrap_or(u64::MAX)
}

fn set(place: &str, name: &str, value: &str) {
    let file = Path::new(place).join(name);
    fs::write(&file, value).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
}

/// The threads of a VMM, as their names and directories.
pub(crate) fn threads(vmm: &ApiVmm) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(format!("/proc/{}/task", vmm.pid())).unwrap();
    let dirs = entries.flatten().map(|entry| entry.path());
    // One may end meanwhile.
    dirs.filter_map(|dir| Some((fs::read_to_string(dir.join("comm")).ok()?.trim().to_owned(), dir))).collect()
}

/// The thread of a VMM that does what its API is asked for.
pub(crate) fn control(vmm: &ApiVmm) -> PathBuf {
    let pid = vmm.pid();
    format!("/proc/{pid}/task/{pid}").into()
}

/// Has allocations of a VMM's threads fail, and of those that they start, when they are [to](FailingAllocations::once_after).
pub(crate) fn subject(vmm: &ApiVmm) {
    for (name, dir) in threads(vmm) {
        fs::write(dir.join("make-it-fail"), "1").unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

/// Has the `nth` allocation that a thread makes from now on fail. False if there is no such thread any more.
pub(crate) fn fail_nth(thread: &Path, nth: u32) -> bool {
    fs::write(thread.join("fail-nth"), nth.to_string()).is_ok()
}

/// How many allocations of a thread are left until one fails; 0 if it has.
pub(crate) fn nth_left(thread: &Path) -> u32 {
    fs::read_to_string(thread.join("fail-nth")).unwrap().trim().parse().unwrap()
}

/// Whether that one has failed, or the thread has ended.
pub(crate) fn nth_has_failed(thread: &Path) -> bool {
    fs::read_to_string(thread.join("fail-nth")).map_or(true, |left| left.trim() == "0")
}
