// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guests of a few instructions that ask for as much as they can, in a real `carom` process: what the host keeps of it is bounded, and
//! clients are served.
//!
//! Where there is no `/dev/kvm` that this process may use, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod echo_guest;
mod http;
mod tiny_guest;

use std::fs::{self, File, OpenOptions};
use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use echo_guest::ECHO;
use http::PATIENCE;
use tiny_guest::elf;

/// `ud2`, where no exception has a handler: a triple fault.
const RESET: &[u8] = &[0x0f, 0x0b];
/// How long a guest may go on.
const TIME: Duration = Duration::from_secs(4);

/// A process that is gone at the end of the test.
struct Carom {
    child: Child,
    dir: tempfile::TempDir,
}

impl Drop for Carom {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Carom {
    fn start(code: &[u8]) -> Option<Self> {
        if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
            eprintln!("not tested: /dev/kvm: {error}");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("kernel"), elf(code)).unwrap();
        let path = |name: &str| dir.path().join(name);
        let child = Command::new(env!("CARGO_BIN_EXE_carom"))
            .arg("--kernel")
            .arg(path("kernel"))
            .args(["--cpus", "boot=2", "--memory", "size=64M", "--serial", "null", "-v"])
            .arg("--api-socket")
            .arg(path("api.sock"))
            .args(["--event-monitor", &format!("path={}", path("events").display())])
            .stdin(Stdio::null())
            .stderr(File::create(path("log")).unwrap())
            .spawn()
            .unwrap();
        let carom = Self { child, dir };
        let start = Instant::now();
        while UnixStream::connect(carom.path("api.sock")).is_err() {
            assert!(start.elapsed() < PATIENCE, "no API");
            thread::sleep(Duration::from_millis(5));
        }
        Some(carom)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn call(&self, method: &str, name: &str) -> u16 {
        let mut stream = http::connect(&self.path("api.sock"));
        http::send(&mut stream, method, name, None);
        http::receive(&mut BufReader::new(stream)).0
    }

    fn size(&self, name: &str) -> u64 {
        fs::metadata(self.path(name)).unwrap().len()
    }
}

#[test]
fn guest_resets_in_a_loop_are_slowed_down_and_calls_served() {
    let Some(carom) = Carom::start(RESET) else { return };
    let start = Instant::now();
    while start.elapsed() < TIME {
        assert_eq!(carom.call("GET", "vm.info"), 200);
        thread::sleep(Duration::from_millis(20));
    }
    let events = fs::read_to_string(carom.path("events")).unwrap();
    let resets = events.matches("\"rebooted\"").count();
    assert!((8..32).contains(&resets), "{resets} resets");
    assert!(carom.size("log") < 64 << 10 && events.len() < 64 << 10, "{} {}", carom.size("log"), events.len());
    // One that waits is no reason not to do as a client says.
    for (name, status) in [("vm.pause", 204), ("vm.resume", 204), ("vm.reboot", 204), ("vm.shutdown", 204)] {
        let start = Instant::now();
        assert_eq!(carom.call("PUT", name), status, "{name}");
        assert!(start.elapsed() < Duration::from_secs(10), "{name}");
    }
}

#[test]
fn sigterm_ends_a_guest_that_resets_or_runs_without_end() {
    for code in [RESET, ECHO] {
        let Some(mut carom) = Carom::start(code) else { return };
        thread::sleep(Duration::from_secs(1));
        let start = Instant::now();
        kill_process(Pid::from_child(&carom.child), Signal::TERM).unwrap();
        assert!(carom.child.wait().unwrap().success());
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }
}
