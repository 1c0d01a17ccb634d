// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Probes: readings of counters that show a VMM's cost for the host. The guest requests each probe by a line on its console.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::api::exchange;
use crate::{emulator_counts, kvm_counters};

/// Start of a console line that requests a probe. The label of the probe follows.
pub const PROBE: &str = "CAROM-PROBE ";

/// Minimum size of guest RAM's mappings. A smaller mapping of the VMM does not count as guest RAM.
const RAM: u64 = 128 << 20;

/// Clock tick of proc_pid_stat(5): `USER_HZ` is 100 per second on x86-64.
const TICK: Duration = Duration::from_millis(10);

/// Counters at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Probe {
    /// Label of the probe, from the guest's console line.
    pub label: String,
    /// Time since the VMM's start.
    pub at: Duration,
    /// CPU time of the VMM's threads in the guest.
    pub guest_cpu: Duration,
    /// CPU time of the VMM's threads outside the guest, in user space and in the kernel.
    pub vmm_cpu: Duration,
    /// KVM's counters by name.
    pub kvm: BTreeMap<String, u64>,
    /// Carom's counters of its virtio-iommu (`_iommu` of `vm.counters`), or null.
    pub iommu: Value,
    /// Instructions that all CPUs of the emulated machine have executed, if the rig counts them.
    pub executed: Option<u64>,
    /// Resident memory, in bytes.
    pub resident_bytes: u64,
    /// Resident memory without guest RAM, in bytes.
    pub own_bytes: u64,
}

/// Watches a console for lines that request probes.
#[derive(Debug)]
pub(crate) struct Prober<'a> {
    start: Instant,
    /// Socket of Carom's API.
    api: Option<&'a Path>,
    /// File that the rig's emulator appends its counts to.
    counts: Option<&'a Path>,
    /// Bytes of the console that have been checked.
    seen: usize,
    /// [`Probe::executed`] at the start.
    pub(crate) executed_at_start: Option<u64>,
    pub(crate) probes: Vec<Probe>,
}

impl<'a> Prober<'a> {
    /// Creates a prober for a VMM that starts now.
    pub(crate) fn new(api: Option<&'a Path>, counts: Option<&'a Path>) -> Self {
        let executed_at_start = counts.and_then(emulator_counts::executed);
        Self { start: Instant::now(), api, counts, seen: 0, executed_at_start, probes: Vec::new() }
    }

    /// Takes probes for new lines on the console of VMM `pid`. `console` contains only complete lines.
    pub(crate) fn look(&mut self, pid: u32, console: &str) {
        let new = console.get(self.seen..).unwrap_or_default();
        let labels: Vec<&str> = new.lines().filter_map(|line| line.trim().strip_prefix(PROBE)).collect();
        let take = |label: &&str| Probe {
            executed: self.counts.and_then(emulator_counts::executed),
            ..take(pid, label, self.start.elapsed(), self.api)
        };
        self.probes.extend(labels.iter().map(take));
        self.seen = console.len();
    }
}

/// Takes a probe. Values that cannot be read are 0 or null: the VMM may just have ended.
fn take(pid: u32, label: &str, at: Duration, api: Option<&Path>) -> Probe {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let (guest_cpu, vmm_cpu) = cpu_times(&read("stat")).unwrap_or_default();
    let kvm = kvm_counters::read(pid);
    let counters = api.and_then(|api| exchange(api, "GET", "/api/v1/vm.counters", None).ok());
    let iommu = counters.and_then(|(_, body)| Some(serde_json::from_str::<Value>(&body).ok()?["_iommu"].take()));
    let (resident_bytes, own_bytes) = resident_bytes(&read("smaps"));
    let iommu = iommu.unwrap_or_default();
    Probe { label: label.into(), at, guest_cpu, vmm_cpu, kvm, iommu, resident_bytes, own_bytes, ..Probe::default() }
}

/// Returns the CPU times in and outside the guest, from proc_pid_stat(5).
fn cpu_times(stat: &str) -> Option<(Duration, Duration)> {
    // The process's name, in parentheses, may itself contain blanks and parentheses.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    // utime and stime (fields 14 and 15) include guest_time (field 43). The first field here is field 3.
    let ticks = |number: usize| fields.get(number - 3)?.parse::<u32>().ok();
    let (all, guest) = (ticks(14)? + ticks(15)?, ticks(43)?);
    Some((TICK * guest, TICK * all.saturating_sub(guest)))
}

/// Parses proc_pid_smaps(5). Returns the resident bytes of all mappings, and the resident bytes of all mappings except guest
/// RAM and memfds.
fn resident_bytes(smaps: &str) -> (u64, u64) {
    let (mut is_ram, mut is_shared) = (false, false);
    let (mut all, mut own) = (0, 0);
    for line in smaps.lines() {
        if line.split(' ').next().is_some_and(|range| range.contains('-')) {
            is_shared = line.contains("/memfd:");
        }
        let number = |key: &str| line.strip_prefix(key)?.trim().strip_suffix(" kB")?.parse::<u64>().ok();
        if let Some(size) = number("Size:") {
            is_ram = is_shared || size << 10 >= RAM;
        } else if let Some(resident) = number("Rss:") {
            all += resident;
            own += if is_ram { 0 } else { resident };
        }
    }
    (all << 10, own << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_time_is_separated_from_other_time() {
        let mut fields: Vec<String> = (3..=52).map(|_| "0".into()).collect();
        for (number, value) in [(14, "300"), (15, "50"), (43, "280")] {
            fields[number - 3] = value.into();
        }
        let stat = format!("7 (a) (b c) {}", fields.join(" "));
        assert_eq!(cpu_times(&stat), Some((Duration::from_millis(2800), Duration::from_millis(700))));
        assert_eq!(cpu_times("7 (a) S 1"), None);
    }

    #[test]
    fn memory_of_large_mappings_is_not_the_vmms_own() {
        let mapping = |size: u64, resident: u64| {
            format!("7f00-7f10 rw-p 00000000 00:00 0\nSize: {size} kB\nRss: {resident} kB\nPss: 1 kB\n")
        };
        let chunk = mapping(2048, 2048).replacen("00:00 0", "00:01 7   /memfd:chunk (deleted)", 1);
        let smaps = [mapping(64, 60), mapping(128 << 10, 5000), chunk, mapping(1024, 4)].concat();
        assert_eq!(resident_bytes(&smaps), (7112 << 10, 64 << 10));
    }

    #[test]
    fn each_line_is_probed_once_and_others_are_not() {
        let mut prober = Prober::new(None, None);
        let pid = std::process::id();
        prober.look(pid, "a\nCAROM-PROBE one\n");
        prober.look(pid, "a\nCAROM-PROBE one\nsaid CAROM-PROBE not\n");
        prober.look(pid, "a\nCAROM-PROBE one\nsaid CAROM-PROBE not\nCAROM-PROBE two 2\n");
        let labels: Vec<&str> = prober.probes.iter().map(|probe| probe.label.as_str()).collect();
        assert_eq!(labels, ["one", "two 2"]);
        assert!(prober.probes[1].at >= prober.probes[0].at && prober.probes[0].own_bytes > 0);
    }
}
