// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! User errors. For each error, carom prints one line that names the mistake, exits with status 2, and leaves no files behind.

use carom_integration::harness::guest_test;
use std::fs;
use std::process::Command;
use std::time::Duration;

use carom_integration::{Ended, Finished, Limits, Site, run_limited};

use crate::support::{SITE, required};

/// Runs `command` in an empty directory, and asserts that the command leaves no files there.
fn run(mut command: Command) -> Finished {
    let (cwd, logs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    command.current_dir(cwd.path()).env("TMPDIR", cwd.path());
    let limits = Limits { time: Duration::from_secs(120), stop_on_panic: false };

    let finished = run_limited(&mut command, &logs.path().join("console"), limits, None).unwrap();

    let left: Vec<_> = fs::read_dir(cwd.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "files left behind: {left:?}");
    finished
}

/// Asserts that the command failed with one line that contains all of `words`.
fn assert_mistake(finished: &Finished, words: &[&str], what: &str) {
    let Ended::Exited(status) = finished.ended else { panic!("{what}: {:?}", finished.ended) };
    assert_eq!(status.code(), Some(2), "{what}: {status}; stderr:\n{}", finished.stderr);
    assert_eq!(finished.stdout, "", "{what}");
    let lines: Vec<&str> = finished.stderr.lines().collect();
    let [line] = lines[..] else { panic!("{what}: expected one line of stderr:\n{}", finished.stderr) };
    assert!(line.starts_with("carom: "), "{what}: {line}");
    for word in words {
        assert!(line.contains(word), "{what}: no {word:?} in: {line}");
    }
}

/// Returns a `carom` command with a valid kernel, an initramfs and `arguments`.
fn carom(arguments: &[&str]) -> Command {
    let mut command = Command::new(&SITE.carom);
    command.arg("--kernel").arg(&SITE.kernel).arg("--initramfs").arg(&SITE.initramfs).args(arguments);
    command
}

fn check(arguments: &[&str], words: &[&str]) {
    assert_mistake(&run(carom(arguments)), words, &arguments.join(" "));
}

fn device(address: &str, options: &str) -> String {
    format!("path={}{options}", Site::sysfs(address).display())
}

#[guest_test]
fn unknown_option() {
    check(&["--memroy", "size=512M"], &["--memroy"]);
    check(&["stray"], &["stray"]);
}

#[guest_test]
fn malformed_values() {
    for (arguments, word) in [
        (["--memory", "size=512Q"], "512Q"),
        (["--memory", "512M"], "512M"),
        (["--memory", "speed=9"], "speed"),
        (["--cpus", "boot=many"], "many"),
        (["--cpus", "boot=0"], "--cpus"),
        (["--cpus", "boot=100000"], "--cpus"),
        (["--serial", "tin-can"], "tin-can"),
        (["--event-monitor", "nowhere"], "nowhere"),
    ] {
        check(&arguments, &[arguments[0], word]);
    }
}

#[guest_test]
fn invalid_memory_sizes() {
    for size in ["size=0", "size=1", "size=1M", "size=4097K", "size=900000G"] {
        check(&["--memory", size], &["--memory"]);
    }
}

#[guest_test]
fn missing_kernel_and_files() {
    let without_kernel = Command::new(&SITE.carom);
    assert_mistake(&run(without_kernel), &["--kernel"], "no kernel");

    let mut missing = Command::new(&SITE.carom);
    missing.args(["--kernel", "/no/such/kernel"]);
    assert_mistake(&run(missing), &["--kernel", "/no/such/kernel"], "missing kernel");

    let mut directory = Command::new(&SITE.carom);
    directory.args(["--kernel", "/etc"]);
    assert_mistake(&run(directory), &["--kernel", "/etc"], "a directory as kernel");

    let mut initramfs = Command::new(&SITE.carom);
    initramfs.arg("--kernel").arg(&SITE.kernel).args(["--initramfs", "/no/such/initramfs"]);
    assert_mistake(&run(initramfs), &["--initramfs", "/no/such/initramfs"], "missing initramfs");

    check(&["--serial", "file=/no/such/directory/file"], &["--serial", "/no/such/directory/file"]);
    check(&["--event-monitor", "path=/no/such/directory/file"], &["--event-monitor", "/no/such/directory/file"]);
}

#[guest_test]
fn file_that_is_not_a_kernel() {
    for file in ["/etc/passwd", "/bin/sh", "/dev/null"] {
        let mut command = Command::new(&SITE.carom);
        command.args(["--kernel", file]);
        assert_mistake(&run(command), &["--kernel", file], file);
    }
    // A truncated bzImage.
    let dir = tempfile::tempdir().unwrap();
    let cut = dir.path().join("cut");
    fs::write(&cut, &fs::read(&SITE.kernel).unwrap()[..8192]).unwrap();
    let earlier = dir.path().join("console");
    fs::write(&earlier, "of an earlier run").unwrap();
    let mut command = Command::new(&SITE.carom);
    command.arg("--kernel").arg(&cut).args(["--serial", &format!("file={}", earlier.display())]);
    assert_mistake(&run(command), &["--kernel"], "a truncated kernel");
    assert_eq!(fs::read_to_string(earlier).unwrap(), "of an earlier run");
}

#[guest_test]
fn devices_that_cannot_be_passed_through() {
    check(&["--device", "path=/no/such/device"], &["--device", "/no/such/device"]);
    check(&["--device", "iommu=on"], &["--device", "path"]);
    check(&["--device", &device(&SITE.nvme[0], ",iommu=perhaps")], &["--device", "perhaps"]);
    check(&["--device", &device(&SITE.nvme[0], ",colour=red")], &["--device", "colour"]);
    let same = device(&SITE.nvme[0], "");
    check(&["--device", &same, "--device", &same], &["--device", &SITE.nvme[0]]);
    let path = fs::canonicalize(Site::sysfs(&SITE.nvme[0])).unwrap();
    let again = format!("path={}", path.display());
    check(&["--device", &same, "--device", &again], &["--device", &SITE.nvme[0], "by another path"]);
}

#[guest_test]
fn device_of_another_driver() {
    let unbound = fs::read_dir("/sys/bus/pci/devices")
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| !fs::canonicalize(path.join("driver")).is_ok_and(|driver| driver.ends_with("vfio-pci")))
        .expect("the host has a PCI device that is not bound to vfio-pci");
    check(&["--device", &format!("path={}", unbound.display())], &["--device", "vfio-pci"]);
}

#[guest_test(needs(NotViable))]
fn device_whose_group_is_not_viable() {
    let address = std::env::var("CAROM_NOT_VIABLE").ok();
    let address =
        required(address.as_ref(), "a vfio-pci device whose group has a device of another driver (CAROM_NOT_VIABLE)");
    check(&["--device", &device(address, "")], &["--device", "group", "vfio-pci"]);
}

#[guest_test]
fn bounce_without_a_device_behind_the_iommu() {
    check(&["--iommu-bounce", "size=64M"], &["--iommu-bounce", "iommu=on"]);
    check(&["--iommu-bounce", "size=64M", "--device", &device(&SITE.nvme[0], "")], &["--iommu-bounce", "iommu=on"]);
}

#[guest_test]
fn bounce_with_invalid_values() {
    let behind = device(&SITE.nvme[0], ",iommu=on");
    for value in [
        "size=0,max=32M",
        "size=1K",
        "size=64M,max=32M",
        "size=lots",
        "threshold=-1",
        "threshold_write=0",
        "hugepages=maybe",
        "depth=3",
    ] {
        check(&["--device", &behind, "--iommu-bounce", value], &["--iommu-bounce"]);
    }
}

/// Returns a command that runs `command` with an empty file system mounted on `directory`. With `/dev` or `/dev/vfio` as
/// `directory`, the command finds no device files.
fn without(directory: &str, command: &Command) -> Command {
    let mut outer = Command::new("unshare");
    let script = format!("mount -t tmpfs tmpfs {directory} && exec \"$@\"");
    outer.args(["--mount", "sh", "-c", &script, "sh"]).arg(command.get_program()).args(command.get_args());
    outer
}

#[guest_test]
fn no_access_to_kvm() {
    assert_mistake(&run(without("/dev", &carom(&[]))), &["/dev/kvm"], "no /dev/kvm");

    let mut nobody = Command::new("setpriv");
    let inner = carom(&[]);
    nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(inner.get_program()).args(inner.get_args());
    assert_mistake(&run_as_nobody(nobody), &["/dev/kvm"], "no right to /dev/kvm");
}

/// Runs `command` in `/`, because an unprivileged user cannot enter the working directory of [`run`].
fn run_as_nobody(mut command: Command) -> Finished {
    let logs = tempfile::tempdir().unwrap();
    command.current_dir("/");
    let limits = Limits { time: Duration::from_secs(120), stop_on_panic: false };
    run_limited(&mut command, &logs.path().join("console"), limits, None).unwrap()
}

#[guest_test]
fn no_access_to_vfio() {
    let behind = device(&SITE.nvme[0], ",iommu=on");
    let command = without("/dev/vfio", &carom(&["--device", &behind]));
    assert_mistake(&run(command), &["/dev/vfio"], "no /dev/vfio");
}

#[guest_test]
fn help_and_version_are_no_mistakes() {
    for option in ["--help", "--version"] {
        let mut command = Command::new(&SITE.carom);
        command.arg(option);
        let finished = run(command);
        assert!(matches!(finished.ended, Ended::Exited(status) if status.success()), "{option}: {finished:?}");
        assert!(finished.stdout.contains("carom"), "{option}: {finished:?}");
        assert_eq!(finished.stderr, "", "{option}");
    }
}
