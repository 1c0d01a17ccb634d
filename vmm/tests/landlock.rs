// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests which files a real `carom` process can access if Landlock restricts the process to the files of its VM.
//!
//! The guest consists of a few instructions. Without access to `/dev/kvm`, tests that boot the guest do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod http;
mod outputs;
#[expect(dead_code, reason = "shared by tests that start the program in another way")]
mod program;
mod tiny_guest;

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};
use serde_json::{Value, json};
use tempfile::TempDir;

use program::{Carom, call, has_kvm, put, start_by};
use tiny_guest::elf;

/// `again: hlt; jmp again`
const HALT: &[u8] = &[0xf4, 0xeb, 0xfd];
const BLAMED: &str = "Permission denied (os error 13); Landlock may be the cause: it allows only files named in \
                      landlock_rules or in the VM's configuration when Landlock was turned on";

/// Starts the program with a socket `api.sock` and these options, in `dir`.
fn start(dir: &Path, options: &[&str]) -> Carom {
    let _ = fs::remove_file(dir.join("api.sock"));
    start_by(command(dir, options), dir)
}

fn command(dir: &Path, options: &[&str]) -> Command {
    let mut command = program::command(dir, options);
    command.current_dir(dir);
    command
}

/// Makes a call that must be refused. Returns the reason.
fn refused(dir: &Path, name: &str, body: Option<&Value>) -> String {
    let (status, answer) = call(dir, "PUT", name, body);
    assert_eq!(status, 400, "{name}: {answer}");
    answer[0].as_str().unwrap_or_default().into()
}

/// Checks that the VM can add a disk with the image of this name in `dir`.
fn adds_disk(dir: &Path, name: &str) {
    let (status, answer) = call(dir, "PUT", "vm.add-disk", Some(&image(&dir.join(name))));
    assert_eq!(status, 200, "{answer}");
}

/// Checks that the VM cannot add the image `outside`.
fn refuses_outside(dir: &Path, reason: &str) {
    let text = refused(dir, "vm.add-disk", Some(&image(&dir.join("outside"))));
    assert!(text.contains("/outside: ") && text.contains(reason), "{text}");
}

fn create_and_boot(dir: &Path, config: &Value) {
    put(dir, "vm.create", Some(config));
    put(dir, "vm.boot", None);
}

fn url(dir: &Path, name: &str) -> String {
    format!("file://{}", dir.join(name).display())
}

/// Starts the program, saves a VM to `allowed/snapshot`, and ends the program.
fn save(dir: &Path, config: &Value) {
    let _carom = start(dir, &[]);
    create_and_boot(dir, config);
    put(dir, "vm.pause", None);
    put(dir, "vm.snapshot", Some(&json!({"destination_url": url(dir, "allowed/snapshot")})));
    put(dir, "vm.delete", None);
}

/// Creates a directory with a guest, and images `disk`, `allowed/disk` and `outside`. Returns `None` without KVM.
fn files() -> Option<TempDir> {
    if !has_kvm() {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("kernel"), elf(HALT)).unwrap();
    for name in ["sockets", "allowed"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    for name in ["disk", "allowed/disk", "outside"] {
        File::create(dir.path().join(name)).unwrap().set_len(1 << 20).unwrap();
    }
    Some(dir)
}

fn image(path: &Path) -> Value {
    json!({"path": path, "image_type": "Raw"})
}

/// Returns the configuration of a VM whose files are in `dir`, except its socket.
fn vm(dir: &Path, socket: &Path) -> Value {
    json!({
        "payload": {"kernel": dir.join("kernel")},
        "memory": {"size": 64 << 20},
        "serial": {"mode": "File", "file": dir.join("console")},
        "disks": [image(&dir.join("disk"))],
        "rng": {"src": "/dev/urandom"},
        "vsock": {"cid": 3, "socket": socket},
    })
}

/// Returns the configuration of [`vm`] with Landlock on, and with a rule that allows the directory `allowed`.
fn config(dir: &Path) -> Value {
    let mut config = vm(dir, &dir.join("sockets/vsock"));
    config["landlock_enable"] = json!(true);
    config["landlock_rules"] = json!([{"path": dir.join("allowed"), "access": "rw"}]);
    config
}

#[test]
fn vm_reaches_only_files_of_its_configuration_and_rules() {
    for seccomp in ["true", "false"] {
        let Some(files) = files() else { return };
        let dir = files.path();
        let mut carom = start(dir, &["--seccomp", seccomp]);
        create_and_boot(dir, &config(dir));
        assert!(UnixStream::connect(dir.join("sockets/vsock")).is_ok() && dir.join("console").exists());

        refuses_outside(dir, BLAMED);
        adds_disk(dir, "allowed/disk");

        put(dir, "vm.pause", None);
        let to = |name: &str| json!({"destination_url": url(dir, name)});
        let (status, answer) = call(dir, "PUT", "vm.snapshot", Some(&to("snapshot")));
        let text = answer[0].as_str().unwrap_or_default();
        assert!(status >= 400 && text.contains("/snapshot: ") && text.ends_with(BLAMED), "{status} {answer}");
        put(dir, "vm.snapshot", Some(&to("allowed/snapshot")));

        // The program restricts itself only at the first boot, because the kernel allows only 16 restrictions of a process.
        for _ in 0..20 {
            put(dir, "vm.shutdown", None);
            put(dir, "vm.boot", None);
        }
        put(dir, "vm.delete", None);

        // The restriction stays when the VM is deleted.
        fs::copy(dir.join("kernel"), dir.join("other")).unwrap();
        let other = json!({"payload": {"kernel": dir.join("other")}, "memory": {"size": 64 << 20}});
        put(dir, "vm.create", Some(&other));
        let text = refused(dir, "vm.boot", None);
        assert!(text.ends_with(BLAMED), "{text}");

        put(dir, "vmm.shutdown", None);
        carom.ended();
        assert!(!dir.join("sockets/vsock").exists() && !dir.join("api.sock").exists());
    }
}

#[test]
fn vm_is_restored_within_its_saved_limits() {
    let Some(files) = files() else { return };
    let dir = files.path();
    save(dir, &config(dir));

    let _carom = start(dir, &[]);
    put(dir, "vm.restore", Some(&json!({"source_url": url(dir, "allowed/snapshot")})));
    put(dir, "vm.resume", None);
    refuses_outside(dir, BLAMED);
}

/// Without the file, a boot reports the missing file and sets no restriction. With the file, a boot works.
#[test]
fn boot_works_once_its_missing_file_exists() {
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
            let Some(files) = files() else { return };
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
            let _carom = start(dir, &[]);
            put(dir, "vm.create", Some(&config));
            let text = refused(dir, "vm.boot", None);
            let expected = format!("{named}: {}: No such file or directory (os error 2)", dir.join(name).display());
            assert_eq!(text, expected, "{name}");
            // The failed boot has not created the console file.
            assert!(!dir.join("console").exists(), "{name}");

            match name {
                "later/vsock" | "later/console" => fs::create_dir(dir.join("later")).unwrap(),
                _ if kept.exists() => fs::rename(kept, dir.join(name)).unwrap(),
                _ => fs::write(dir.join(name), [0; 4096]).unwrap(),
            }
            if anew {
                put(dir, "vm.delete", None);
                put(dir, "vm.create", Some(&config));
            }
            put(dir, "vm.boot", None);
            refuses_outside(dir, BLAMED);
        }
    }
}

#[test]
fn restore_works_once_its_missing_disk_exists() {
    let Some(files) = files() else { return };
    let dir = files.path();
    save(dir, &config(dir));
    fs::rename(dir.join("disk"), dir.join("kept")).unwrap();

    let _carom = start(dir, &[]);
    let restored = json!({"source_url": url(dir, "allowed/snapshot")});
    let text = refused(dir, "vm.restore", Some(&restored));
    assert!(text.contains("/disk: No such file") && !text.ends_with(BLAMED), "{text}");
    fs::rename(dir.join("kept"), dir.join("disk")).unwrap();
    put(dir, "vm.restore", Some(&restored));
    put(dir, "vm.resume", None);
}

/// The test uses a host function first without a driver, then without VFIO files. The errors are the same as without Landlock.
/// Afterwards, another VM may use other files.
#[test]
fn unavailable_device_is_explained_and_sets_no_landlock_rules() {
    for iommufd in [false, true] {
        let Some(files) = files() else { return };
        let dir = files.path();
        let function = dir.join("0000:00:05.0");
        let _carom = start(dir, &[]);
        let refused = |expected: &str| {
            let text = refused(dir, "vm.boot", None);
            assert!(text.contains(expected) && !text.ends_with(BLAMED), "{expected}: {text}");
        };
        let mut with_device = config(dir);
        with_device["devices"] = json!([{"path": function}]);
        with_device["platform"] = json!({"iommufd": iommufd});
        put(dir, "vm.create", Some(&with_device));
        refused("give the sysfs path of a PCI function");
        fs::create_dir(&function).unwrap();
        fs::write(function.join("config"), [0; 64]).unwrap();
        refused("bound to no driver, not to vfio-pci; bind it to vfio-pci");
        symlink("/drivers/vfio-pci", function.join("driver")).unwrap();
        refused("is in no IOMMU group");
        symlink("/groups/4000000000", function.join("iommu_group")).unwrap();
        match iommufd {
            false => refused("does not exist, or has no driver: load VFIO on the host"),
            // A host with IOMMUFD has no device file for this function.
            true if Path::new("/dev/iommu").exists() => refused("has no character device in /dev/vfio/devices"),
            true => refused("platform.iommufd: /dev/iommu: does not exist"),
        }

        put(dir, "vm.delete", None);
        let mut other = config(dir);
        other["disks"][0]["path"] = json!(dir.join("outside"));
        create_and_boot(dir, &other);
    }
}

/// Error for a file that the command line does not allow.
const BEYOND: &str = ": --landlock on the command line does not allow this file; remove the file from the configuration, or start \
                      carom with --landlock-rules path=FILE,access=";
/// Rules for all files of [`saved`].
const RULES: &[&str] = &["--landlock", "--landlock-rules", "path=allowed,access=rw", "path=/dev/urandom,access=r"];

/// Saves a VM whose files are all in `allowed` to `allowed/snapshot`. Returns its configuration.
fn saved(dir: &Path) -> Value {
    let allowed = dir.join("allowed");
    fs::copy(dir.join("kernel"), allowed.join("kernel")).unwrap();
    let config = vm(&allowed, &allowed.join("vsock"));
    save(dir, &config);
    serde_json::from_slice(&fs::read(allowed.join("snapshot/config.json")).unwrap()).unwrap()
}

/// Restores the snapshot with this configuration.
fn restore(dir: &Path, config: &Value) -> (u16, Value) {
    fs::write(dir.join("allowed/snapshot/config.json"), config.to_string()).unwrap();
    call(dir, "PUT", "vm.restore", Some(&json!({"source_url": url(dir, "allowed/snapshot")})))
}

#[test]
fn snapshot_names_no_file_beyond_the_command_line() {
    let Some(files) = files() else { return };
    let dir = files.path();
    let saved = saved(dir);
    symlink(dir.join("outside"), dir.join("allowed/link")).unwrap();
    let _carom = start(dir, RULES);
    let (outside, new) = (dir.join("outside"), dir.join("new"));
    let (socket, link) = (dir.join("sockets/s"), dir.join("allowed/link"));
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
    // The same limits apply to a VM that a client creates.
    let client = json!({"payload": {"kernel": dir.join("allowed/kernel")}, "disks": [image(&outside)]});
    put(dir, "vm.create", Some(&client));
    let text = refused(dir, "vm.boot", None);
    assert!(text.contains(BEYOND), "{text}");
    put(dir, "vm.delete", None);
    // A rule that is narrower than the command line's rule is accepted.
    let mut config = saved;
    config["landlock_enable"] = json!(true);
    config["landlock_rules"] = json!([{"path": dir.join("allowed/disk"), "access": "r"}]);
    assert_eq!(restore(dir, &config), (204, Value::Null));
    File::create(dir.join("allowed/other")).unwrap().set_len(1 << 20).unwrap();
    adds_disk(dir, "allowed/other");
    refuses_outside(dir, BEYOND);
    // The program itself checks the path of a socket, because Landlock does not restrict connections to sockets.
    put(dir, "vm.delete", None);
    let shared =
        json!({"payload": {"kernel": dir.join("allowed/kernel")}, "memory": {"size": 64 << 20, "shared": true}});
    create_and_boot(dir, &shared);
    let _listener = UnixListener::bind(&socket).unwrap();
    let text = refused(dir, "vm.add-user-device", Some(&json!({"socket": socket})));
    assert!(text.contains(BEYOND), "{text}");
}

#[test]
fn snapshot_whose_ram_links_beyond_the_limits_is_refused() {
    let Some(files) = files() else { return };
    let dir = files.path();
    let config = saved(dir);
    let (ram, secret) = (dir.join("allowed/snapshot/memory-ranges"), dir.join("secret"));
    fs::rename(&ram, &secret).unwrap();
    symlink(&secret, &ram).unwrap();
    let carom = start(dir, RULES);
    let (status, answer) = restore(dir, &config);
    let expected = format!("source_url: {}{BEYOND}r", ram.display());
    assert_eq!((status, answer), (400, json!([expected])));
    drop(carom);

    // Without limits, any link is followed. With limits, a link to an allowed file is followed.
    let carom = start(dir, &[]);
    assert_eq!(restore(dir, &config), (204, Value::Null));
    drop(carom);
    fs::remove_file(&ram).unwrap();
    fs::rename(&secret, dir.join("allowed/ram")).unwrap();
    symlink(dir.join("allowed/ram"), &ram).unwrap();
    let _carom = start(dir, RULES);
    assert_eq!(restore(dir, &config), (204, Value::Null));
}

#[test]
fn restored_vm_of_the_command_line_names_no_file_beyond_it() {
    let Some(files) = files() else { return };
    let dir = files.path();
    let mut saved = saved(dir);
    let source = format!("source_url={},resume=on", url(dir, "allowed/snapshot"));
    let options = [RULES, &["--restore", &source]].concat();
    let carom = start(dir, &options);
    put(dir, "vm.pause", None);
    drop(carom);

    saved["rng"]["src"] = json!(dir.join("outside"));
    fs::remove_file(dir.join("api.sock")).unwrap();
    fs::write(dir.join("allowed/snapshot/config.json"), saved.to_string()).unwrap();
    let output = command(dir, &options).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let expected = format!("carom: --rng {}{BEYOND}r\n", dir.join("outside").display());
    assert_eq!((output.status.code(), text), (Some(2), expected));
}

/// A VM that is restored later may use the files of the command line's VM and the paths of `--landlock-rules`, but no other files.
#[test]
fn snapshot_may_name_files_of_the_command_lines_vm() {
    let Some(files) = files() else { return };
    let dir = files.path();
    let mut saved = saved(dir);
    let vm = ["--kernel", "allowed/kernel", "--memory", "size=64M", "--serial", "null", "--rng", "src=/dev/urandom"];
    let rest =
        ["--disk", "path=disk,image_type=raw", "--landlock", "--landlock-rules", "path=allowed/snapshot,access=r"];
    let _carom = start(dir, &[&vm[..], &rest].concat());
    put(dir, "vm.pause", None);
    put(dir, "vm.delete", None);
    saved["disks"][0]["path"] = json!(dir.join("disk"));
    for (field, key) in [("vsock.socket", "vsock"), ("serial.file", "serial")] {
        let (status, answer) = restore(dir, &saved);
        let text = answer[0].as_str().unwrap_or_default();
        assert!(status == 400 && text.starts_with(field) && text.contains(BEYOND), "{status} {answer}");
        saved.as_object_mut().unwrap().remove(key);
    }
    let (status, answer) = restore(dir, &saved);
    // The restore fails later, because the configuration lacks a device of the saved state. The files were checked before.
    let text = answer[0].as_str().unwrap_or_default();
    assert!(status == 400 && !text.contains(BEYOND) && !text.contains("Permission denied"), "{status} {answer}");
}

/// Runs the program with a kernel and these options, on a host kernel without Landlock. Returns its output.
fn without_landlock(options: &[&str]) -> Output {
    let calls = [(libc::SYS_landlock_create_ruleset, Vec::new())].into_iter().collect();
    let refuse = SeccompAction::Errno(libc::EOPNOTSUPP.cast_unsigned());
    let filter = SeccompFilter::new(calls, SeccompAction::Allow, refuse, TargetArch::x86_64).unwrap();
    let filter: BpfProgram = filter.try_into().unwrap();
    thread::scope(|scope| {
        let run = || {
            // The filter applies to this thread and to the program that it starts.
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
fn rule_for_a_missing_file_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_carom"))
        .args(["--kernel", env!("CARGO_BIN_EXE_carom"), "--landlock", "--landlock-rules", "path=/no/such,access=rw"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.starts_with("carom: --landlock-rules /no/such: No such file"), "{text}");
}

/// The kernel and a disk are already open, and are named by their descriptors.
#[test]
fn files_of_the_parent_are_used_by_their_descriptors() {
    let Some(files) = files() else { return };
    let dir = files.path();
    let script = "exec \"$0\" --kernel /proc/self/fd/7 --memory size=64M --disk path=/proc/self/fd/8,image_type=raw --serial null --landlock \
                  --api-socket api.sock 7<kernel 8<>disk";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_carom")]).current_dir(dir).stdin(Stdio::null());
    let mut carom = start_by(command, dir);
    put(dir, "vm.pause", None);
    put(dir, "vm.reboot", None);
    refuses_outside(dir, BEYOND);
    put(dir, "vmm.shutdown", None);
    carom.ended();
}

/// The program's user has no permission to open KVM and the disk for writing, and the disk's file is removed from its directory. With
/// descriptors of KVM and the disk, this user can run a VM.
#[test]
fn vm_of_inherited_descriptors_needs_no_file_permissions() {
    let Some(files) = files() else { return };
    let dir = files.path();
    fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).unwrap();
    let open = |options: &str| {
        // Only root can become another user. Without root, the test checks only the use of the descriptors.
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
    assert!(text.contains("the descriptor is open for reading only"), "{text}");

    let options = "--inherit fd=6 fd=8 --disk path=/dev/fd/8,image_type=raw";
    let mut carom = start_by(open(options), dir);
    fs::remove_file(dir.join("disk")).unwrap();
    // The descriptors stay open for the next boot.
    for _ in 0..2 {
        put(dir, "vm.pause", None);
        put(dir, "vm.shutdown", None);
        put(dir, "vm.boot", None);
    }
    put(dir, "vmm.shutdown", None);
    carom.ended();
}
