// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Debian package's systemd unit, and the limits that the unit sets (`docs/unprivileged.md`).

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use carom_integration::harness::{guest_test, tell};
use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Guest, Site};
use carom_tools::checkout;

use crate::api::BOOT_TIME;
use crate::support::systemd::{Systemd, wait_for};
use crate::support::{MIB, SITE};
use crate::unprivileged::{Lent, file_of};

/// Limits of `debian/limits.conf`, in bytes.
const LOCKED: u64 = 128 * MIB;
const MEMORY: u64 = 2176 * MIB;

/// Returns a job that verifies I/O on the drive, and then waits for a press of the power button.
fn job() -> String {
    let verify = workload::fio_verify(16, 32);
    format!(
        r#"{WAIT_FOR_NVME}{verify}
presses() {{ awk '/ACPI:Ged/ {{ n += $2 + $3 }} END {{ print n + 0 }}' /proc/interrupts; }}
echo CAROM-WAITS
until [ "$(presses)" != 0 ]; do sleep 0.1; done
"#
    )
}

/// Writes the file with a machine's options to `dir`. Returns the file's path in systemd's root file system, and the path of
/// the written file. `options` is added to the options that all machines have.
fn machine(dir: &Path, name: &str, options: &str) -> (String, PathBuf) {
    let file = dir.join(name);
    let common = "--kernel /var/lib/carom/kernel --initramfs /var/lib/carom/initramfs --memory size=512M --landlock \
        --cmdline 'console=ttyS0 quiet panic=-1 iommu.strict=1'";
    fs::write(&file, format!("CAROM_OPTIONS=\"{common} {options}\"\n")).unwrap();
    (format!("etc/carom/{name}.conf"), file)
}

/// Returns Carom's process in a control group. The group also contains a worker of KVM.
fn process(group: &Path) -> u32 {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap();
    let mut processes = text.lines().map(|line| line.parse().unwrap());
    let is_carom = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap().trim() == "carom";
    processes.find(is_carom).unwrap_or_else(|| panic!("no carom in {text:?}"))
}

/// Returns the first word after `key` in a line of the process's `/proc` file `file`.
fn of_process(pid: u32, file: &str, key: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_else(|| panic!("no {key} in {text}"));
    value.split_whitespace().next().unwrap().to_owned()
}

/// Reads the console's output and appends it to `shown`, until `shown` contains `text`.
fn read_until(console: &mut UnixStream, shown: &mut String, text: &str) {
    let start = Instant::now();
    let mut bytes = [0; 4096];
    while !shown.contains(text) {
        assert!(start.elapsed() < BOOT_TIME, "no {text:?} on the console:\n{shown}");
        match console.read(&mut bytes) {
            Ok(0) => panic!("the console ended without {text:?}:\n{shown}"),
            Ok(count) => shown.push_str(&String::from_utf8_lossy(&bytes[..count]).replace('\r', "")),
            // Try again, because the read timed out.
            Err(_) => {}
        }
    }
}

#[guest_test(needs(Systemd, SecondDrive, Swap))]
fn unit_of_the_package_runs_a_bouncing_drive_within_limits() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    Guest::new("service").job(&job()).write_command(&SITE, dir).unwrap();
    let swap = SITE.swap.as_ref().unwrap();
    let device = |address: &str| format!("--device path={}", Site::sysfs(address).display());
    let machines = [
        machine(dir, "drive", &format!("{},iommu=on --iommu-bounce size=64M", device(&SITE.nvme[0]))),
        machine(dir, "locks", &device(&SITE.nvme[1])),
        machine(dir, "block", &format!("--disk path={},image_type=raw", swap.display())),
        machine(dir, "threads", "--cpus boot=8"),
    ];
    let (debian, initramfs) = (checkout().join("debian"), dir.join("initramfs"));
    let (unit, limits, users) =
        (debian.join("carom@.service"), debian.join("limits.conf"), debian.join("carom.sysusers"));
    let fewer = dir.join("fewer");
    fs::write(&fewer, fs::read_to_string(&limits).unwrap().replace("TasksMax=128", "TasksMax=6")).unwrap();
    let mut files: Vec<(&str, &Path)> = vec![
        ("usr/bin/carom", &SITE.carom),
        ("usr/bin/carom-remote", SITE.remote.as_ref().expect("CAROM_REMOTE is set")),
        ("usr/lib/sysusers.d/carom.conf", &users),
        ("var/lib/carom/kernel", &SITE.kernel),
        ("var/lib/carom/initramfs", &initramfs),
        ("etc/systemd/system/carom@.service", &unit),
        ("etc/systemd/system/carom@drive.service.d/limits.conf", &limits),
        ("etc/systemd/system/carom@locks.service.d/limits.conf", &limits),
        ("etc/systemd/system/carom@threads.service.d/limits.conf", &fewer),
    ];
    files.extend(machines.iter().map(|(place, file)| (place.as_str(), file.as_path())));
    let systemd = Systemd::start(&files);
    tell("systemd runs");
    let user: u32 = systemd.run("id -u carom").trim().parse().unwrap();
    assert!((1..1000).contains(&user), "user {user} is not a system user");

    // Here, the service's user cannot open /dev/kvm. In Debian, the user can open this file, because the user is a member of
    // the group `kvm`.
    let said = systemd.refused("carom@threads");
    assert!(said.contains("/dev/kvm: Permission denied"), "{said}");
    let _kvm = Lent::new("/dev/kvm".into(), user);
    let said = systemd.refused("carom@drive");
    let file = file_of(&SITE.nvme[0]);
    assert!(said.contains(&format!("{}: Permission denied", file.display())), "{said}");
    let _files = [Lent::new(file, user), Lent::new(file_of(&SITE.nvme[1]), user), Lent::new(swap.clone(), user)];

    systemd.run("systemctl reset-failed carom@drive && systemctl start carom@drive");
    let socket = systemd.path("/run/carom/drive/console");
    let mut console = wait_for("the console can be connected to", || UnixStream::connect(&socket).ok());
    console.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let mut shown = String::new();
    read_until(&mut console, &mut shown, "CAROM-WAITS");
    assert!(shown.contains("CAROM-VERIFY 0 "), "{shown}");
    tell("the guest has verified its drive");

    let group = systemd.group_of("system-carom.slice", "carom@drive.service");
    let pid = process(&group);
    let limit = |file: &str| fs::read_to_string(group.join(file)).unwrap().trim().to_owned();
    assert_eq!((limit("memory.max"), limit("pids.max")), (MEMORY.to_string(), "128".into()));
    assert_eq!(of_process(pid, "limits", "Max locked memory"), LOCKED.to_string());
    let locked: u64 = of_process(pid, "status", "VmLck:").parse().unwrap();
    assert!((1..=LOCKED >> 10).contains(&locked), "{locked} KiB are locked");
    assert_eq!(of_process(pid, "status", "Uid:"), user.to_string());
    for (key, value) in [("NoNewPrivs:", "1"), ("CapEff:", "0000000000000000"), ("CapBnd:", "0000000000000000")] {
        assert_eq!(of_process(pid, "status", key), value, "{key}");
    }
    let mounts = fs::read_to_string(format!("/proc/{pid}/mounts")).unwrap();
    let root = mounts.lines().rfind(|line| line.split(' ').nth(1) == Some("/")).unwrap();
    assert!(root.split(' ').nth(3).unwrap().split(',').any(|option| option == "ro"), "{root}");

    // While this machine runs, three other machines must fail to start. The first machine must pin all its RAM, because its
    // drive is not behind the virtio-iommu. The second machine has a disk on a device that the unit does not allow, although
    // the user may open the device. The third machine needs too many threads.
    let said = systemd.refused("carom@locks");
    assert!(said.contains("ulimit -l"), "{said}");
    let said = systemd.refused("carom@block");
    assert!(said.contains(&format!("{}: Operation not permitted", swap.display())), "{said}");
    let said = systemd.refused("carom@threads");
    assert!(said.contains("Resource temporarily unavailable"), "{said}");

    // systemctl stop makes the unit press the guest's power button.
    systemd.run("systemctl stop carom@drive");
    let state = systemd.run("systemctl show -p Result -p ActiveState -p ExecMainStatus carom@drive");
    let mut state: Vec<&str> = state.lines().collect();
    state.sort_unstable();
    assert_eq!(state, ["ActiveState=inactive", "ExecMainStatus=0", "Result=success"], "{}", systemd.log("carom@drive"));
    let state = systemd.path("/var/lib/carom/drive/crashes");
    assert_eq!(fs::metadata(&state).map_or(0, |report| report.len()), 0, "{}", state.display());
}
