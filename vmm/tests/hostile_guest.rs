// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests a real `carom` process with a hostile guest (`hostile_guest/guest.c`). The process must survive, and serve its clients in time.
//! The guest's cost to the host must be bounded.
//!
//! The test runs the guest with two seeds, for 12 s each. `CAROM_HOSTILE_SECONDS` sets a longer time. `CAROM_HOSTILE_SEEDS` sets other
//! seeds, for example `7,8,9`. Without access to `/dev/kvm` or without a compiler, the test does nothing. `CAROM_HOSTILE_DEVICES` adds host
//! devices, as a comma-separated list of addresses (`0000:00:04.0,0000:00:05.0`). In the test rig (`docs/rig.md`), an integration test runs
//! this test with the rig's devices (`tests/integration/tests/guest/hostile_guest.rs`).
//!
//! In a third run of the guest, strace makes calls to the host's kernel fail. `CAROM_HOSTILE_FAULTS` is a comma-separated list of other
//! seeds for this run. With each of these seeds, one kind of call fails for 2 s, then the next kind. With host devices, calls fail only if
//! this variable is set.
//!
//! With AddressSanitizer (`scripts/test sanitizers`), the program's system calls are not filtered, because reports need further calls.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod c_guest;
mod http;
#[expect(dead_code, reason = "shared by tests whose calls must succeed")]
mod program;
mod tiny_guest;

use std::env;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use http::LIMIT;
use program::{call, command, has_kvm, start_by, wait_until};

const SEEDS: &str = "1,2";
const SECONDS: u64 = 12;
/// Maximum time of an operation or of a query. The limit is long enough for a busy machine, and ends a hanging test.
const OPERATION: Duration = Duration::from_secs(60);
/// Maximum numbers of the program's descriptors, threads and mappings, and maximum resident memory. The guest has 64 MiB of RAM.
const DESCRIPTORS: usize = 150;
/// Additional descriptors for each host device: a drive of the rig has 65 vectors.
const DESCRIPTORS_OF_A_DEVICE: usize = 80;
const THREADS: usize = 60;
const MAPPINGS: usize = 1000;
/// AddressSanitizer delays the reuse of 256 MiB of freed memory. For its records, it needs one byte for every 8 bytes of memory.
const RESIDENT_KIB: u64 = if cfg!(careful) { 768 << 10 } else { 320 << 10 };
/// Budget of the windows in `--iommu-bounce`, and size of a chunk.
const WINDOWS: u64 = 8 << 20;
const CHUNK: u64 = 2 << 20;
/// Maximum growth of the log in bytes per minute. The same maximum applies to the events.
const WRITTEN: u64 = 1 << 20;
/// A guest that did not reset itself pauses at its start (see `guest.c`). The pause lasts 2 to the power of `QUIET` cycles. On an
/// emulated machine the pause is longer, because the test needs longer to stop the guest.
const QUIET: u32 = 32;
const QUIET_EMULATED: u32 = 33;
/// Cycles of the fastest CPU in a nanosecond.
const CYCLES: u64 = 6;
/// Maximum time until the guest's output is in the file of the serial port.
const SAID: Duration = Duration::from_secs(1);

/// Seed of the guest that acts while host calls fail.
const FAULTY_SEED: u32 = 3;
/// Faults. Each fault has a call, an error and a number N: every N-th call fails with this error. The `ioctl` calls include `KVM_RUN`,
/// which enters the guest.
const FAULTS: &[(&str, &str, u32)] = &[
    ("mmap", "ENOMEM", 3),
    ("madvise", "ENOMEM", 2),
    ("fallocate", "ENOSPC", 2),
    ("memfd_create", "ENOMEM", 1),
    ("eventfd2", "EMFILE", 2),
    ("clone3", "EAGAIN", 2),
    ("epoll_ctl", "ENOSPC", 3),
    ("ioctl", "ENOMEM", 53),
];
const FAULTY_TIME: Duration = Duration::from_secs(2);

/// Program with a guest.
struct Carom {
    process: program::Carom,
    dir: tempfile::TempDir,
    start: Instant,
}

impl Drop for Carom {
    fn drop(&mut self) {
        if thread::panicking() {
            let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            let from = log.len().saturating_sub(20_000);
            eprintln!("the end of the log:\n{}", String::from_utf8_lossy(&log.as_bytes()[from..]));
        }
    }
}

/// Returns the base-2 logarithm of the number of cycles that a guest pauses at its start.
fn quiet() -> u32 {
    if devices().is_empty() { QUIET } else { QUIET_EMULATED }
}

/// Returns the addresses of the host devices for the guest.
fn devices() -> Vec<String> {
    let named = env::var("CAROM_HOSTILE_DEVICES").unwrap_or_default();
    named.split(',').filter(|name| !name.is_empty()).map(Into::into).collect()
}

/// Returns the arguments that put the host devices behind the virtio-iommu.
fn device_arguments() -> Vec<String> {
    let devices = devices();
    if devices.is_empty() {
        return Vec::new();
    }
    let mut arguments = vec!["--device".into()];
    arguments.extend(devices.iter().map(|name| format!("path=/sys/bus/pci/devices/{name},iommu=on")));
    if env::var("CAROM_IOMMUFD").is_ok_and(|value| value == "on") {
        arguments.extend(["--platform".into(), "iommufd=on".into()]);
    }
    arguments
}

impl Carom {
    fn start(seed: u32, more: &[&str]) -> Option<Self> {
        if !has_kvm() {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let kernel = c_guest::build("hostile_guest", &[], dir.path())?;
        let path = |name: &str| dir.path().join(name);
        let file = |name: &str| path(name).display().to_string();
        File::create(path("disk")).unwrap().set_len(4 << 20).unwrap();
        let mut command =
            command(dir.path(), &["--cpus", "boot=4", "--memory", "size=64M", "--no-shutdown", "--kernel"]);
        command
            .arg(kernel)
            .args(["--cmdline", &format!("seed={seed} quiet={}", quiet())])
            .args(["--rng", "src=/dev/urandom,iommu=on", "--disk", &format!("path={}", file("disk"))])
            .args(["--balloon", "size=0", "--vsock", &format!("cid=3,socket={}", file("vsock"))])
            .args(["--iommu-bounce", "size=8M", "--serial", &format!("file={}", file("serial"))])
            .args(["--event-monitor", &format!("path={}", file("events"))])
            .args(device_arguments())
            .args(if cfg!(careful) { &["--seccomp", "false"][..] } else { more })
            .stderr(File::create(path("log")).unwrap());
        let start = Instant::now();
        Some(Self { process: start_by(command, dir.path()), dir, start })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn call(&self, method: &str, name: &str) -> (u16, Value) {
        call(self.dir.path(), method, name, None)
    }

    /// Makes a call that must finish in time. The call fails if the VM was shut down meanwhile. In this case, boots the VM again and
    /// returns false.
    fn put(&self, name: &str) -> bool {
        let start = Instant::now();
        let (status, answer) = self.call("PUT", name);
        assert!(start.elapsed() < OPERATION, "{name} took {:?}", start.elapsed());
        if status != 204 {
            assert_eq!(self.call("GET", "vm.info").1["state"], "Created", "{name}: {status} {answer}");
            assert_eq!(self.call("PUT", "vm.boot").0, 204);
        }
        status == 204
    }

    fn proc(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.process.0.id()))
    }

    fn check_bounds(&self) {
        let count = |name: &str| fs::read_dir(self.proc(name)).unwrap().count();
        let (descriptors, threads) = (count("fd"), count("task"));
        let most = DESCRIPTORS + DESCRIPTORS_OF_A_DEVICE * devices().len();
        assert!(descriptors <= most && threads <= THREADS, "{descriptors} descriptors, {threads} threads");
        let mappings = fs::read_to_string(self.proc("maps")).unwrap().lines().count();
        assert!(mappings <= MAPPINGS, "{mappings} mappings");
        let status = fs::read_to_string(self.proc("status")).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let resident: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
        assert!(resident <= RESIDENT_KIB, "{resident} KiB");
        for name in ["log", "events"] {
            let size = fs::metadata(self.path(name)).unwrap().len();
            let most = WRITTEN * (1 + self.start.elapsed().as_secs() / 60);
            assert!(size <= most, "{name}: {size} bytes");
        }
    }

    /// Reboots the guest, and checks the counters and the pinned memory before the guest acts again. Returns true if this check was
    /// possible.
    fn check_reset(&self) -> bool {
        let asked = Instant::now();
        if !self.put("vm.reboot") {
            return false;
        }
        let is_paused = self.put("vm.pause");
        // True if the guest's pause may be over. (A guest that has reset itself does not pause.)
        let has_begun = asked.elapsed() >= Duration::from_nanos((1 << quiet()) / CYCLES);
        let paused = Instant::now();
        while !self.serial().ends_with('Q') && paused.elapsed() < SAID {
            thread::sleep(Duration::from_millis(5));
        }
        if !is_paused || has_begun || !self.serial().ends_with('Q') {
            self.put("vm.resume");
            return false;
        }
        let (_, counters) = self.call("GET", "vm.counters");
        let iommu = &counters["_iommu"];
        for name in ["mappings", "mapped_bytes", "stuck_ranges", "lost_chunks"] {
            assert_eq!(iommu[name], 0, "{name} after a reset: {iommu}");
        }
        // Chunks may be parked for the next boot. According to the devices and to the kernel, only these chunks are pinned.
        let windows = iommu["window_bytes"].as_u64().unwrap();
        assert!(windows <= WINDOWS && iommu["parked_chunks"].as_u64() == Some(windows / CHUNK), "{iommu}");
        let devices = counters.as_object().unwrap().iter().filter(|(name, _)| *name != "_iommu");
        let pinned: Vec<u64> = devices.filter_map(|(_, figures)| figures.get("pinned_bytes")?.as_u64()).collect();
        assert_eq!(iommu["pinned_bytes"], windows, "{counters}");
        // Devices that share an address space each report all pinned memory of that address space.
        let is_all = pinned.iter().sum::<u64>() >= windows && pinned.iter().all(|bytes| *bytes <= windows);
        assert!(is_all, "{counters}");
        let status = fs::read_to_string(self.proc("status")).unwrap();
        let amounts = ["VmLck:", "VmPin:"].map(|name| status.lines().find_map(|line| line.strip_prefix(name)).unwrap());
        let kib: u64 = amounts.iter().map(|text| text.trim().trim_end_matches(" kB").parse::<u64>().unwrap()).sum();
        assert_eq!(kib << 10, windows, "{amounts:?}: {counters}");
        self.put("vm.resume");
        true
    }

    /// Returns the guest's output: a letter for each step of its life. The output is empty before a VM exists.
    fn serial(&self) -> String {
        fs::read_to_string(self.path("serial")).unwrap_or_default()
    }

    /// True if the guest has begun at least two lives, and at least one MAP request has succeeded.
    fn has_acted(&self) -> bool {
        self.serial().matches('L').count() > 1 && self.total("requests_map") > self.total("failed_map")
    }

    fn total(&self, counter: &str) -> u64 {
        self.call("GET", "vm.counters").1["_iommu"][counter].as_u64().unwrap_or(0)
    }
}

fn attack(seed: u32, time: Duration) -> Option<()> {
    let mut carom = Carom::start(seed, &[])?;
    let (start, mut questions, mut looks, mut turn, mut pinned) = (Instant::now(), Vec::new(), 0, 0, 0);
    // A guest that gets little CPU time gets more time to act.
    while start.elapsed() < time || (!carom.has_acted() && start.elapsed() < time + LIMIT) {
        let next = start + Duration::from_secs(2) * (turn + 1);
        while Instant::now() < next {
            let asked = Instant::now();
            assert_eq!(carom.call("GET", "vm.info").0, 200);
            questions.push(asked.elapsed());
            thread::sleep(Duration::from_millis(10));
        }
        carom.check_bounds();
        pinned = carom.total("peak_pinned_bytes").max(pinned);
        turn += 1;
        match turn % 3 {
            0 => looks += u32::from(carom.check_reset()),
            1 => drop(carom.put("vm.pause") && carom.put("vm.resume")),
            _ => {}
        }
    }
    questions.sort_unstable();
    let slow = questions[questions.len() * 99 / 100];
    let lives = carom.serial().matches('L').count();
    let (maps, failed) = (carom.total("requests_map"), carom.total("failed_map"));
    eprintln!(
        "seed {seed}: {lives} lives, {maps} MAPs of which {failed} failed, at most \
         {pinned} bytes pinned, {looks} checks after a reset, {} queries, p99 {slow:?}",
        questions.len()
    );
    let has_devices = !devices().is_empty();
    assert!(slow < OPERATION, "p99 of vm.info: {slow:?}");
    assert!(carom.has_acted(), "{lives} lives, {maps} MAPs");
    assert!(pinned > 0 || !has_devices, "nothing was pinned");
    carom.put("vm.shutdown");
    carom.put("vm.boot");
    let status = carom.process.terminate();
    assert!(status.success(), "{status}");
    Some(())
}

/// Makes a call and ignores the result, because the program may have ended, or may end during the call.
fn try_put(socket: &Path, name: &str) {
    let Ok(mut stream) = UnixStream::connect(socket) else { return };
    let _ = stream.set_read_timeout(Some(OPERATION));
    let _ = write!(stream, "PUT /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    let _ = stream.read_to_end(&mut Vec::new());
}

/// Makes calls fail while a guest acts, resets itself, and is paused and resumed. The program survives, or ends with a line that gives the
/// reason.
fn attack_with_faults(seed: u32, faults: &[(&str, &str, u32)]) -> Option<()> {
    // strace makes a call fail by changing the number of the call. A filter would see the changed number, so filters are off.
    let mut carom = Carom::start(seed, &["--seccomp", "false"])?;
    let calls: Vec<&str> = faults.iter().map(|(call, ..)| *call).collect();
    let calls = calls.join(",");
    let what = format!("seed {seed} without some of {calls}");
    let trace = carom.path("trace");
    wait_until("the guest begins", || carom.serial().contains('L'));
    let mut strace = Command::new("strace")
        .args(["-f", "-qq", "-o"])
        .arg(&trace)
        .args(["-p", &carom.process.0.id().to_string(), "-e", &format!("trace={calls}")])
        .args(faults.iter().map(|(call, error, nth)| format!("-einject={call}:error={error}:when={nth}+{nth}")))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let (start, socket, mut ended) = (Instant::now(), carom.path("api.sock"), None);
    let mut operations = ["vm.pause", "vm.resume"].iter().cycle();
    while ended.is_none() && start.elapsed() < FAULTY_TIME {
        thread::sleep(Duration::from_millis(100));
        try_put(&socket, operations.next().unwrap());
        ended = carom.process.0.try_wait().unwrap();
    }
    // The traced process continues without strace.
    kill_process(Pid::from_child(&strace), Signal::TERM).unwrap();
    strace.wait().unwrap();
    let failed = fs::read_to_string(&trace).unwrap_or_default().matches("(INJECTED)").count();
    let log = carom.path("log");
    let said = || fs::read_to_string(&log).unwrap();
    if ended.is_none() {
        let lives = || carom.serial().matches('L').count();
        try_put(&socket, "vm.resume");
        let before = lives();
        carom.put("vm.reboot");
        wait_until(&format!("{what}: another guest begins"), || lives() != before);
        carom.check_bounds();
        let status = carom.process.terminate();
        assert!(status.success(), "{what}: {status}");
    } else if let Some(status) = ended {
        assert!(matches!(status.code(), Some(0..=2)), "{what}: {status}: {}", said());
        let said = said();
        let last = said.lines().last().unwrap_or_default();
        assert!(status.success() || (last.starts_with("carom: ") && last.len() > 20), "{what}: {said}");
    }
    assert!(!said().contains("panicked"), "{what}: {}", said());
    for left in ["api.sock", "api.sock.lock", "vsock"] {
        assert!(!carom.path(left).exists(), "{what}: {left} is left");
    }
    eprintln!("{what}: {failed} failed{}", if ended.is_some() { ", which ended the program" } else { "" });
    assert!(failed > 0, "{what}: strace made no call fail");
    Some(())
}

#[test]
fn host_faults_with_a_hostile_guest_are_survived_or_explained() {
    let others = env::var("CAROM_HOSTILE_FAULTS").ok();
    if cfg!(careful) || (others.is_none() && !devices().is_empty()) {
        return;
    }
    let strace = Command::new("strace").arg("--version").stdout(Stdio::null()).status();
    if !strace.as_ref().is_ok_and(ExitStatus::success) {
        return eprintln!("not tested: strace: {strace:?}");
    }
    let Some(others) = others else {
        attack_with_faults(FAULTY_SEED, FAULTS);
        return;
    };
    for seed in others.split(',') {
        let seed = seed.trim().parse().expect("CAROM_HOSTILE_FAULTS must be numbers separated by commas");
        if !FAULTS.chunks(1).all(|fault| attack_with_faults(seed, fault).is_some()) {
            return;
        }
    }
}

#[test]
fn hostile_guest_has_bounded_cost_and_delays_no_client() {
    let seconds = env::var("CAROM_HOSTILE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SECONDS);
    let seeds = env::var("CAROM_HOSTILE_SEEDS").unwrap_or_else(|_| SEEDS.into());
    for seed in seeds.split(',') {
        let seed = seed.trim().parse().expect("CAROM_HOSTILE_SEEDS must be numbers separated by commas");
        if attack(seed, Duration::from_secs(seconds)).is_none() {
            return;
        }
    }
}
