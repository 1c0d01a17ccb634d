// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests vCPU hotplug in a real `carom` process with a small guest.
//!
//! Without access to `/dev/kvm`, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod echo_guest;
mod http;
#[expect(dead_code, reason = "shared by tests that wait for the end")]
mod program;
mod tiny_guest;

use std::fs;
use std::path::Path;

use rustix::thread::{CpuSet, Pid, sched_getaffinity};
use serde_json::{Value, json};

use echo_guest::ECHO;
use program::{call, put, start, wait_until};
use tiny_guest::elf;

/// Reaction of the guest to a request to eject processors.
#[derive(Clone, Copy)]
enum Guest {
    LetsGo,
    Refuses,
    SaysNothing,
}

impl Guest {
    /// Returns code that reads which processors to eject, and reports the guest's reaction for each of these
    /// processors.
    fn code(self) -> [u8; 24] {
        // The guest reports to port 0x680 (ejected) or 0x684 (refused). Port 0x688 has no register,
        // so a write there reports nothing.
        let port = match self {
            Self::LetsGo => 0x80,
            Self::Refuses => 0x84,
            Self::SaysNothing => 0x88,
        };
        // again: mov dx, 0x660; in eax, dx; mov ebx, eax
        // one: bsf ecx, ebx; jz again; btr ebx, ecx; mov eax, ecx; mov dx, …; out dx, eax; jmp one
        [
            0x66, 0xba, 0x60, 0x06, 0xed, 0x89, 0xc3, 0x0f, 0xbc, 0xcb, 0x74, 0xf4, 0x0f, 0xb3, 0xcb, 0x89, 0xc8, 0x66,
            0xba, port, 0x06, 0xef, 0xeb, 0xef,
        ]
    }
}

/// Program with a guest.
struct Carom {
    process: program::Carom,
    dir: tempfile::TempDir,
}

impl Carom {
    /// Boots a guest with `boot` vCPUs. The maximum is 4.
    fn start(guest: Guest, boot: u32) -> Option<Self> {
        Self::start_with(&guest.code(), boot)
    }

    fn start_with(code: &[u8], boot: u32) -> Option<Self> {
        Self::start_with_cpus(code, &format!("boot={boot},max=4"))
    }

    fn start_with_cpus(code: &[u8], cpus: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let kernel = dir.path().join("kernel");
        fs::write(&kernel, elf(code)).unwrap();
        let options =
            ["--cpus", cpus, "--memory", "size=64M", "--serial", "null", "--kernel", kernel.to_str().unwrap()];
        let carom = Self { process: start(dir.path(), &options)?, dir };
        wait_until("the VM runs", || carom.call("GET", "vm.info", None).1["state"] == "Running");
        Some(carom)
    }

    fn call(&self, method: &str, name: &str, body: Option<&Value>) -> (u16, Value) {
        call(self.dir.path(), method, name, body)
    }

    fn put(&self, name: &str, body: Option<&Value>) {
        put(self.dir.path(), name, body);
    }

    /// Saves the paused VM, and restores it.
    fn save_and_restore(&self, resume: bool) {
        let url = format!("file://{}", self.dir.path().join("snapshot").display());
        self.put("vm.snapshot", Some(&json!({"destination_url": url})));
        self.put("vm.delete", None);
        self.put("vm.restore", Some(&json!({"source_url": url, "resume": resume})));
    }

    fn resize(&self, vcpus: u32) -> (u16, String) {
        let (status, answer) = self.call("PUT", "vm.resize", Some(&json!({"desired_vcpus": vcpus})));
        (status, answer[0].as_str().unwrap_or_default().into())
    }

    /// Returns the numbers in the names of the vCPUs' threads, joined into one string.
    fn threads(&self) -> String {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.process.0.id())).unwrap();
        let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        let mut names: Vec<String> = names.filter_map(|name| Some(name.strip_prefix("vcpu")?.trim().into())).collect();
        names.sort_unstable();
        names.concat()
    }

    /// Returns the host CPUs that the thread of this name may use.
    fn place(&self, thread: &str) -> Vec<usize> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.process.0.id())).unwrap();
        let is_it = |path: &Path| fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim() == thread);
        let task = tasks.map(|task| task.unwrap().path()).find(|path| is_it(path)).unwrap();
        let id = task.file_name().and_then(|id| id.to_str()?.parse().ok()).and_then(Pid::from_raw);
        cpus(&sched_getaffinity(id).unwrap())
    }

    /// Sets the guest's number of vCPUs, and waits until the guest has this number.
    fn becomes(&self, vcpus: u32) {
        assert_eq!(self.resize(vcpus), (204, String::new()));
        assert_eq!(self.call("GET", "vm.info", None).1["config"]["cpus"]["boot_vcpus"], vcpus);
        self.has(vcpus);
    }

    fn has(&self, vcpus: u32) {
        let wanted: String = (0..vcpus).map(|number| number.to_string()).collect();
        wait_until(&format!("vCPUs {wanted}"), || self.threads() == wanted);
    }
}

fn cpus(set: &CpuSet) -> Vec<usize> {
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

#[test]
fn booted_and_hotplugged_vcpus_keep_their_host_cpu_affinity() {
    let all = cpus(&sched_getaffinity(None).unwrap());
    let (first, last) = (all[0], all[all.len() - 1]);
    let affinity = format!("boot=2,max=4,affinity=[0@[{last}],2@[{first}],3@[{first},{last}]]");
    let Some(carom) = Carom::start_with_cpus(&Guest::LetsGo.code(), &affinity) else { return };
    assert_eq!((carom.place("vcpu0"), carom.place("vcpu1")), (vec![last], all.clone()));
    carom.becomes(4);
    let mut both = vec![first, last];
    both.dedup();
    assert_eq!((carom.place("vcpu2"), carom.place("vcpu3")), (vec![first], both));
    carom.becomes(1);
    carom.becomes(3);
    assert_eq!((carom.place("vcpu0"), carom.place("vcpu2")), (vec![last], vec![first]));
    // Only the threads of vCPUs are pinned. All other threads may run on any host CPU.
    assert_eq!((carom.place("carom"), carom.place("api")), (all.clone(), all));
    let reported = carom.call("GET", "vm.info", None).1;
    assert_eq!(reported["config"]["cpus"]["affinity"][0], json!({"vcpu": 0, "host_cpus": [last]}));
}

#[test]
fn vcpu_affinity_without_a_usable_host_cpu_is_refused() {
    let Some(carom) = Carom::start(Guest::LetsGo, 1) else { return };
    carom.put("vm.delete", None);
    let there = cpus(&sched_getaffinity(None).unwrap())[0];
    let body = |host_cpus: Value| {
        json!({"payload": {"kernel": carom.dir.path().join("kernel")}, "memory": {"size": 64 << 20},
            "cpus": {"boot_vcpus": 1, "max_vcpus": 2, "affinity": [{"vcpu": 1, "host_cpus": host_cpus}]}})
    };
    let refused = carom.call("PUT", "vm.create", Some(&body(json!([]))));
    assert_eq!(refused, (400, json!(["cpus.affinity: vCPU 1 has an empty list of host CPUs: name at least one"])));
    carom.put("vm.create", Some(&body(json!([there, 1023]))));
    let rule = "cpus.affinity: vCPU 1: cannot use CPU 1023 of the host: the CPU must be online, and in \
                Cpus_allowed_list of /proc/self/status";
    assert_eq!(carom.call("PUT", "vm.boot", None), (400, json!([rule])));
    assert_eq!(carom.call("GET", "vm.info", None).1["state"], "Created");
}

#[test]
fn vcpu_threads_have_their_names_once_the_guest_runs() {
    let Some(carom) = Carom::start(Guest::LetsGo, 2) else { return };
    // After a boot or a resize, libvirt pins each thread immediately. libvirt fails if a thread is missing.
    for _ in 0..50 {
        assert_eq!(carom.threads(), "01");
        carom.put("vm.resize", Some(&json!({"desired_vcpus": 4})));
        assert_eq!(carom.threads(), "0123");
        carom.put("vm.shutdown", None);
        carom.put("vm.resize", Some(&json!({"desired_vcpus": 2})));
        carom.put("vm.boot", None);
    }
}

#[test]
fn vcpus_are_added_removed_and_added_again() {
    let Some(carom) = Carom::start(Guest::LetsGo, 1) else { return };
    carom.becomes(4);
    carom.becomes(2);
    carom.becomes(3);
    carom.becomes(1);
    carom.becomes(4);
    assert_eq!(carom.resize(5), (400, "desired_vcpus: 5 is not between 1 and 4 (cpus.max_vcpus)".into()));
    carom.becomes(1);
    carom.put("vm.pause", None);
    carom.becomes(2);
    carom.put("vm.resume", None);
    carom.has(2);
    carom.put("vm.reboot", None);
    carom.has(2);
    carom.becomes(3);
    carom.put("vm.shutdown", None);
    carom.put("vm.boot", None);
    carom.has(3);
    carom.becomes(4);
}

#[test]
fn snapshot_has_the_present_vcpus() {
    let Some(carom) = Carom::start(Guest::LetsGo, 2) else { return };
    carom.becomes(4);
    carom.becomes(3);
    carom.put("vm.pause", None);
    // The guest runs, and can release vCPUs, only after the resume.
    assert_eq!(carom.resize(1).0, 204);
    carom.save_and_restore(false);
    carom.has(3);
    carom.put("vm.resume", None);
    carom.has(1);
    carom.becomes(4);
    carom.put("vm.reboot", None);
    carom.becomes(2);
}

#[test]
fn guest_that_does_not_answer_keeps_vcpus_until_reset() {
    let Some(carom) = Carom::start(Guest::SaysNothing, 3) else { return };
    assert_eq!(carom.resize(2).0, 204);
    let leaving = "vCPU 2 is about to be removed, and the guest has not released it yet: try again later";
    // Until the guest is notified, a client can withdraw the request.
    wait_until("the guest is notified", || match carom.resize(3) {
        (204, _) => carom.resize(2).0 != 204,
        refused => refused == (429, leaving.into()),
    });
    assert_eq!((carom.resize(2).0, carom.resize(1).0, carom.threads()), (204, 204, "012".into()));
    carom.put("vm.reboot", None);
    carom.has(1);
    carom.becomes(3);
}

#[test]
fn guest_that_refuses_keeps_vcpus_and_can_get_more() {
    let Some(carom) = Carom::start(Guest::Refuses, 3) else { return };
    assert_eq!(carom.resize(1).0, 204);
    wait_until("the guest has refused", || carom.resize(3).0 == 204);
    assert_eq!(carom.threads(), "012");
    carom.becomes(4);
    // The guest keeps all vCPUs until the reset, even if the VM is saved and restored.
    assert_eq!(carom.resize(2).0, 204);
    carom.put("vm.pause", None);
    carom.save_and_restore(true);
    carom.has(4);
    carom.put("vm.reboot", None);
    carom.has(2);
}

#[test]
fn guest_that_ignores_requests_keeps_vcpus_until_reset() {
    let Some(carom) = Carom::start_with(ECHO, 3) else { return };
    for wanted in [2, 1, 3, 4, 1, 2] {
        assert_eq!(carom.resize(wanted), (204, String::new()));
    }
    carom.has(4);
    carom.put("vm.reboot", None);
    carom.has(2);
}
