// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest that one process saves and another process restores. In the guest, the program `guest/restore-check.c` checks that
//! time, timers, memory, registers, random bytes and the console continue correctly.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use carom_integration::api::ApiVmm;
use carom_integration::harness::{guest_test, tell};
use carom_integration::{Kernel, Site};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{payload, put};
use crate::support::{MIB, SITE};
use crate::vcpus::USE_VCPUS;

/// Maximum time until the guest has made the expected progress.
const PROGRESS_TIME: Duration = Duration::from_secs(60);

/// Maximum change of the guest's time of day relative to the host's, in ms. The measurement is inexact: the guest prints the time
/// five times per second, and each line takes time to reach the file.
const OFF: i64 = 1500;

/// Number of console lines for measuring the initial difference between the guest's and the host's time of day.
const CLOCK_LINES: usize = 5;

/// Maximum difference between the advance of the guest's monotonic clock and the advance of its real-time clock.
const CLOCKS_DIFFER: Duration = Duration::from_millis(100);

/// Time that passes between saving and restoring the guest in the second round.
const AWAY: Duration = Duration::from_secs(3);

/// Minimum progress of the guest before it is saved again.
const PROGRESS: Progress = Progress { lines: 3, random: 2048, blocks: 20, ticks: 8 };

struct Progress {
    lines: u64,
    random: u64,
    blocks: u64,
    ticks: u64,
}

/// Parsed console line of `restore-check`.
#[derive(Debug, Clone)]
struct Line {
    id: String,
    numbers: BTreeMap<String, u64>,
    ticks: Vec<u64>,
}

impl Line {
    fn parse(line: &str) -> Option<Self> {
        let mut fields: BTreeMap<&str, &str> = line.split(' ').filter_map(|field| field.split_once('=')).collect();
        let id = fields.remove("id")?.into();
        let ticks = fields.remove("ticks")?.split(',').map(|ticks| ticks.parse().ok()).collect::<Option<_>>()?;
        let number = |(name, value): (&str, &str)| Some((name.into(), value.parse().ok()?));
        Some(Self { id, ticks, numbers: fields.into_iter().map(number).collect::<Option<_>>()? })
    }

    fn get(&self, name: &str) -> u64 {
        *self.numbers.get(name).unwrap_or_else(|| panic!("no {name}: {self:?}"))
    }

    fn time(&self, clock: &str) -> Duration {
        Duration::from_millis(self.get(clock))
    }

    /// True if the guest has made at least [`PROGRESS`] since `earlier`, in each kind of work.
    fn is_beyond(&self, earlier: &Self) -> bool {
        let more = |name| self.get(name) - earlier.get(name);
        more("n") >= PROGRESS.lines
            && more("rng") >= PROGRESS.random
            && more("blocks") >= PROGRESS.blocks
            && self.ticks.iter().zip(&earlier.ticks).all(|(new, old)| new - old >= PROGRESS.ticks)
    }

    /// Asserts that this is a later line of the same guest as `before`, and that the guest counted no errors.
    fn check_goes_on(&self, before: &Self) {
        assert_eq!(self.id, before.id, "the guest was started again");
        for counter in ["n", "mono", "real", "rng", "blocks"] {
            assert!(self.get(counter) >= before.get(counter), "{counter} went back: {before:?}, {self:?}");
        }
        assert_eq!(self.ticks.len(), 2);
        self.check_nothing_wrong();
        let passed = |clock| self.time(clock).saturating_sub(before.time(clock));
        let difference = passed("mono").abs_diff(passed("real"));
        assert!(
            difference < CLOCKS_DIFFER,
            "the guest's clocks advanced by different times: {:?} and {:?}",
            passed("mono"),
            passed("real")
        );
    }

    fn check_nothing_wrong(&self) {
        for counter in ["back", "registers", "repeats", "memory"] {
            assert_eq!(self.get(counter), 0, "{counter}: {self:?}");
        }
    }
}

/// Returns all complete lines of `restore-check` on the console.
fn lines(vmm: &ApiVmm) -> Vec<Line> {
    let whole = vmm.whole_lines();
    assert!(!whole.contains("CAROM-RESTORE-CHECK-FAILED"), "{whole}");
    whole.lines().filter_map(|line| Line::parse(line.strip_prefix("CAROM-RESTORE-CHECK ")?)).collect()
}

/// Waits until `wanted` is true for the last line, and returns this line. Fails after [`PROGRESS_TIME`].
fn wait_for_line(vmm: &ApiVmm, wanted: impl Fn(&Line) -> bool) -> Line {
    let start = Instant::now();
    loop {
        if let Some(line) = lines(vmm).into_iter().next_back().filter(&wanted) {
            return line;
        }
        assert!(start.elapsed() < PROGRESS_TIME, "the guest makes no progress: {:?}", lines(vmm).last());
        thread::sleep(Duration::from_millis(50));
    }
}

/// Returns the guest's time of day in `line` minus the host's current time, in milliseconds. The line must have just arrived.
fn ahead_of_host(line: &Line) -> i64 {
    let host = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
    i64::try_from(line.get("real")).unwrap() - i64::try_from(host).unwrap()
}

/// Returns the error of a rejected call.
fn refusal(vmm: &ApiVmm, call: &str, body: &Value) -> String {
    let (status, answer) = vmm.call("PUT", &format!("/api/v1/{call}"), Some(body)).unwrap();
    assert_eq!(status, 400, "{call}: {answer}");
    let [Value::String(message)] = answer.as_array().unwrap().as_slice() else { panic!("{answer}") };
    message.clone()
}

fn url(directory: &Path) -> String {
    format!("file://{}", directory.display())
}

/// Returns the names of the VM's events so far.
fn events(vmm: &ApiVmm) -> String {
    let events = vmm.events().unwrap();
    let names = events.iter().filter(|event| event.source == "vm").map(|event| event.event.as_str());
    names.collect::<Vec<_>>().join(" ")
}

/// Waits until the events' names end with `end`, because the VMM answers a request before it writes the last event. Returns the
/// names of all events.
fn events_that_end(vmm: &ApiVmm, end: &str) -> String {
    let start = Instant::now();
    loop {
        let all = events(vmm);
        if all.ends_with(end) {
            return all;
        }
        assert!(start.elapsed() < PROGRESS_TIME, "{all}: does not end with {end}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Way to restore a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Restore by the command-line option. The guest runs immediately.
    Option,
    /// Restore by the command-line option with `prefault`, so that Carom reads all RAM from the snapshot immediately. Then the
    /// test removes the snapshot, and resumes the guest by the API.
    OptionPrefault,
    /// Restore and resume by the API.
    Api,
}

const WAYS: [Way; 3] = [Way::Option, Way::OptionPrefault, Way::Api];

/// Guest that is saved and restored.
struct Subject {
    vmm: ApiVmm,
    /// Last line of `restore-check` before the guest was saved.
    before: Line,
    /// The guest's time of day minus the host's, in milliseconds. The guest's clock can be some seconds late if the guest boots
    /// slowly.
    ahead: i64,
}

impl Subject {
    /// Boots the guest. `config` is additional configuration.
    fn boot(cmdline: &str, config: &[(&str, Value)]) -> Self {
        Self::boot_with("", cmdline, config)
    }

    /// Like [`Subject::boot`], with a `job` that runs first.
    fn boot_with(job: &str, cmdline: &str, config: &[(&str, Value)]) -> Self {
        let program = fs::read(SITE.restore_check.as_ref().expect("CAROM_RESTORE_CHECK is set")).unwrap();
        let vmm = ApiVmm::start_with_program(
            &SITE,
            Kernel::Patched,
            "restore-check",
            program,
            &format!("{job}restore-check 16"),
        )
        .unwrap();
        let mut body = json!({
            "payload": payload(&vmm, &format!(" {cmdline}")),
            "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
            "memory": {"size": 256 * MIB},
            "serial": {"mode": "File", "file": vmm.console_file()},
        });
        for (key, value) in config {
            body[key] = value.clone();
        }
        put(&vmm, "vm.create", &body);
        put(&vmm, "vm.boot", &Value::Null);
        vmm.wait_for("CAROM-RESTORE-CHECK ", 1, BOOT_TIME).unwrap();
        let first = wait_for_line(&vmm, |_| true);
        // A line that arrives late makes the guest's clock look late, so use the maximum of several lines.
        let (mut newest, mut ahead) = (first.clone(), i64::MIN);
        for _ in 0..CLOCK_LINES {
            newest = wait_for_line(&vmm, |line| line.is_beyond(&newest));
            ahead = ahead.max(ahead_of_host(&newest));
        }
        newest.check_goes_on(&first);
        assert!(ahead.abs() < 10_000, "the guest's clock is {ahead} ms ahead of the host's");
        Self { vmm, before: first, ahead }
    }

    /// Checks that the guest's time of day has advanced with the host's. `first` is a line that has just arrived. Lines arrive
    /// late if the host's CPUs are busy, so it is sufficient if a later line shows the expected time.
    fn check_time(&self, first: &Line) {
        let start = Instant::now();
        let mut line = first.clone();
        loop {
            let off = ahead_of_host(&line) - self.ahead;
            if off.abs() < OFF {
                return;
            }
            assert!(start.elapsed() < PROGRESS_TIME, "the guest's clock is {off} ms ahead of the expected time");
            line = wait_for_line(&self.vmm, |newer| newer.is_beyond(&line));
        }
    }

    /// Waits for some progress of the guest, saves the guest to `directory`, and ends the process.
    fn save(&mut self, directory: &Path) {
        let since = self.before.clone();
        self.before = wait_for_line(&self.vmm, |line| line.is_beyond(&since));
        put(&self.vmm, "vm.pause", &Value::Null);
        put(&self.vmm, "vm.snapshot", &json!({"destination_url": url(directory)}));
        events_that_end(&self.vmm, "pausing paused snapshotting snapshotted");
        self.end();
        self.before = lines(&self.vmm).pop().unwrap();
        self.before.check_nothing_wrong();
    }

    /// Resets the restored VM, whose guest boots again.
    fn reboot(&self) {
        put(&self.vmm, "vm.reboot", &Value::Null);
        let first = wait_for_line(&self.vmm, |line| line.id != self.before.id);
        let later = wait_for_line(&self.vmm, |line| line.is_beyond(&first));
        later.check_goes_on(&first);
    }

    fn end(&mut self) {
        put(&self.vmm, "vmm.shutdown", &Value::Null);
        assert!(self.vmm.wait(PROGRESS_TIME).unwrap().success());
        let console = self.vmm.console();
        // The kernel compares kvmclock with the time stamp counter twice per second. If the time between two comparisons is
        // longer, as after a restore, the kernel prints a message. The rig's own counter is unstable, so KVM stops a guest's
        // counter while the guest does not run. The guest's kernel also prints a message about this.
        let known = if SITE.rig == "tcg" { "clocksource:" } else { "Long readout interval" };
        // For a guest that was saved during a timer interrupt, the interrupt seems to last until the restore.
        let known = [known, "hrtimer: interrupt took"].into_iter();
        // Because KVM stops the counters, an added vCPU is not synchronized with the other vCPUs.
        let of_counter = ["TSC synchronization", "cycles TSC warp", "TSC warped"];
        let known: Vec<&str> = known.chain(of_counter.into_iter().filter(|_| SITE.rig == "tcg")).collect();
        let is_complaint = |line: &&str| line.starts_with("CAROM-KERNEL ") && !known.iter().any(|of| line.contains(of));
        let said: Vec<&str> = console.lines().filter(is_complaint).collect();
        assert!(said.is_empty(), "the guest's kernel complains: {said:#?}");
    }

    /// Restores the guest in a new process, and checks its progress.
    fn restore(&mut self, directory: &Path, way: Way) {
        let body = json!({"source_url": url(directory), "prefault": way == Way::OptionPrefault});
        let option = |rest: &str| format!("source_url={}{rest}", url(directory));
        // Remove the console's old file, because the API may answer before the restored VM creates the new file.
        fs::remove_file(self.vmm.console_file()).unwrap();
        let expected = match way {
            Way::Option => {
                self.vmm.start_again(&SITE, &["--restore", &option(",resume=on")]).unwrap();
                "restoring restored resuming resumed"
            }
            Way::OptionPrefault => {
                self.vmm.start_again(&SITE, &["--restore", &option(",prefault=on")]).unwrap();
                assert_eq!(self.state(), "Paused");
                fs::remove_dir_all(directory).unwrap();
                put(&self.vmm, "vm.resume", &Value::Null);
                "restoring restored resuming resumed"
            }
            Way::Api => {
                self.vmm.start_again(&SITE, &[]).unwrap();
                put(&self.vmm, "vm.restore", &body);
                assert_eq!(self.state(), "Paused");
                put(&self.vmm, "vm.resume", &Value::Null);
                "restoring restored resuming resumed"
            }
        };
        let first = wait_for_line(&self.vmm, |_| true);
        self.check_time(&first);
        first.check_goes_on(&self.before);
        let later = wait_for_line(&self.vmm, |line| line.is_beyond(&first));
        self.check_time(&later);
        later.check_goes_on(&self.before);
        assert_eq!(events_that_end(&self.vmm, expected), expected);
        self.before = first;
    }

    fn state(&self) -> String {
        let (status, info) = self.vmm.call("GET", "/api/v1/vm.info", None).unwrap();
        assert_eq!(status, 200, "{info}");
        info["state"].as_str().unwrap().into()
    }

    /// Returns the counters of a device.
    fn counters(&self, device: &str) -> BTreeMap<String, u64> {
        let (status, counters) = self.vmm.call("GET", "/api/v1/vm.counters", None).unwrap();
        assert_eq!(status, 200, "{counters}");
        serde_json::from_value(counters[device].clone()).unwrap()
    }

    /// Saves and restores the guest `rounds` times, in the three [`WAYS`] in turn. In the second round, waits for [`AWAY`]
    /// before the restore.
    fn rounds(&mut self, rounds: usize) {
        for (round, way) in (0..rounds).zip(WAYS.into_iter().cycle()) {
            let directory = self.vmm.dir().join(format!("snapshot-{round}"));
            self.save(&directory);
            if round == 1 {
                thread::sleep(AWAY);
            }
            self.restore(&directory, way);
            // The VM still maps files of the snapshot, but the kernel keeps their contents until the VM unmaps them.
            let _ = fs::remove_dir_all(&directory);
            println!("round {round}, {way:?}: {:?}", self.before);
            // A test that prints nothing for some minutes counts as hung.
            if (round + 1) % 10 == 0 {
                tell(&format!("restored {} of {rounds} times", round + 1));
            }
        }
    }
}

fn with_rng_beside() -> Subject {
    Subject::boot("", &[("rng", json!({"src": "/dev/urandom"}))])
}

fn with_rng_behind_mappings() -> Subject {
    Subject::boot("", &[("rng", json!({"src": "/dev/urandom", "iommu": true}))])
}

fn with_rng_behind_a_window() -> Subject {
    let bounce = json!({"size": 16 * MIB});
    Subject::boot("", &[("rng", json!({"src": "/dev/urandom", "iommu": true})), ("iommu_bounce", bounce)])
}

/// Makes a snapshot look older by `by`.
fn antedate(directory: &Path, by: Duration) {
    let path = directory.join("state.json");
    let mut state: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for pointer in ["/processors/realtime_ns", "/processors/clock/realtime_ns"] {
        let time = state.pointer_mut(pointer).unwrap();
        *time = (time.as_u64().unwrap() - u64::try_from(by.as_nanos()).unwrap()).into();
    }
    fs::write(&path, state.to_string()).unwrap();
}

#[guest_test(
    slow = "guest_with_a_window_* covers more devices, and guest_that_was_away_for_an_hour_* covers the same devices"
)]
fn guest_continues_in_other_processes() {
    let mut subject = with_rng_beside();
    subject.rounds(3);

    let requests = subject.counters("_rng")["requests"];
    assert!(requests > 0);
    subject.reboot();
    subject.end();
}

#[guest_test]
fn guest_that_was_away_for_an_hour_has_the_right_time() {
    let mut subject = with_rng_beside();
    let directory = subject.vmm.dir().join("snapshot");
    subject.save(&directory);
    let hour = Duration::from_secs(3600);
    antedate(&directory, hour);
    subject.ahead += 3_600_000;
    subject.restore(&directory, Way::Option);
    subject.end();
}

#[guest_test(slow = "guest_with_a_window_* covers the same device and IOMMU")]
fn guest_with_a_mapped_device_continues_in_other_processes() {
    let mut subject = with_rng_behind_mappings();
    subject.rounds(3);
    let iommu = subject.counters("_iommu");
    assert!(iommu["requests_map"] > 0 && iommu["faults"] == 0, "{iommu:?}");
    subject.end();
}

#[guest_test]
fn guest_with_a_window_continues_in_other_processes() {
    let mut subject = with_rng_behind_a_window();
    subject.rounds(3);
    let iommu = subject.counters("_iommu");
    assert!(iommu["window_bytes"] > 0 && iommu["faults"] == 0, "{iommu:?}");
    subject.reboot();
    subject.end();
}

#[guest_test(
    slow = "memory_hotplug:: covers the RAM, and guest_with_a_window_continues_in_other_processes covers the snapshot"
)]
fn guest_with_added_ram_continues_in_another_process() {
    let memory = json!({"size": 256 * MIB, "hotplug_size": 256 * MIB});
    let rng = json!({"src": "/dev/urandom"});
    let mut subject = Subject::boot("memhp_default_state=online", &[("memory", memory), ("rng", rng)]);
    put(&subject.vmm, "vm.resize", &json!({"desired_ram": 384 * MIB}));
    subject.rounds(2);
    put(&subject.vmm, "vm.resize", &json!({"desired_ram": 512 * MIB}));
    subject.before = wait_for_line(&subject.vmm, |line| line.is_beyond(&subject.before));
    subject.end();
}

#[guest_test(slow = "vcpus_are_added_and_removed_* covers vCPUs in a guest, and vmm/tests cover vCPUs in snapshots")]
fn guest_with_added_vcpus_continues_in_another_process() {
    let job = format!("{USE_VCPUS}\n(last=$(at_work); while :; do use_vcpus; sleep 0.2; done) &\n");
    let config = [("cpus", json!({"boot_vcpus": 2, "max_vcpus": 4})), ("rng", json!({"src": "/dev/urandom"}))];
    let mut subject = Subject::boot_with(&job, "", &config);
    let resize = |subject: &Subject, vcpus: u32| {
        put(&subject.vmm, "vm.resize", &json!({"desired_vcpus": vcpus}));
        subject.vmm.wait_for(&format!("CAROM-VCPUS {vcpus}\n"), 1, BOOT_TIME).unwrap();
    };
    resize(&subject, 4);
    subject.rounds(2);
    resize(&subject, 3);
    // The removed vCPU is not in the next snapshot. So the restored process creates a new vCPU when a vCPU is added again.
    subject.rounds(1);
    resize(&subject, 4);
    subject.before = wait_for_line(&subject.vmm, |line| line.is_beyond(&subject.before));
    subject.end();
}

#[guest_test(slow = "guest_with_a_window_continues_in_other_processes does so three times")]
fn guest_continues_in_a_hundred_processes() {
    let mut subject = with_rng_beside();
    subject.rounds(100);
    subject.end();
}

#[guest_test(slow = "guest_with_a_window_continues_in_other_processes does so three times")]
fn guest_with_a_window_continues_in_a_hundred_processes() {
    let mut subject = with_rng_behind_a_window();
    subject.rounds(100);
    subject.end();
}

/// Shell functions that wait until the guest's kernel has reseeded its random numbers, and print a hash of the next random
/// numbers.
const TELL_FORK: &str = r#"
forks() { dmesg | grep -c 'crng reseeded due to virtual machine fork'; }
before=$(forks)
echo CAROM-WAITS
while [ "$(forks)" = "$before" ]; do sleep 0.1; done
echo "CAROM-RANDOM $(head -c 1048576 /dev/urandom | sha256sum | cut -c 1-64) $(forks)"
sleep 100000
"#;

#[guest_test(slow = "vmm/tests/generation_id.rs covers the device in a guest without an operating system")]
fn guests_restored_from_one_snapshot_have_other_random_numbers() {
    let vmm = ApiVmm::start(&SITE, TELL_FORK).unwrap();
    let body = json!({
        "payload": payload(&vmm, ""),
        "memory": {"size": 256 * MIB},
        "serial": {"mode": "File", "file": vmm.console_file()},
    });
    put(&vmm, "vm.create", &body);
    put(&vmm, "vm.boot", &Value::Null);
    vmm.wait_for("CAROM-WAITS\n", 1, BOOT_TIME).unwrap();
    put(&vmm, "vm.pause", &Value::Null);
    let directory = vmm.dir().join("snapshot");
    put(&vmm, "vm.snapshot", &json!({"destination_url": url(&directory)}));
    let restored = || {
        put(&vmm, "vm.delete", &Value::Null);
        // The restored VM creates the console's file again.
        fs::remove_file(vmm.console_file()).unwrap();
        put(&vmm, "vm.restore", &json!({"source_url": url(&directory), "resume": true}));
        vmm.wait_for("CAROM-RANDOM ", 1, BOOT_TIME).unwrap();
        vmm.wait_for(" 1\n", 1, BOOT_TIME).unwrap();
        let console = vmm.console();
        let line = console.lines().find_map(|line| line.strip_prefix("CAROM-RANDOM ")).unwrap();
        line.split_once(' ').unwrap().0.to_string()
    };
    let (first, second) = (restored(), restored());
    assert_eq!((first.len(), second.len()), (64, 64));
    assert_ne!(first, second, "both guests have the same random numbers");
}

/// Boots a VM and pauses it immediately.
fn paused(config: &[(&str, Value)]) -> ApiVmm {
    let vmm = ApiVmm::start(&SITE, "true").unwrap();
    let mut body = json!({
        "payload": payload(&vmm, ""),
        "memory": {"size": 128 * MIB},
    });
    for (key, value) in config {
        body[key] = value.clone();
    }
    put(&vmm, "vm.create", &body);
    put(&vmm, "vm.boot", &Value::Null);
    put(&vmm, "vm.pause", &Value::Null);
    vmm
}

#[guest_test]
fn vm_with_a_device_of_the_host_is_not_saved() {
    let device = json!([{"path": Site::sysfs(&SITE.nvme[0]), "iommu": true, "id": "drive"}]);
    let vmm = paused(&[("devices", device)]);
    let directory = vmm.dir().join("snapshot");
    let message = refusal(&vmm, "vm.snapshot", &json!({"destination_url": url(&directory)}));
    assert!(message.contains("drive") && message.contains("cannot be saved"), "{message}");
    assert!(!directory.exists());
    put(&vmm, "vm.resume", &Value::Null);
}

/// Makes carom restore this snapshot by its option. Returns carom's exit status and stderr.
fn restored_by_option(directory: &Path) -> (Option<i32>, String) {
    let stderr = directory.with_extension("stderr");
    let status = Command::new(&SITE.carom)
        .args(["--restore", &format!("source_url={},resume=on", url(directory))])
        .stdin(Stdio::null())
        .stderr(File::create(&stderr).unwrap())
        .status()
        .unwrap();
    (status.code(), fs::read_to_string(stderr).unwrap())
}

#[guest_test]
fn spoiled_snapshot_is_refused_and_leaves_nothing() {
    let vmm = paused(&[("rng", json!({"iommu": true}))]);
    let directory: PathBuf = vmm.dir().join("snapshot");
    put(&vmm, "vm.snapshot", &json!({"destination_url": url(&directory)}));
    put(&vmm, "vm.delete", &Value::Null);
    let source = json!({"source_url": url(&directory)});
    put(&vmm, "vm.restore", &source);
    put(&vmm, "vm.delete", &Value::Null);

    let refused = |why: &str| {
        let message = refusal(&vmm, "vm.restore", &source);
        assert!(message.contains(why), "wanted {why:?}: {message}");
        assert_eq!(vmm.call("GET", "/api/v1/vm.info", None).unwrap().0, 404, "there is a VM");
    };
    let path = directory.join("state.json");
    let text = fs::read_to_string(&path).unwrap();
    let with = |pointer: &str, value: Value| {
        let mut state: Value = serde_json::from_str(&text).unwrap();
        *state.pointer_mut(pointer).unwrap_or_else(|| panic!("no {pointer}")) = value;
        fs::write(&path, state.to_string()).unwrap();
    };
    fs::write(&path, &text[..text.len() / 2]).unwrap();
    refused("state.json: ");
    let (status, said) = restored_by_option(&directory);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(status.is_some_and(|status| status != 0) && said.contains("state.json: "), "{status:?}: {said}");
    with("/version", 2.into());
    refused("version 2");
    with("/processors/vcpus/0/registers/xsave", "ff".repeat(4096).into());
    refused("a vCPU's extended state");
    with("/processors/vcpus/0/registers/nested", "00".into());
    refused("nested");
    with("/processors/vcpus/0/cpuid/0/ebx", 0.into());
    refused("vendor");
    with("/functions/1/state/kind", "virtio-cow".into());
    refused("virtio-cow");
    fs::write(&path, &text).unwrap();
    let memory = File::options().write(true).open(directory.join("memory-ranges")).unwrap();
    memory.set_len(128 * MIB - 4096).unwrap();
    refused("ends beyond the file");
    memory.set_len(128 * MIB).unwrap();
    put(&vmm, "vm.restore", &source);
    put(&vmm, "vm.delete", &Value::Null);
    fs::remove_file(&path).unwrap();
    refused("state.json: No such file");
}
