// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Pauses the vCPUs of a real `carom` process repeatedly: by `vm.pause`, `vm.nmi`, a snapshot and restore, a reset, and vCPU hotplug. The
//! guest (`paused_guest/guest.c`) checks all data that it reads from devices.
//!
//! `CAROM_PAUSES` is the number of pauses in each test. Without access to `/dev/kvm` or without a compiler, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod c_guest;
mod http;
mod paused_servers;
#[expect(dead_code, reason = "shared by tests that end the program by a signal")]
mod program;
mod tiny_guest;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use program::{Carom, call, put, start};

/// Default number of pauses in each test.
const PAUSES: u32 = 48;
/// Time after which a test fails if its guest hangs.
const HUNG: Duration = Duration::from_secs(240);

/// Line that the guest prints after the first round.
const FIRST: &str = "round 00000001.";

/// Returns the number of pauses.
fn pauses() -> u32 {
    env::var("CAROM_PAUSES").map_or(PAUSES, |text| text.parse().expect("CAROM_PAUSES must be a number"))
}

/// Guest, and the process that runs it.
struct Guest {
    dir: tempfile::TempDir,
    _carom: Carom,
    /// Number of rounds that the guest printed before its serial port was reopened.
    earlier: usize,
    /// Last complete line and unfinished line that the guest had printed before its serial port was reopened.
    begun: String,
    /// Number of times that the guest started.
    starts: usize,
}

impl Guest {
    fn start(options: impl Fn(&Path) -> Vec<String>) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let kernel = c_guest::build("paused_guest", &[], dir.path())?;
        let mut all: Vec<String> =
            ["--memory", "size=32M,shared=on", "--cpus", "boot=2,max=4", "--rng", "src=/dev/urandom"]
                .map(Into::into)
                .into();
        all.extend(["--kernel".into(), kernel.display().to_string()]);
        all.extend(["--serial".into(), format!("file={}", dir.path().join("serial").display())]);
        all.extend(["--log-file".into(), dir.path().join("log").display().to_string()]);
        all.extend(options(dir.path()));
        let carom = start(dir.path(), &all.iter().map(String::as_str).collect::<Vec<_>>())?;
        let guest = Self { dir, _carom: carom, earlier: 0, begun: String::new(), starts: 0 };
        guest.wait_for_round(0);
        Some(guest)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the numbers of the rounds that the guest printed since its serial port was opened.
    fn rounds(&self) -> Vec<u32> {
        let text = self.text();
        let wrong = text.lines().find(|line| line.starts_with('!'));
        assert!(wrong.is_none() || self.turns_out_starved(), "the guest read a wrong word: {wrong:?}");
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let number = |line: &str| {
            // A guest that was reset may have left a line unfinished.
            let line = if line.ends_with(FIRST) && FIRST.len() < line.len() { FIRST } else { line };
            let number = line.strip_prefix("round ").and_then(|rest| rest.strip_suffix('.'));
            let number =
                number.filter(|number| number.len() == 8).and_then(|number| u32::from_str_radix(number, 16).ok());
            number.unwrap_or_else(|| panic!("the guest printed {line:?}"))
        };
        whole.lines().take_while(|_| wrong.is_none()).map(number).collect()
    }

    /// True if the program has given up a server, because the server did not answer for some seconds. This can happen if the server's
    /// thread gets no CPU time. Afterwards, all bits of the device's registers read as 1.
    fn is_starved(&self) -> bool {
        let log = fs::read_to_string(self.path("log")).unwrap_or_default();
        log.contains("the device no longer works")
    }

    /// Like [`Self::is_starved`], but waits for the log, because the thread that writes the log may run later than the guest.
    fn turns_out_starved(&self) -> bool {
        let start = Instant::now();
        while !self.is_starved() && start.elapsed() < HUNG {
            thread::sleep(Duration::from_millis(50));
        }
        self.is_starved()
    }

    /// Returns the text of the serial port, beginning with the last lines from before the restore.
    fn text(&self) -> String {
        let bytes = fs::read(self.path("serial")).unwrap_or_default();
        self.begun.clone() + str::from_utf8(&bytes).expect("the guest prints ASCII")
    }

    /// Checks that no line is missing. Returns the number of lines.
    fn check(&mut self) -> usize {
        let rounds = self.rounds();
        for pair in rounds.windows(2) {
            assert!(pair[1] == pair[0] + 1 || pair[1] == 1, "the guest printed rounds {pair:?}");
        }
        self.starts += rounds.iter().filter(|round| **round == 1).count();
        rounds.len()
    }

    /// Waits until the guest has printed more than `lines` lines.
    fn wait_for_round(&self, lines: usize) {
        let start = Instant::now();
        while self.rounds().len() <= lines && !self.is_starved() {
            assert!(start.elapsed() < HUNG, "the guest prints nothing: {}", self.call("GET", "vm.info", None).1);
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn call(&self, method: &str, name: &str, body: Option<&Value>) -> (u16, Value) {
        call(self.dir.path(), method, name, body)
    }

    fn put(&self, name: &str, body: Option<&Value>) {
        put(self.dir.path(), name, body);
    }

    /// Pauses, saves, restores and resumes the VM.
    fn restore(&mut self) {
        let snapshot = self.path("snapshot");
        let _ = fs::remove_dir_all(&snapshot);
        let url = format!("file://{}", snapshot.display());
        self.put("vm.pause", None);
        self.put("vm.snapshot", Some(&json!({"destination_url": url})));
        self.put("vm.delete", None);
        // The last complete line is checked again, together with the line after it.
        self.earlier += self.check() - 1;
        let text = self.text();
        let end = text.rfind('\n').unwrap();
        self.begun = text[text[..end].rfind('\n').map_or(0, |end| end + 1)..].into();
        self.put("vm.restore", Some(&json!({"source_url": url, "resume": true})));
    }

    /// Resets the guest and waits until the guest can handle an NMI.
    fn reboot(&self) {
        self.put("vm.reboot", None);
        self.wait_for_round(self.rounds().len());
    }

    /// Asks the guest for another number of vCPUs. The status is 429 if the guest has not ejected a vCPU yet.
    fn resize(&self, vcpus: u32) {
        let (status, answer) = self.call("PUT", "vm.resize", Some(&json!({"desired_vcpus": vcpus})));
        assert!(matches!(status, 204 | 429), "{status} {answer}");
    }

    /// Pauses the guest many times, and calls `other` with the pause's number after each pause.
    fn pause_often(&mut self, what: &str, other: impl Fn(&mut Self, u32)) {
        let (start, pauses) = (Instant::now(), pauses());
        for pause in 0..pauses {
            if pause % 4 == 3 {
                self.put("vm.nmi", None);
            } else {
                self.put("vm.pause", None);
                self.put("vm.resume", None);
            }
            if pause % 32 == 31 {
                self.wait_for_round(self.rounds().len());
            }
            other(self, pause);
            if self.is_starved() {
                return eprintln!("{what}: ended after {pause} pauses: the machine is too slow for the server");
            }
        }
        self.wait_for_round(self.rounds().len());
        if self.is_starved() {
            return eprintln!("{what}: ended in the last round: the machine is too slow for the server");
        }
        let rounds = self.earlier + self.check();
        eprintln!(
            "{what}: {pauses} pauses in {:?}, {rounds} rounds, {} starts, no wrong word",
            start.elapsed(),
            self.starts
        );
    }
}

#[test]
fn emulated_devices_lose_no_word_in_pauses() {
    let options = |dir: &Path| {
        fs::write(dir.join("disk"), [7; 1 << 20]).unwrap();
        let disk = format!("path={}", dir.join("disk").display());
        let vsock = format!("cid=3,socket={}", dir.join("vsock").display());
        ["--disk", &disk, "--vsock", &vsock, "--balloon", "size=0", "--console", "null"].map(Into::into).into()
    };
    let Some(mut guest) = Guest::start(options) else { return };
    guest.pause_often("emulated devices", |guest, pause| match pause % 40 {
        5 | 15 | 25 | 35 => guest.resize(1 + pause / 10 % 4),
        20 => guest.restore(),
        39 => guest.reboot(),
        _ => {}
    });
}

#[test]
fn devices_of_other_processes_lose_no_word_in_pauses() {
    let options = |dir: &Path| {
        paused_servers::vfio_user(&dir.join("vfio-user"));
        paused_servers::vhost_user(&dir.join("vhost-user"));
        let disk = format!("vhost_user=on,vhost_socket={}", dir.join("vhost-user").display());
        let device = format!("socket={}", dir.join("vfio-user").display());
        ["--disk", &disk, "--user-device", &device].map(Into::into).into()
    };
    let Some(mut guest) = Guest::start(options) else { return };
    guest.pause_often("devices of other processes", |guest, pause| match pause % 40 {
        5 | 15 | 25 | 35 => guest.resize(1 + pause / 10 % 4),
        39 => guest.reboot(),
        _ => {}
    });
}
