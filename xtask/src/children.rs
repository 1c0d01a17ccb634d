// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waits for a child process, and ends it with all that it has started when this program is to end.

use std::fs;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::signals::Signals;

/// How often a child is looked at.
const POLL: Duration = Duration::from_millis(50);

/// How long processes may take to end by themselves once they are told.
const GRACE: Duration = Duration::from_secs(5);

/// A child process, which is killed when this value is dropped.
#[derive(Debug)]
pub struct KilledOnDrop(pub Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // Fails only where it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for `child` to end. On a signal, ends it with its descendants, and returns no status.
///
/// # Errors
/// It cannot be waited for.
pub fn run_command(child: &mut Child, signals: &Signals) -> Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for a program")? {
            return Ok(Some(status));
        }
        if signals.caught().is_some() {
            end(child);
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

/// Tells `child` and its descendants to end, kills what is left after a while, and waits for `child`.
fn end(child: &mut Child) {
    let all = descendants(Pid::from_child(child));
    signal(&all, Signal::TERM);
    let start = Instant::now();
    while start.elapsed() < GRACE && matches!(child.try_wait(), Ok(None)) {
        thread::sleep(Duration::from_millis(20));
    }
    if matches!(child.try_wait(), Ok(None)) {
        signal(&descendants(Pid::from_child(child)), Signal::KILL);
        // Fails only where it was waited for already.
        let _ = child.wait();
    }
}

fn signal(processes: &[Pid], signal: Signal) {
    for &process in processes {
        // It may have ended meanwhile.
        let _ = kill_process(process, signal);
    }
}

/// `root` and all that descend from it, parents first.
fn descendants(root: Pid) -> Vec<Pid> {
    let mut all = vec![root];
    let mut next = 0;
    while let Some(&process) = all.get(next) {
        all.extend(children(process));
        next += 1;
    }
    all
}

/// The children of a process (`/proc/PID/task/TID/children`, proc(5)); none when it is gone.
fn children(process: Pid) -> Vec<Pid> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|numbers| numbers.split_whitespace().filter_map(|number| number.parse().ok()).collect::<Vec<_>>())
        .filter_map(Pid::from_raw)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::test_kill_process;

    use super::*;

    #[test]
    fn grandchildren_end_with_the_child() {
        let mut child = Command::new("sh").args(["-c", "(sleep 600 & wait) & wait"]).spawn().unwrap();
        let start = Instant::now();
        let mut all = Vec::new();
        // The shell, one below it, and its sleep.
        while all.len() < 3 && start.elapsed() < Duration::from_secs(60) {
            thread::sleep(Duration::from_millis(10));
            all = descendants(Pid::from_child(&child));
        }
        assert_eq!(all.len(), 3);

        end(&mut child);

        for process in all {
            while test_kill_process(process).is_ok() && start.elapsed() < Duration::from_secs(120) {
                thread::sleep(Duration::from_millis(10));
            }
            assert!(test_kill_process(process).is_err(), "{process} is left");
        }
    }
}
