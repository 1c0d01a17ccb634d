// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Report on a VMM whose guest hangs. It shows the work of the VMM's threads and the changes of KVM's counters during one
//! second. If the VMM is Carom, an NMI also makes the guest's kernel print its position and panic.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::api::exchange;
use crate::kvm_counters;

/// Time between the first and the second reading of the threads and the counters.
const LOOK: Duration = Duration::from_secs(1);

/// Time for the guest's kernel to print its position.
const PANIC_TIME: Duration = Duration::from_secs(5);

/// Returns a report on process `pid`, one line per thread. If `api` is the socket of Carom's API, also sends the guest an NMI. A
/// kernel booted with `unknown_nmi_panic` then prints its position on the console.
///
/// Information that cannot be read is left out without an error.
pub(crate) fn report(pid: u32, api: Option<&Path>) -> String {
    let (threads, counters) = (threads(pid), kvm_counters::read(pid));
    thread::sleep(LOOK);
    let mut text = String::from(
        "threads of the VMM (name: state, CPU time in the last second in units of 10 ms, call stack in the host's kernel):",
    );
    for (id, now) in self::threads(pid) {
        let before = threads.get(&id).map_or(now.ticks, |before| before.ticks);
        let _ = write!(text, "\n  {}: {} {} {}", now.name, now.state, now.ticks.saturating_sub(before), now.place);
    }
    text.push_str("\nKVM counted in the last second:");
    for (name, now) in kvm_counters::read(pid) {
        let before = counters.get(&name).copied().unwrap_or(0);
        if now != before {
            let _ = write!(text, " {name} {}", now.wrapping_sub(before));
        }
    }
    if let Some(api) = api {
        let _ = match exchange(api, "PUT", "/api/v1/vm.nmi", None) {
            Ok((status, _)) => write!(text, "\nvm.nmi: status {status}"),
            Err(error) => write!(text, "\nvm.nmi: {error:#}"),
        };
        thread::sleep(PANIC_TIME);
    }
    text
}

struct Thread {
    name: String,
    state: String,
    /// CPU time, in clock ticks (USER_HZ, 1/100 s).
    ticks: u64,
    place: String,
}

/// Returns the process's threads by ID (proc_pid_stat(5)).
fn threads(pid: u32) -> BTreeMap<String, Thread> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return BTreeMap::new() };
    tasks
        .flatten()
        .filter_map(|task| {
            let stat = fs::read_to_string(task.path().join("stat")).ok()?;
            let place = fs::read_to_string(task.path().join("stack")).unwrap_or_default();
            let frames = place.lines().filter_map(|line| line.split(' ').nth(1)).take(4).collect::<Vec<_>>();
            let (name, state, ticks) = parse_stat(&stat)?;
            let id = task.file_name().to_string_lossy().into_owned();
            Some((id, Thread { name, state, ticks, place: frames.join(" < ") }))
        })
        .collect()
}

/// Parses name, state and CPU time in ticks.
fn parse_stat(stat: &str) -> Option<(String, String, u64)> {
    // The thread's name, in parentheses, may itself contain blanks and parentheses.
    let (head, rest) = stat.rsplit_once(')')?;
    let name = head.split_once('(')?.1;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some((name.into(), (*fields.first()?).into(), ticks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_of_a_thread_with_any_name_is_read() {
        let stat = "7 (a) (b c) S 1 7 7 0 -1 4194560 94 0 0 0 30 12 0 0 20 0 1 0 2 0 0";
        assert_eq!(parse_stat(stat), Some(("a) (b c".into(), "S".into(), 42)));
        assert_eq!(parse_stat("7 (sh) S 1"), None);
    }

    #[test]
    fn threads_of_this_process_are_named() {
        let report = report(std::process::id(), None);
        assert!(report.contains("stuck::tests::t"), "{report}");
    }
}
