// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waits for a child process. If this program must end, ends the child and its descendants.

use std::fs;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::signals::Signals;

/// Interval between checks of a child.
const POLL: Duration = Duration::from_millis(50);

/// Time between SIGTERM and SIGKILL. Processes can end by themselves in this time.
const GRACE: Duration = Duration::from_secs(5);

/// Child process that is killed when this value is dropped.
#[derive(Debug)]
pub struct KilledOnDrop(pub Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // Killing fails only if the child has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for `child` to end. On a signal, ends the child and its descendants, and returns `None`.
///
/// # Errors
/// Fails if waiting fails.
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

/// Sends SIGTERM to `child` and its descendants, kills the processes that are left after [`GRACE`], and waits for `child`.
fn end(child: &mut Child) {
    let all = descendants(Pid::from_child(child));
    signal(&all, Signal::TERM);
    let start = Instant::now();
    while start.elapsed() < GRACE && matches!(child.try_wait(), Ok(None)) {
        thread::sleep(Duration::from_millis(20));
    }
    if matches!(child.try_wait(), Ok(None)) {
        signal(&descendants(Pid::from_child(child)), Signal::KILL);
        // Waiting fails only if the child was waited for already.
        let _ = child.wait();
    }
}

fn signal(processes: &[Pid], signal: Signal) {
    for &process in processes {
        // The process may have ended meanwhile.
        let _ = kill_process(process, signal);
    }
}

/// Returns `root` and all its descendants, parents first.
fn descendants(root: Pid) -> Vec<Pid> {
    let mut all = vec![root];
    let mut next = 0;
    while let Some(&process) = all.get(next) {
        all.extend(children(process));
        next += 1;
    }
    all
}

/// Returns the children of a process (`/proc/PID/task/TID/children`, proc(5)), or nothing if the process has ended.
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
        // Wait until all three processes exist: the shell, its subshell, and the sleep.
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
