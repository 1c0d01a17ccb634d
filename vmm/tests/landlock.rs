// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The files that a real `carom` process may reach where Landlock holds it to those of its VM.
//!
//! The guest has a few instructions. Where there is no `/dev/kvm` that this process may use, tests that boot it do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod http;
mod outputs;
mod tiny_guest;

use std::fs::{self, File, OpenOptions};
use std::io::BufReader;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};
use serde_json::{Value, json};
use tempfile::TempDir;

use http::PATIENCE;
use tiny_guest::elf;

/// `again: hlt; jmp again`
const HALT: &[u8] = &[0xf4, 0xeb, 0xfd];
const NONE: Value = Value::Null;
const BLAMED: &str = "Permission denied (os error 13); Landlock keeps the program from what neither the configuration that it was \
                      started with nor landlock_rules names";

/// A process that is gone at the end of the test.
struct Carom(Child);

impl Drop for Carom {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the program with a socket `api.sock` in `dir`.
fn start(dir: &Path, seccomp: &str) -> Carom {
    start_with(dir, &["--seccomp", seccomp])
}

/// The same with these options, in `dir`.
fn start_with(dir: &Path, options: &[&str]) -> Carom {
    let _ = fs::remove_file(dir.join("api.sock"));
    let carom = Carom(command(dir, options).spawn().unwrap());
    wait_until(|| UnixStream::connect(dir.join("api.sock")).is_ok());
    carom
}

fn command(dir: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_carom"));
    command.arg("--api-socket").arg(dir.join("api.sock")).args(options).current_dir(dir).stdin(Stdio::null());
    command
}

/// Status and answer of a call.
fn put(dir: &Path, name: &str, body: &Value) -> (u16, Value) {
    let mut stream = http::connect(&dir.join("api.sock"));
    http::send(&mut stream, "PUT", name, Some(body).filter(|body| !body.is_null()));
    let (status, body) = http::receive(&mut BufReader::new(stream));
    (status, if body.is_empty() { NONE } else { serde_json::from_slice(&body).unwrap() })
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(1));
    }
}

fn no_kvm() -> bool {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/kvm");
    opened.inspect_err(|error| eprintln!("not tested: /dev/kvm: {error}")).is_err()
}

/// A directory with a guest, and images `disk`, `allowed/disk` and `outside`.
fn files() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("kernel"), elf(HALT)).unwrap();
    for name in ["sockets", "allowed"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    for name in ["disk", "allowed/disk", "outside"] {
        File::create(dir.path().join(name)).unwrap().set_len(1 << 20).unwrap();
    }
    dir
}

fn config(dir: &Path) -> Value {
    json!({
        "payload": {"kernel": dir.join("kernel")},
        "memory": {"size": 64 << 20},
        "serial": {"mode": "File", "file": dir.join("console")},
        "disks": [{"path": dir.join("disk"), "image_type": "Raw"}],
        "rng": {"src": "/dev/urandom"},
        "vsock": {"cid": 3, "socket": dir.join("sockets/vsock")},
        "landlock_enable": true,
        "landlock_rules": [{"path": dir.join("allowed"), "access": "rw"}],
    })
}

#[test]
fn vm_reaches_only_files_of_its_configuration_and_rules() {
    if no_kvm() {
        return;
    }
    for seccomp in ["true", "false"] {
        let files = files();
        let dir = files.path();
        let mut carom = start(dir, seccomp);
        assert_eq!(put(dir, "vm.create", &config(dir)), (204, NONE));
        assert_eq!(put(dir, "vm.boot", &NONE), (204, NONE));
        assert!(UnixStream::connect(dir.join("sockets/vsock")).is_ok() && dir.join("console").exists());

        let disk = |path: &str| json!({"path": dir.join(path), "image_type": "Raw"});
        let (status, answer) = put(dir, "vm.add-disk", &disk("outside"));
        let text = answer[0].as_str().unwrap_or_default();
        assert!(status == 400 && text.contains("/outside: ") && text.ends_with(BLAMED), "{answer}");
        let (status, answer) = put(dir, "vm.add-disk", &disk("allowed/disk"));
        assert_eq!(status, 200, "{answer}");

        assert_eq!(put(dir, "vm.pause", &NONE), (204, NONE));
        let to = |name: &str| json!({"destination_url": format!("file://{}", dir.join(name).display())});
        let (status, answer) = put(dir, "vm.snapshot", &to("snapshot"));
        let text = answer[0].as_str().unwrap_or_default();
        assert!(status >= 400 && text.contains("/snapshot: ") && text.ends_with(BLAMED), "{status} {answer}");
        assert_eq!(put(dir, "vm.snapshot", &to("allowed/snapshot")), (204, NONE));

        // The limits are there already, and there can be 16 of them.
        for _ in 0..20 {
            assert_eq!(put(dir, "vm.shutdown", &NONE), (204, NONE));
            assert_eq!(put(dir, "vm.boot", &NONE), (204, NONE));
        }
        assert_eq!(put(dir, "vm.delete", &NONE), (204, NONE));

        // They stay when the VM goes.
        fs::copy(dir.join("kernel"), dir.join("other")).unwrap();
        let other = json!({"payload": {"kernel": dir.join("other")}, "memory": {"size": 64 << 20}});
        assert_eq!(put(dir, "vm.create", &other), (204, NONE));
        let (status, answer) = put(dir, "vm.boot", &NONE);
        assert!(status == 400 && answer[0].as_str().unwrap_or_default().ends_with(BLAMED), "{status} {answer}");

        assert_eq!(put(dir, "vmm.shutdown", &NONE), (204, NONE));
        wait_until(|| carom.0.try_wait().unwrap().is_some());
        assert!(!dir.join("sockets/vsock").exists() && !dir.join("api.sock").exists());
    }
}

#[test]
fn vm_is_restored_within_the_limits_that_it_was_saved_with() {
    if no_kvm() {
        return;
    }
    let files = files();
    let dir = files.path();
    let url = json!(format!("file://{}", dir.join("allowed/snapshot").display()));
    let first = start(dir, "true");
    assert_eq!(put(dir, "vm.create", &config(dir)), (204, NONE));
    assert_eq!(put(dir, "vm.boot", &NONE), (204, NONE));
    assert_eq!(put(dir, "vm.pause", &NONE), (204, NONE));
    assert_eq!(put(dir, "vm.snapshot", &json!({"destination_url": url})), (204, NONE));
    assert_eq!(put(dir, "vm.delete", &NONE), (204, NONE));
    drop(first);

    let _second = start(dir, "true");
    assert_eq!(put(dir, "vm.restore", &json!({"source_url": url})), (204, NONE));
    assert_eq!(put(dir, "vm.resume", &NONE), (204, NONE));
    let (status, answer) = put(dir, "vm.add-disk", &json!({"path": dir.join("outside"), "image_type": "Raw"}));
    assert!(status == 400 && answer[0].as_str().unwrap_or_default().ends_with(BLAMED), "{status} {answer}");
}

/// Without the file, a boot says so and leaves the program as it was. With it, a boot works.
#[test]
fn boot_for_which_a_file_was_missing_works_once_it_is_there() {
    if no_kvm() {
        return;
    }
    let missing: [(&str, &[&str], &str); 6] = [
        ("disk", &["disks", "0", "path"], "disks.path"),
        ("kernel", &["payload", "kernel"], "payload.kernel"),
        ("initramfs", &["payload", "initramfs"], "payload.initramfs"),
        ("random", &["rng", "src"], "rng.src"),
        ("later/vsock", &["vsock", "socket"], "vsock.socket"),
        ("later/console", &["serial", "socket"], "serial.socket"),
    ];
    for (name, field, named) in missing {
        for anew in [false, true] {
            let files = files();
            let dir = files.path();
            let mut config = config(dir);
            if *field == ["serial", "socket"] {
                config["serial"] = json!({"mode": "Socket"});
            }
            let (last, before) = field.split_last().unwrap();
            let part = before.iter().fold(&mut config, |part, key| match key.parse::<usize>() {
                Ok(place) => &mut part[place],
                Err(_) => &mut part[*key],
            });
            part[*last] = json!(dir.join(name));
            let kept = dir.join("kept");
            let _ = fs::rename(dir.join(name), &kept);
            let _carom = start(dir, "true");
            assert_eq!(put(dir, "vm.create", &config), (204, NONE), "{name}");
            let (status, answer) = put(dir, "vm.boot", &NONE);
            let text = answer[0].as_str().unwrap_or_default();
            let expected = format!("{named}: {}: No such file or directory (os error 2)", dir.join(name).display());
            assert_eq!((status, text), (400, expected.as_str()), "{name}");
            // What was named before it is not made either.
            assert!(!dir.join("console").exists(), "{name}");

            match name {
                "later/vsock" | "later/console" => fs::create_dir(dir.join("later")).unwrap(),
                _ if kept.exists() => fs::rename(kept, dir.join(name)).unwrap(),
                _ => fs::write(dir.join(name), [0; 4096]).unwrap(),
            }
            if anew {
                assert_eq!(put(dir, "vm.delete", &NONE), (204, NONE), "{name}");
                assert_eq!(put(dir, "vm.create", &config), (204, NONE), "{name}");
            }
            assert_eq!(put(dir, "vm.boot", &NONE), (204, NONE), "{name}");
            let outside = json!({"path": dir.join("outside"), "image_type": "Raw"});
            let (status, answer) = put(dir, "vm.add-disk", &outside);
            assert!(status == 400 && answer[0].as_str().unwrap_or_default().ends_with(BLAMED), "{status} {answer}");
        }
    }
}

#[test]
fn restore_for_which_a_disk_was_missing_works_once_it_is_there() {
    if no_kvm() {
        return;
    }
    let files = files();
    let dir = files.path();
    let url = json!(format!("file://{}", dir.join("allowed/snapshot").display()));
    let first = start(dir, "true");
    assert_eq!(put(dir, "vm.create", &config(dir)), (204, NONE));
    assert_eq!(put(dir, "vm.boot", &NONE), (204, NONE));
    assert_eq!(put(dir, "vm.pause", &NONE), (204, NONE));
    assert_eq!(put(dir, "vm.snapshot", &json!({"destination_url": url})), (204, NONE));
    assert_eq!(put(dir, "vm.delete", &NONE), (204, NONE));
    drop(first);
    fs::rename(dir.join("disk"), dir.join("kept")).unwrap();

    let _second = start(dir, "true");
    let (status, answer) = put(dir, "vm.restore", &json!({"source_url": url}));
    let text = answer[0].as_str().unwrap_or_default();
    assert!(status == 400 && text.contains("/disk: No such file") && !text.ends_with(BLAMED), "{status} {answer}");
    fs::rename(dir.join("kept"), dir.join("disk")).unwrap();
    assert_eq!(put(dir, "vm.restore", &json!({"source_url": url})), (204, NONE));
    assert_eq!(put(dir, "vm.resume", &NONE), (204, NONE));
}

/// A function of the host's that no driver has, then that VFIO has no files of, is told as it is without Landlock. Another VM may be
/// made of other files after that.
#[test]
fn unavailable_device_is_explained_and_sets_no_landlock_rules() {
    if no_kvm() {
        return;
    }
    for iommufd in [false, true] {
        let files = files();
        let dir = files.path();
        let function = dir.join("0000:00:05.0");
        let _carom = start(dir, "true");
        let refused = |expected: &str| {
            let (status, answer) = put(dir, "vm.boot", &NONE);
            let text = answer[0].as_str().unwrap_or_default();
            assert!(
                status == 400 && text.contains(expected) && !text.ends_with(BLAMED),
                "{expected}: {status} {answer}"
            );
        };
        let mut with_device = config(dir);
        with_device["devices"] = json!([{"path": function}]);
        with_device["platform"] = json!({"iommufd": iommufd});
        assert_eq!(put(dir, "vm.create", &with_device), (204, NONE));
        refused("give the sysfs path of a PCI function");
        fs::create_dir(&function).unwrap();
        fs::write(function.join("config"), [0; 64]).unwrap();
        refused("bound to no driver, not to vfio-pci; bind it to vfio-pci");
        symlink("/drivers/vfio-pci", function.join("driver")).unwrap();
        refused("is in no IOMMU group");
        symlink("/groups/4000000000", function.join("iommu_group")).unwrap();
        match iommufd {
            false => refused("no such file: load VFIO on the host"),
            // A host that has IOMMUFD makes no device file of this function.
            true if Path::new("/dev/iommu").exists() => refused("has no character device in /dev/vfio/devices"),
            true => refused("platform.iommufd: /dev/iommu: no such file"),
        }

        assert_eq!(put(dir, "vm.delete", &NONE), (204, NONE));
        let mut other = config(dir);
        other["disks"][0]["path"] = json!(dir.join("outside"));
        assert_eq!(put(dir, "vm.create", &other), (204, NONE));
        assert_eq!(put(dir, "vm.boot", &NONE), (204, NONE));
    }
}

/// Reason to refuse a file that the command line does not allow.
const BEYOND: &str = ": the command line's --landlock does not allow this file; take it out of the configuration, or start the \
                      program with --landlock-rules for it (access=";
/// Rules for all files of [`saved`].
const RULES: &[&str] = &["--landlock", "--landlock-rules", "path=allowed,access=rw", "path=/dev/urandom,access=r"];

/// Saves a VM whose files are all in `allowed`, to `allowed/snapshot`, and returns its configuration there.
fn saved(dir: &Path) -> Value {
    let allowed = dir.join("allowed");
    fs::copy(dir.join("kernel"), allowed.join("kernel")).unwrap();
    let config = json!({
        "payload": {"kernel": allowed.join("kernel")},
        "memory": {"size": 64 << 20},
        "serial": {"mode": "File", "file": allowed.join("console")},
        "disks": [{"path": allowed.join("disk"), "image_type": "Raw"}],
        "rng": {"src": "/dev/urandom"},
        "vsock": {"cid": 3, "socket": allowed.join("vsock")},
    });
    let _carom = start(dir, "true");
    assert_eq!(put(dir, "vm.create", &config), (204, NONE));
    assert_eq!(put(dir, "vm.boot", &NONE), (204, NONE));
    assert_eq!(put(dir, "vm.pause", &NONE), (204, NONE));
    let url = json!({"destination_url": format!("file://{}", allowed.join("snapshot").display())});
    assert_eq!(put(dir, "vm.snapshot", &url), (204, NONE));
    assert_eq!(put(dir, "vm.delete", &NONE), (204, NONE));
    serde_json::from_slice(&fs::read(allowed.join("snapshot/config.json")).unwrap()).unwrap()
}

/// Restores the snapshot with this configuration.
fn restore(dir: &Path, config: &Value) -> (u16, Value) {
    fs::write(dir.join("allowed/snapshot/config.json"), config.to_string()).unwrap();
    put(dir, "vm.restore", &json!({"source_url": format!("file://{}", dir.join("allowed/snapshot").display())}))
}

#[test]
fn snapshot_names_no_file_beyond_the_command_line() {
    if no_kvm() {
        return;
    }
    let files = files();
    let dir = files.path();
    let saved = saved(dir);
    symlink(dir.join("outside"), dir.join("allowed/link")).unwrap();
    let _carom = start_with(dir, RULES);
    let (outside, new) = (dir.join("outside"), dir.join("new"));
    let (socket, link) = (dir.join("sockets/s"), dir.join("allowed/link"));
    let image = |path: &Path| json!({"path": path, "image_type": "Raw"});
    let zone = |file: &Path| json!({"size": 0, "zones": [{"id": "z", "size": 64 << 20, "file": file}]});
    let cases: [(&str, &str, Value, &Path); 19] = [
        ("disks.path", "disks", json!([image(&outside)]), &outside),
        ("disks.path", "disks", json!([image(&new)]), &new),
        ("disks.path", "disks", json!([image(&link)]), &link),
        ("disks.path", "disks", json!([{"path": outside, "image_type": "Raw", "readonly": true}]), &outside),
        ("disks.vhost_socket", "disks", json!([{"vhost_user": true, "vhost_socket": socket}]), &socket),
        ("payload.kernel", "payload", json!({"kernel": outside}), &outside),
        ("payload.initramfs", "payload", json!({"kernel": dir.join("allowed/kernel"), "initramfs": new}), &new),
        ("rng.src", "rng", json!({"src": outside}), &outside),
        ("serial.file", "serial", json!({"mode": "File", "file": outside}), &outside),
        ("serial.file", "serial", json!({"mode": "File", "file": new}), &new),
        ("console.socket", "console", json!({"mode": "Socket", "socket": socket}), &socket),
        ("vsock.socket", "vsock", json!({"cid": 3, "socket": socket}), &socket),
        ("pmem.file", "pmem", json!([{"file": outside}]), &outside),
        ("memory.zones.file", "memory", zone(&outside), &outside),
        ("memory.zones.file", "memory", zone(dir), dir),
        ("devices.path", "devices", json!([{"path": dir.join("sockets")}]), &dir.join("sockets")),
        ("user_devices.socket", "user_devices", json!([{"socket": socket, "iommu": true}]), &socket),
        ("fs.socket", "fs", json!([{"tag": "t", "socket": socket}]), &socket),
        ("landlock_rules.path", "landlock_rules", json!([{"path": dir, "access": "r"}]), dir),
    ];
    for (field, key, value, path) in cases {
        let mut config = saved.clone();
        config[key] = value;
        config["landlock_enable"] = json!(key == "landlock_rules");
        if ["fs", "disks"].contains(&key) {
            config["memory"]["shared"] = json!(true);
        }
        let (status, answer) = restore(dir, &config);
        let text = answer[0].as_str().unwrap_or_default();
        let expected = format!("{field}: {}{BEYOND}", path.display());
        assert!(status == 400 && text.starts_with(&expected), "{field}: {status} {answer}");
        assert!(!new.exists(), "{field}");
    }
    // The same limits hold for a client's VM.
    let client = json!({"payload": {"kernel": dir.join("allowed/kernel")}, "disks": [image(&outside)]});
    assert_eq!(put(dir, "vm.create", &client), (204, NONE));
    let (status, answer) = put(dir, "vm.boot", &NONE);
    let text = answer[0].as_str().unwrap_or_default();
    assert!(status == 400 && text.contains(BEYOND), "{status} {answer}");
    assert_eq!(put(dir, "vm.delete", &NONE), (204, NONE));
    // A narrower rule than the command line's is accepted.
    let mut config = saved;
    config["landlock_enable"] = json!(true);
    config["landlock_rules"] = json!([{"path": dir.join("allowed/disk"), "access": "r"}]);
    assert_eq!(restore(dir, &config), (204, NONE));
    let disk = |path: &str| json!({"path": dir.join(path), "image_type": "Raw"});
    File::create(dir.join("allowed/other")).unwrap().set_len(1 << 20).unwrap();
    let (status, answer) = put(dir, "vm.add-disk", &disk("allowed/other"));
    assert_eq!(status, 200, "{answer}");
    let (status, answer) = put(dir, "vm.add-disk", &disk("outside"));
    assert!(status == 400 && answer[0].as_str().unwrap_or_default().contains(BEYOND), "{status} {answer}");
    // The kernel lets any thread connect to a socket.
    assert_eq!(put(dir, "vm.delete", &NONE), (204, NONE));
    let shared =
        json!({"payload": {"kernel": dir.join("allowed/kernel")}, "memory": {"size": 64 << 20, "shared": true}});
    assert_eq!(put(dir, "vm.create", &shared), (204, NONE));
    assert_eq!(put(dir, "vm.boot", &NONE), (204, NONE));
    let _listener = UnixListener::bind(&socket).unwrap();
    let (status, answer) = put(dir, "vm.add-user-device", &json!({"socket": socket}));
    assert!(status == 400 && answer[0].as_str().unwrap_or_default().contains(BEYOND), "{status} {answer}");
}

#[test]
fn snapshot_whose_ram_is_a_link_to_a_file_beyond_is_refused() {
    if no_kvm() {
        return;
    }
    let files = files();
    let dir = files.path();
    let config = saved(dir);
    let (ram, secret) = (dir.join("allowed/snapshot/memory-ranges"), dir.join("secret"));
    fs::rename(&ram, &secret).unwrap();
    symlink(&secret, &ram).unwrap();
    let carom = start_with(dir, RULES);
    let (status, answer) = restore(dir, &config);
    let expected = format!("source_url: {}{BEYOND}r)", ram.display());
    assert_eq!((status, answer), (400, json!([expected])));
    drop(carom);

    // A link within the limits is followed, and without limits any link is.
    let carom = start(dir, "true");
    assert_eq!(restore(dir, &config), (204, NONE));
    drop(carom);
    fs::remove_file(&ram).unwrap();
    fs::rename(&secret, dir.join("allowed/ram")).unwrap();
    symlink(dir.join("allowed/ram"), &ram).unwrap();
    let _carom = start_with(dir, RULES);
    assert_eq!(restore(dir, &config), (204, NONE));
}

#[test]
fn restored_vm_of_the_command_line_names_no_file_beyond_it() {
    if no_kvm() {
        return;
    }
    let files = files();
    let dir = files.path();
    let mut saved = saved(dir);
    let source = format!("source_url=file://{},resume=on", dir.join("allowed/snapshot").display());
    let options = [RULES, &["--restore", &source]].concat();
    let carom = start_with(dir, &options);
    assert_eq!(put(dir, "vm.pause", &NONE), (204, NONE));
    drop(carom);

    saved["rng"]["src"] = json!(dir.join("outside"));
    fs::remove_file(dir.join("api.sock")).unwrap();
    fs::write(dir.join("allowed/snapshot/config.json"), saved.to_string()).unwrap();
    let output = command(dir, &options).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let expected = format!("carom: --rng {}{BEYOND}r)\n", dir.join("outside").display());
    assert_eq!((output.status.code(), text), (Some(2), expected));
}

/// A later VM may name the files of the command line's VM and of its rules.
#[test]
fn snapshot_after_the_command_lines_vm_names_what_that_named() {
    if no_kvm() {
        return;
    }
    let files = files();
    let dir = files.path();
    let mut saved = saved(dir);
    let vm = ["--kernel", "allowed/kernel", "--memory", "size=64M", "--serial", "null", "--rng", "src=/dev/urandom"];
    let rest =
        ["--disk", "path=disk,image_type=raw", "--landlock", "--landlock-rules", "path=allowed/snapshot,access=r"];
    let _carom = start_with(dir, &[&vm[..], &rest].concat());
    assert_eq!(put(dir, "vm.pause", &NONE), (204, NONE));
    assert_eq!(put(dir, "vm.delete", &NONE), (204, NONE));
    saved["disks"][0]["path"] = json!(dir.join("disk"));
    for (field, key) in [("vsock.socket", "vsock"), ("serial.file", "serial")] {
        let (status, answer) = restore(dir, &saved);
        let text = answer[0].as_str().unwrap_or_default();
        assert!(status == 400 && text.starts_with(field) && text.contains(BEYOND), "{status} {answer}");
        saved.as_object_mut().unwrap().remove(key);
    }
    let (status, answer) = restore(dir, &saved);
    // The configuration now lacks a device of the saved state. That is found after the files.
    let text = answer[0].as_str().unwrap_or_default();
    assert!(status == 400 && !text.contains(BEYOND) && !text.contains("Permission denied"), "{status} {answer}");
}

/// What the program says that is started by these options, beside a kernel, with a kernel of the host's that has no Landlock.
fn without_landlock(options: &[&str]) -> Output {
    let calls = [(libc::SYS_landlock_create_ruleset, Vec::new())].into_iter().collect();
    let refuse = SeccompAction::Errno(libc::EOPNOTSUPP.cast_unsigned());
    let filter = SeccompFilter::new(calls, SeccompAction::Allow, refuse, TargetArch::x86_64).unwrap();
    let filter: BpfProgram = filter.try_into().unwrap();
    thread::scope(|scope| {
        let run = || {
            // This thread's, and what it starts has it too.
            apply_filter(&filter).unwrap();
            Command::new(env!("CARGO_BIN_EXE_carom")).args(["--kernel", "/k"]).args(options).output().unwrap()
        };
        scope.spawn(run).join().unwrap()
    })
}

#[test]
fn landlock_option_is_refused_on_a_kernel_without_it() {
    let output = without_landlock(&["--landlock"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.starts_with("carom: --landlock: the host's kernel has no Landlock"), "{text}");
    let output = without_landlock(&[]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!text.contains("Landlock"), "{text}");
}

#[test]
fn rule_for_what_is_not_there_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_carom"))
        .args(["--kernel", env!("CARGO_BIN_EXE_carom"), "--landlock", "--landlock-rules", "path=/no/such,access=rw"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.starts_with("carom: --landlock-rules /no/such: No such file"), "{text}");
}

/// The kernel and a disk are open already, and are named by that.
#[test]
fn files_that_the_parent_opened_are_had_by_their_descriptors() {
    if no_kvm() {
        return;
    }
    let files = files();
    let dir = files.path();
    let script = "exec \"$0\" --kernel /proc/self/fd/7 --memory size=64M --disk path=/proc/self/fd/8,image_type=raw --serial null --landlock \
                  --api-socket api.sock 7<kernel 8<>disk";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_carom")]).current_dir(dir).stdin(Stdio::null());
    let mut carom = Carom(command.spawn().unwrap());
    wait_until(|| UnixStream::connect(dir.join("api.sock")).is_ok());
    assert_eq!(put(dir, "vm.pause", &NONE), (204, NONE));
    assert_eq!(put(dir, "vm.reboot", &NONE), (204, NONE));
    let (status, answer) = put(dir, "vm.add-disk", &json!({"path": dir.join("outside"), "image_type": "Raw"}));
    assert!(status == 400 && answer[0].as_str().unwrap_or_default().contains(BEYOND), "{status} {answer}");
    assert_eq!(put(dir, "vmm.shutdown", &NONE), (204, NONE));
    wait_until(|| carom.0.try_wait().unwrap().is_some());
}

/// A user who may open neither KVM nor the disk, nor find the disk any more, runs a VM of their descriptors.
#[test]
fn vm_of_inherited_descriptors_needs_no_file_permissions() {
    if no_kvm() {
        return;
    }
    let files = files();
    let dir = files.path();
    fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
    let open = |options: &str| {
        // Who is not root cannot become another user, and sees less of it.
        let other = if rustix::process::getuid().is_root() {
            "setpriv --reuid=64000 --regid=64000 --clear-groups --bounding-set=-all --inh-caps=-all"
        } else {
            ""
        };
        let script = format!(
            "exec 6<>/dev/kvm 8<>disk 9<disk; exec {other} \"$0\" --kernel kernel --memory size=64M --serial null --landlock \
             --api-socket api.sock {options}"
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_carom")]).current_dir(dir).stdin(Stdio::null());
        command
    };
    let output = open("--inherit fd=6 fd=9 --disk path=/dev/fd/9,image_type=raw").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("the descriptor is open to be read only"), "{text}");

    let options = "--inherit fd=6 fd=8 --disk path=/dev/fd/8,image_type=raw";
    let mut carom = Carom(open(options).spawn().unwrap());
    wait_until(|| UnixStream::connect(dir.join("api.sock")).is_ok());
    fs::remove_file(dir.join("disk")).unwrap();
    // The descriptors stay for the next boot.
    for _ in 0..2 {
        assert_eq!(put(dir, "vm.pause", &NONE), (204, NONE));
        assert_eq!(put(dir, "vm.shutdown", &NONE), (204, NONE));
        assert_eq!(put(dir, "vm.boot", &NONE), (204, NONE));
    }
    assert_eq!(put(dir, "vmm.shutdown", &NONE), (204, NONE));
    wait_until(|| carom.0.try_wait().unwrap().is_some());
}
