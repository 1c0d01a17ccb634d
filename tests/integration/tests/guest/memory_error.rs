// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Uncorrectable memory errors of the host in guest pages: the VM ends, and reports the reason.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::api::ApiVmm;
use carom_integration::harness::{guest_test, tell};
use serde_json::json;

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, end, info};
use crate::support::{MIB, SITE};

/// File of the host's kernel (`CONFIG_MEMORY_FAILURE`). If a page's physical address is written to this file, the kernel takes
/// the page out of use. As after a memory error, the page's contents are lost.
const HARD_OFFLINE: &str = "/sys/devices/system/memory/hard_offline_page";
/// Number of pages that get an error. The guest uses a quarter of its RAM, so it accesses some of these pages.
const PAGES: usize = 256;
const PAGE: u64 = 4096;
/// Time after which the test fails if the guest has accessed none of these pages.
const LIMIT: Duration = Duration::from_secs(300);

/// Job that keeps random bytes in memory and reads them repeatedly.
const JOB: &str = "
dd if=/dev/urandom of=/kept bs=1M count=128 2>/dev/null
echo CAROM-READY
while :; do md5sum </kept >/dev/null; done
";

/// Returns the physical addresses of about [`PAGES`] present pages, spread over the process's largest mapping.
fn pages_of_ram(pid: u32) -> Vec<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let number = |text| u64::from_str_radix(text, 16).unwrap();
    let ranges = maps.lines().map(|line| {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        number(start)..number(end)
    });
    let ram = ranges.max_by_key(|range| range.end - range.start).unwrap();
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).unwrap();
    let physical = |address: u64| {
        let mut entry = [0; 8];
        pagemap.read_exact_at(&mut entry, address / PAGE * 8).ok()?;
        // Bit 63: present; the lower 55 bits: number of the page (Documentation/admin-guide/mm/pagemap.rst).
        let entry = u64::from_le_bytes(entry);
        (entry >> 63 == 1).then_some((entry & ((1 << 55) - 1)) * PAGE)
    };
    let present: Vec<u64> = ram.step_by(usize::try_from(PAGE).unwrap()).filter_map(physical).collect();
    let step = (present.len() / PAGES).max(1);
    present.into_iter().step_by(step).filter(|page| *page != 0).collect()
}

#[guest_test(slow = "unit tests send the signals, and vmm/tests/lost_memory truncates files")]
fn memory_error_of_the_host_ends_the_vm_with_a_reason() {
    if !Path::new(HARD_OFFLINE).exists() {
        return tell("CAROM-MEMORY-ERROR not tested: this kernel has no CONFIG_MEMORY_FAILURE");
    }
    let mut vmm = ApiVmm::start(&SITE, JOB).unwrap();
    create_and_boot(&vmm, json!({"memory": {"size": 512 * MIB, "thp": false}}));
    vmm.wait_for("CAROM-READY\n", 1, BOOT_TIME).unwrap();
    let pages = pages_of_ram(vmm.pid());
    let failed = pages.iter().filter(|page| fs::write(HARD_OFFLINE, format!("{page:#x}")).is_ok()).count();
    assert!(failed > 0, "none of {} pages can get an error", pages.len());
    let reason = reason_of_failure(&vmm);
    assert!(reason.contains("uncorrectable memory error in guest memory: zone 'mem0', memory of the host"), "{reason}");
    tell(&format!("CAROM-MEMORY-ERROR in {failed} pages: {reason}"));
    // Only the VM ends: carom runs with --no-shutdown, so it continues and answers.
    let info = info(&vmm);
    assert!(info["failure"].as_str().is_some_and(|failure| failure.contains("zone 'mem0'")), "{info}");
    end(&mut vmm);
}

/// Waits for the event that the VM failed, and returns its reason.
fn reason_of_failure(vmm: &ApiVmm) -> String {
    let start = Instant::now();
    loop {
        let events = vmm.events().unwrap();
        if let Some(event) = events.iter().find(|event| event.source == "vm" && event.event == "failed") {
            return event.properties["reason"].as_str().unwrap().into();
        }
        assert!(start.elapsed() < LIMIT, "the VM still runs");
        thread::sleep(Duration::from_millis(100));
    }
}
