// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs a VMM with a time limit, and watches its console file and its pinned memory. At the end of the run, kills the VMM if it
//! still runs.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::stuck;

/// Default interval between checks of a process.
pub(crate) const POLL: Duration = Duration::from_millis(50);

/// Maximum time to wait for the end of a killed process. Unpinning a guest's memory takes seconds under emulation.
const KILL_TIME: Duration = Duration::from_secs(30);

/// Limits after which a process is killed.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum run time.
    pub time: Duration,
    /// True if a panic or oops of the guest's kernel on the console ends the run.
    pub stop_on_panic: bool,
}

/// End of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The process ended by itself, with this status.
    Exited(ExitStatus),
    /// The process was killed after its time limit.
    TimedOut,
    /// The process was killed after a panic of the guest's kernel.
    GuestPanicked,
}

/// Result of a process.
#[derive(Debug)]
pub struct Finished {
    /// End of the process.
    pub ended: Ended,
    /// stdout. For a VMM, this is the guest's console.
    pub stdout: String,
    /// stderr.
    pub stderr: String,
    /// Maximum memory that the process had locked or pinned at any check, in bytes (`VmLck` and `VmPin` of proc_pid_status(5)).
    /// Memory that VFIO's type 1 back end pins counts in `VmLck`, and memory that iommufd pins counts in `VmPin`.
    pub peak_pinned_bytes: u64,
    /// Time from start to end.
    pub elapsed: Duration,
    /// Report on the process's threads, if the process reached its time limit.
    pub stuck: Option<String>,
}

/// Start of a console line with which the guest requests a report of the VMM's counters.
const MARK: &str = "CAROM-MARK ";

/// Runs `command` with its stdout in the file `console`.
///
/// `api` is the socket of Carom's API, or `None` for other programs. If new `CAROM-MARK` lines appear on the console, sends
/// SIGUSR1 to Carom, which then reports its counters.
///
/// # Errors
/// Fails if the program cannot be started or watched. A failure of the program itself is not an error.
pub fn run_limited(command: &mut Command, console: &Path, limits: Limits, api: Option<&Path>) -> Result<Finished> {
    run_watched(command, console, limits, api, POLL, |_, _| {})
}

/// Like [`run_limited`], but checks the process at intervals of `poll`. Each check calls `look` with the process ID and the
/// complete lines on the console.
///
/// # Errors
/// Fails like [`run_limited`].
pub(crate) fn run_watched(
    command: &mut Command,
    console: &Path,
    limits: Limits,
    api: Option<&Path>,
    poll: Duration,
    mut look: impl FnMut(u32, &str),
) -> Result<Finished> {
    let mut running = Running::start(command, console)?;
    let (child, watch) = (&mut running.child, &mut running.watch);
    let mut peak_pinned_bytes = 0;
    let mut stuck = None;

    let ended = loop {
        if let Some(status) = child.0.try_wait()? {
            break Ended::Exited(status);
        }
        peak_pinned_bytes = peak_pinned_bytes.max(pinned_bytes(child.0.id()));
        watch.read()?;
        look(child.0.id(), &watch.text);
        if api.is_some() && watch.new_marks() {
            child.signal(Signal::USR1)?;
        }
        if limits.stop_on_panic && watch.panicked() {
            // Wait until the kernel has printed the rest of its message.
            thread::sleep(Duration::from_secs(1));
            break Ended::GuestPanicked;
        }
        if running.start.elapsed() > limits.time {
            stuck = Some(stuck::report(child.0.id(), api));
            break Ended::TimedOut;
        }
        thread::sleep(poll);
    };
    let Running { child, mut watch, stderr, start } = running;
    drop(child);
    watch.read()?;
    Ok(Finished {
        ended,
        stdout: watch.text,
        stderr: String::from_utf8_lossy(&fs::read(&stderr)?).into_owned(),
        peak_pinned_bytes,
        elapsed: start.elapsed(),
        stuck,
    })
}

/// Running VMM. Its console and its stderr are in two files in the same directory. The VMM ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct Running {
    child: Guarded,
    watch: Watch,
    stderr: PathBuf,
    start: Instant,
}

impl Running {
    /// Starts the VMM.
    ///
    /// # Errors
    /// Fails if the VMM cannot be started or a file cannot be created.
    pub(crate) fn start(command: &mut Command, console: &Path) -> Result<Self> {
        let stderr = console.with_extension("stderr");
        let create = |path: &Path| File::create(path).with_context(|| format!("cannot create {}", path.display()));
        command.stdin(Stdio::null()).stdout(create(console)?).stderr(create(&stderr)?);
        let start = Instant::now();
        let child =
            Guarded(command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?);
        let watch = Watch { file: File::open(console)?, text: String::new(), rest: Vec::new(), marks: 0 };
        Ok(Self { child, watch, stderr, start })
    }

    /// Returns the process ID.
    pub(crate) fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Returns the time since the start.
    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Returns the complete lines on the console.
    ///
    /// # Errors
    /// Fails if the console cannot be read.
    pub(crate) fn console(&mut self) -> Result<&str> {
        self.watch.read()?;
        Ok(&self.watch.text)
    }

    /// Returns the VMM's stderr.
    pub(crate) fn stderr(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.stderr).unwrap_or_default()).into_owned()
    }

    /// Returns the exit status if the VMM has ended.
    ///
    /// # Errors
    /// Fails if the status cannot be queried.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.0.try_wait()?)
    }
}

/// Child process that ends when this value is dropped.
#[derive(Debug)]
struct Guarded(Child);

impl Guarded {
    fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.0), signal).context("cannot send a signal to the VMM")
    }
}

impl Drop for Guarded {
    /// Kills the child and waits for its end. The wait is limited, because a process that hangs in the kernel cannot be killed.
    fn drop(&mut self) {
        // Killing fails only if the child has ended already.
        let _ = self.0.kill();
        let start = Instant::now();
        while matches!(self.0.try_wait(), Ok(None)) {
            if start.elapsed() > KILL_TIME {
                let stack = fs::read_to_string(format!("/proc/{}/stack", self.0.id())).unwrap_or_default();
                eprintln!("process {} does not end after SIGKILL; its kernel stack is:\n{stack}", self.0.id());
                return;
            }
            thread::sleep(POLL);
        }
    }
}

/// Growing console file.
#[derive(Debug)]
struct Watch {
    file: File,
    text: String,
    /// Bytes of the incomplete line at the end of the file.
    rest: Vec<u8>,
    marks: usize,
}

impl Watch {
    fn read(&mut self) -> Result<()> {
        let mut bytes = Vec::new();
        self.file.read_to_end(&mut bytes).context("cannot read the console")?;
        self.rest.append(&mut bytes);
        // A multi-byte character may be incomplete at the end of the file, so only complete lines are decoded.
        let whole = self.rest.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let line: Vec<u8> = self.rest.drain(..whole).filter(|&byte| byte != b'\r').collect();
        self.text.push_str(&String::from_utf8_lossy(&line));
        Ok(())
    }

    fn new_marks(&mut self) -> bool {
        let marks = self.text.matches(MARK).count();
        std::mem::replace(&mut self.marks, marks) < marks
    }

    fn panicked(&self) -> bool {
        self.text.contains("Kernel panic - not syncing") || self.text.contains("---[ end trace ")
    }
}

/// Returns the memory that a process has locked or pinned now, in bytes. Returns 0 if the process is gone.
pub(crate) fn pinned_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    parse_pinned(&status)
}

fn parse_pinned(status: &str) -> u64 {
    status
        .lines()
        .filter_map(|line| line.strip_prefix("VmLck:").or_else(|| line.strip_prefix("VmPin:")))
        .filter_map(|value| value.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok())
        .sum::<u64>()
        * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { time: Duration::from_secs(120), stop_on_panic: true };

    fn run(script: &str, limits: Limits) -> Finished {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run_limited(&mut command, &dir.path().join("console"), limits, Some(&dir.path().join("api"))).unwrap()
    }

    #[test]
    fn output_and_status_are_kept() {
        let finished = run("printf 'one\\r\\ntwo\\n'; echo bad >&2; exit 3", LIMITS);
        assert_eq!(finished.stdout, "one\ntwo\n");
        assert_eq!(finished.stderr, "bad\n");
        assert!(matches!(finished.ended, Ended::Exited(status) if status.code() == Some(3)));
    }

    #[test]
    fn time_limit_kills() {
        let finished = run("exec sleep 600", Limits { time: Duration::from_millis(200), ..LIMITS });
        assert_eq!(finished.ended, Ended::TimedOut);
        assert!(finished.elapsed < Duration::from_secs(120));
    }

    #[test]
    fn panic_on_the_console_ends_the_run() {
        let finished = run("echo 'Kernel panic - not syncing: x'; exec sleep 600", LIMITS);
        assert_eq!(finished.ended, Ended::GuestPanicked);
    }

    #[test]
    fn mark_sends_a_signal() {
        let finished = run("trap 'echo got it; exit 0' USR1; echo CAROM-MARK a; while :; do sleep 0.05; done", LIMITS);
        assert!(finished.stdout.contains("got it"), "{}", finished.stdout);
    }

    #[test]
    fn pinned_memory_is_read_from_both_counters() {
        assert_eq!(parse_pinned("Name:\tx\nVmLck:\t   12 kB\nVmPin:\t    4 kB\nVmRSS:\t 99 kB\n"), 16 * 1024);
    }
}
