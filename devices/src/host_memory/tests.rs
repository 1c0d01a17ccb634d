// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests with real lost pages. The SIGBUS handler belongs to the whole test process, and a thread that the handler stops sleeps until the
//! process ends.

use std::fs::File;
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use super::*;
use crate::platform::HostRange;
use crate::sync::lock;

const PAGE: usize = 4096;

/// Notes belong to the whole process, so only one test may run at a time.
static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn watch_once() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| watch(libc::SIGWINCH).unwrap());
}

/// Mapped and registered file.
struct Mapped {
    _name: Registration,
    file: Arc<File>,
    mapping: MmapRegion,
}

impl Mapped {
    fn new(name: &str, file: File, len: usize, supply: Supply, flags: libc::c_int) -> Self {
        let file = Arc::new(file);
        file.set_len(len as u64).unwrap();
        let place = FileOffset::from_arc(file.clone(), 0);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let mapping = MmapRegion::build(Some(place), len, access, libc::MAP_SHARED | flags).unwrap();
        let range = HostRange { address: mapping.as_ptr().addr(), len };
        let origin = Origin { name: name.into(), supply, file: Some(file.clone()), offset: 0, gpa: Some(0x10_0000) };
        Self { _name: register(range, origin), file, mapping }
    }

    fn of_file(name: &str) -> Self {
        Self::new(name, tempfile::tempfile().unwrap(), 2 * PAGE, Supply::File, 0)
    }

    fn address(&self) -> usize {
        self.mapping.as_ptr().addr()
    }
}

fn wait_for_note() -> Note {
    let start = Instant::now();
    loop {
        if let Some(note) = take_notes().next() {
            return note;
        }
        assert!(start.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn thread_that_touches_a_lost_page_stops_and_leaves_a_note() {
    let _one = lock(&ONE);
    watch_once();
    let mapped = Arc::new(Mapped::of_file("zone 'touched', file /x"));
    mapped.file.set_len(0).unwrap();
    let touching = mapped.clone();
    let thread = thread::spawn(move || touching.mapping.as_volatile_slice().read_obj::<u64>(PAGE + 8));
    let Note { reason, is_stuck } = wait_for_note();
    let expected =
        "the host cannot supply guest memory: zone 'touched', file /x, offset 0x1008 (guest-physical 0x101008); ";
    assert!(reason.starts_with(expected) && is_stuck, "{reason}");
    assert!(!thread.is_finished(), "the thread must not continue");
}

#[test]
fn memory_error_in_system_call_is_noted_and_thread_continues() {
    let _one = lock(&ONE);
    watch_once();
    let mapped = Mapped::of_file("zone 'poisoned', file /x");
    // Code 4 (action required) is the code that KVM sends to a vCPU's thread. Code 5 is "action optional".
    for code in [4, 5] {
        sigbus::send_to_self(code, mapped.address() + PAGE);
        let expected =
            "the host reports an uncorrectable memory error in guest memory: zone 'poisoned', file /x, offset 0x1000";
        let Note { reason, is_stuck } = wait_for_note();
        assert!(reason.starts_with(expected) && !is_stuck, "{reason}");
    }
}

#[test]
fn note_about_unmapped_memory_is_dropped() {
    let _one = lock(&ONE);
    watch_once();
    let mapped = Mapped::of_file("gone");
    sigbus::send_to_self(5, mapped.address());
    drop(mapped);
    assert_eq!(take_notes().next(), None);
}

#[test]
fn failed_system_call_is_reported_if_its_memory_is_lost() {
    let _one = lock(&ONE);
    watch_once();
    let mapped = Mapped::of_file("zone 'io', file /x");
    let range = || std::iter::once(HostRange { address: mapped.address() + PAGE - 1, len: 2 });
    report_io(libc::EFAULT, range(), true);
    report_io(libc::EIO, range(), true);
    assert_eq!(take_notes().next(), None, "the pages exist");
    mapped.file.set_len(PAGE as u64).unwrap();
    report_io(libc::EIO, range(), true);
    assert_eq!(take_notes().next(), None, "the image failed, not the memory");
    report_io(libc::EFAULT, range(), true);
    let Note { reason, is_stuck } = wait_for_note();
    assert!(reason.contains("zone 'io', file /x, offset 0x1000 ") && !is_stuck, "{reason}");
}

#[test]
fn loss_without_an_address_names_regions_that_lack_a_page() {
    let whole = Mapped::of_file("whole");
    let short = Mapped::of_file("zone 'short', file /x");
    let loss = Loss { address: None, gpa: Some(0x5000), cause: Cause::Missing };
    short.file.set_len(PAGE as u64).unwrap();
    let reason = loss.explain();
    assert!(reason.contains("guest-physical 0x5000, in ") && reason.contains("zone 'short', file /x; "), "{reason}");
    assert!(!reason.contains("whole"), "{reason}");
    assert!(missing_memory().is_some_and(|reason| reason.contains("zone 'short'")));
    assert!(truncated_memory().is_some_and(|reason| reason.contains("zone 'short'")));
    drop((short, whole));
}

#[test]
fn missing_huge_page_is_named() {
    const HUGE: usize = 2 << 20;
    let file = match memfd_create("huge", MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::CLOEXEC) {
        Ok(file) => File::from(file),
        Err(error) => return eprintln!("not tested: the host has no huge pages of 2 MiB: {error}"),
    };
    let mapped = Mapped::new("zone 'huge', reserved huge pages", file, HUGE, Supply::HugePages, libc::MAP_NORESERVE);
    if populate_page(mapped.address(), true).is_ok() {
        return eprintln!("not tested: the host has a free huge page");
    }
    let reason = missing_memory().unwrap();
    assert!(reason.contains("zone 'huge', reserved huge pages; no huge page is free"), "{reason}");
    // A vCPU thread creates this loss when KVM reports an access to the page.
    let loss = Loss { address: Some(mapped.address() + 16), gpa: None, cause: Cause::Missing };
    assert!(
        loss.explain().contains("zone 'huge', reserved huge pages, offset 0x10 (guest-physical 0x100010); no huge")
    );
}
