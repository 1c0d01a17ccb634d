// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Injected failures of the host kernel's allocations, limited to selected processes and threads (Linux
//! `Documentation/fault-injection/fault-injection.rst`).

use std::fs;
use std::path::{Path, PathBuf};

use carom_integration::api::ApiVmm;
use carom_integration::harness::FAILING_ALLOCATIONS;

/// Directories with the settings for injected failures: first of the slab allocator, then of the page allocator.
const PLACES: [&str; 2] = [FAILING_ALLOCATIONS, "/sys/kernel/debug/fail_page_alloc"];

/// Allocator of the kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Allocator {
    /// Slab allocator, mostly for objects smaller than a page.
    Slab = 0,
    /// Page allocator. Allocations for user space do not fail.
    Pages = 1,
}

/// Control of injected failures. At first, no allocation fails. Dropping this value stops all further failures.
pub(crate) struct FailingAllocations(());

impl FailingAllocations {
    pub(crate) fn new() -> Self {
        for place in PLACES {
            // Allocations that may wait for memory can also fail.
            set(place, "ignore-gfp-wait", "N");
            set(place, "task-filter", "Y");
            set(place, "verbose", "0");
            set(place, "probability", "0");
        }
        set(PLACES[1], "min-order", "0");
        Self(())
    }

    /// Makes one allocation of the [marked](subject) threads fail: the first allocation after these threads have allocated
    /// `bytes` bytes from `allocator`. For the page allocator, `bytes` is a number of pages.
    pub(crate) fn once_after(&self, allocator: Allocator, bytes: u64) {
        let place = PLACES[allocator as usize];
        self.stop();
        set(place, "space", &bytes.to_string());
        set(place, "times", "1");
        set(place, "probability", "100");
    }

    /// Returns the amount that the threads can still allocate before the failure, in the units of
    /// [`once_after`](Self::once_after).
    pub(crate) fn left(&self, allocator: Allocator) -> u64 {
        number(PLACES[allocator as usize], "space")
    }

    /// True if the allocation of [`once_after`](Self::once_after) has failed.
    pub(crate) fn has_failed(&self) -> bool {
        PLACES.iter().any(|place| number(place, "times") == 0)
    }

    /// Stops further failures.
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
    // For `times`, -1 means no limit.
    text.trim().parse().unwrap_or(u64::MAX)
}

fn set(place: &str, name: &str, value: &str) {
    let file = Path::new(place).join(name);
    fs::write(&file, value).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
}

/// Returns the names and directories of a VMM's threads.
pub(crate) fn threads(vmm: &ApiVmm) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(format!("/proc/{}/task", vmm.pid())).unwrap();
    let dirs = entries.flatten().map(|entry| entry.path());
    // Leave out threads that have ended meanwhile.
    dirs.filter_map(|dir| Some((fs::read_to_string(dir.join("comm")).ok()?.trim().to_owned(), dir))).collect()
}

/// Returns the directory of the VMM's thread that executes API requests.
pub(crate) fn control(vmm: &ApiVmm) -> PathBuf {
    let pid = vmm.pid();
    format!("/proc/{pid}/task/{pid}").into()
}

/// Marks a VMM's threads, and the threads that they start later. [`FailingAllocations::once_after`] makes only allocations of
/// marked threads fail.
pub(crate) fn subject(vmm: &ApiVmm) {
    for (name, dir) in threads(vmm) {
        fs::write(dir.join("make-it-fail"), "1").unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

/// Makes the `nth` allocation of a thread from now on fail. Returns false if the thread has ended.
pub(crate) fn fail_nth(thread: &Path, nth: u32) -> bool {
    fs::write(thread.join("fail-nth"), nth.to_string()).is_ok()
}

/// Returns the remaining number of allocations until the thread's failing allocation, or 0 after the failure.
pub(crate) fn nth_left(thread: &Path) -> u32 {
    fs::read_to_string(thread.join("fail-nth")).unwrap().trim().parse().unwrap()
}

/// True if no failure of the thread's allocations is pending any more, or if the thread has ended.
pub(crate) fn nth_has_failed(thread: &Path) -> bool {
    fs::read_to_string(thread.join("fail-nth")).map_or(true, |left| left.trim() == "0")
}
