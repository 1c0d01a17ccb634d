// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests a real `carom` process whose calls to the host's kernel fail. The process builds a VM whose guest prints a letter and powers off.
//! In each run, a different call fails. Either the VM works, or the program ends with one line that says what failed, and leaves no files
//! behind.
//!
//! strace makes calls fail by changing the number of a call before the kernel sees it. A system call filter would see the changed number,
//! so filters are off. A run takes a quarter of a second, and some 280 runs are possible. By default, the test makes every ninth run.
//! With `CAROM_HOST_FAULTS=all`, the test makes all runs. If the variable names a call, the test makes all runs for this call. Without
//! access to `/dev/kvm` or without strace, the test does nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod tiny_guest;

use std::env;
use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tiny_guest::elf;

/// `mov dx, 0x3f8; mov al, 'A'; out dx, al; mov dx, 0x600; mov al, 0x34; out dx, al; hlt`: sleep control, S5.
const SAY_AND_POWER_OFF: &[u8] =
    &[0x66, 0xba, 0xf8, 0x03, 0xb0, b'A', 0xee, 0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xf4];
/// Calls, and the errors that they return if the host runs out of resources or its disks are broken.
const FAULTS: &[(&str, &str)] = &[
    ("mmap", "ENOMEM"),
    ("madvise", "ENOMEM"),
    ("memfd_create", "ENOMEM"),
    ("eventfd2", "EMFILE"),
    ("epoll_create1", "EMFILE"),
    ("socket", "EMFILE"),
    ("fcntl", "EMFILE"),
    ("openat", "EMFILE"),
    ("clone3", "EAGAIN"),
    ("ioctl", "ENOMEM"),
    ("io_uring_setup", "ENOMEM"),
    ("statx", "EIO"),
    ("lseek", "EIO"),
];
/// Maximum time of a traced run on a busy host.
const LIMIT: Duration = Duration::from_secs(60);
/// Interval of the tested calls: every ninth call fails, each in a separate run.
const STEP: usize = 9;

fn can_be_tested() -> bool {
    if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        eprintln!("not tested: /dev/kvm: {error}");
        return false;
    }
    let strace = Command::new("strace").arg("--version").stdout(Stdio::null()).status();
    if !strace.as_ref().is_ok_and(ExitStatus::success) {
        eprintln!("not tested: strace: {strace:?}");
        return false;
    }
    true
}

/// Returns the number of times that the program makes `call` before it begins its work. The function counts the calls of a run that only
/// prints the version.
fn before_it_begins(dir: &Path, call: &str) -> usize {
    let trace = dir.join("trace");
    let status = Command::new("strace")
        .args(["-f", "-qq", "-e", &format!("trace={call}"), "-o"])
        .arg(&trace)
        .args([env!("CARGO_BIN_EXE_carom"), "--version"])
        .stdout(Stdio::null())
        .status();
    assert!(status.unwrap().success());
    fs::read_to_string(trace).unwrap().lines().filter(|line| line.contains(&format!("{call}("))).count()
}

/// Result of a run: exit status, standard error, and true if strace made a call fail.
struct Run {
    status: Option<i32>,
    said: String,
    failed: bool,
}

/// Runs the program in `dir`. `call` fails with `error` when a thread makes it for the `nth` time.
fn run(dir: &Path, memory: &str, call: &str, error: &str, nth: usize) -> Run {
    let (trace, said) = (dir.join("trace"), dir.join("said"));
    let mut child = Command::new("strace")
        .args(["-f", "-qq", "-o"])
        .arg(&trace)
        .args(["-e", &format!("trace={call}"), "-e", &format!("inject={call}:error={error}:when={nth}")])
        .args([env!("CARGO_BIN_EXE_carom"), "--seccomp", "false", "--kernel", "kernel", "--memory", memory])
        .args([
            "--cpus",
            "boot=2",
            "--serial",
            "file=serial",
            "--rng",
            "src=/dev/urandom,iommu=on",
            "--balloon",
            "size=0",
        ])
        .args(["--disk", "path=disk,image_type=raw", "--vsock", "cid=3,socket=vsock", "--iommu-bounce", "size=8M"])
        .args(["--api-socket", "path=api.sock"])
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&said).unwrap())
        .spawn()
        .unwrap();
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status.code();
        }
        if start.elapsed() >= LIMIT {
            // Killing strace also kills the traced process.
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{call} {nth}: the program does not end");
        }
        thread::sleep(Duration::from_millis(5));
    };
    let read = |path: &Path| String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
    Run { status, said: read(&said), failed: read(&trace).contains("(INJECTED)") }
}

#[test]
fn failing_host_call_is_reported_or_does_not_matter() {
    if !can_be_tested() {
        return;
    }
    let wanted = env::var("CAROM_HOST_FAULTS").ok();
    let step = if wanted.is_some() { 1 } else { STEP };
    let is_wanted = |call: &str| wanted.as_deref().is_none_or(|wanted| wanted == "all" || wanted == call);
    let faults: Vec<_> = FAULTS.iter().filter(|(call, _)| is_wanted(call)).collect();
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("kernel"), elf(SAY_AND_POWER_OFF)).unwrap();
    File::create(at("disk")).unwrap().set_len(4 << 20).unwrap();
    let mut runs = 0;
    for (call, error) in &faults {
        let begins = before_it_begins(dir.path(), call) + 1;
        for nth in (begins..).step_by(step) {
            let _ = fs::remove_file(at("serial"));
            let Run { status, said, failed } = run(dir.path(), "size=64M", call, error, nth);
            if !failed {
                break;
            }
            runs += 1;
            let what = format!("{call} {nth}: status {status:?}: {said}");
            assert!(!said.contains("panicked"), "{what}");
            match status {
                Some(0) => assert_eq!(fs::read(at("serial")).unwrap(), b"A", "{what}"),
                Some(1 | 2) => {
                    let last = said.lines().last().unwrap_or_default();
                    assert!(last.starts_with("carom: ") && last.len() > 20, "{what}");
                }
                _ => panic!("{what}"),
            }
            // If `statx` fails, the program does not remove a file, because the file may belong to another process by now.
            for left in ["vsock", "api.sock", "api.sock.lock"].iter().filter(|_| *call != "statx") {
                assert!(!at(left).exists(), "{left} is left: {what}");
            }
            for left in ["vsock", "api.sock"] {
                let _ = fs::remove_file(at(left));
            }
        }
    }
    eprintln!("{runs} calls failed");
    assert!(runs + 2 >= faults.len(), "strace made only {runs} calls fail");
}

/// Finds the first line with `text` in the trace of the last run. Returns the position of this call among the calls of its thread.
fn number_of(dir: &Path, text: &str) -> usize {
    let trace = fs::read_to_string(dir.join("trace")).unwrap();
    let thread = |line: &str| line.split_whitespace().next().map(String::from);
    let at = trace.lines().position(|line| line.contains(text)).unwrap_or_else(|| panic!("no {text} in {trace}"));
    let of = thread(trace.lines().nth(at).unwrap());
    trace.lines().take(at + 1).filter(|line| thread(line) == of && !line.contains(" resumed>")).count()
}

#[test]
fn interrupted_call_is_repeated_while_a_vm_is_built() {
    if !can_be_tested() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("kernel"), elf(SAY_AND_POWER_OFF)).unwrap();
    File::create(dir.join("disk")).unwrap().set_len(4 << 20).unwrap();
    let memory = "size=64M,shared=on,reserve=on";
    for (call, text) in [("ioctl", "KVM_CREATE_VM"), ("fallocate", "fallocate(")] {
        assert_eq!(run(dir, memory, call, "EINTR", 60_000).status, Some(0));
        let Run { status, said, failed } = run(dir, memory, call, "EINTR", number_of(dir, text));
        assert!(failed && status == Some(0), "{call}: status {status:?}: {said}");
    }
}
