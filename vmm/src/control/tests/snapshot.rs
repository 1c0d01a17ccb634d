// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saving and restoring, as far as it is the control thread's.

use carom_api::VmSnapshotConfig;
use carom_api::snapshot::DirectoryUrl;
use tempfile::TempDir;

use super::*;
use crate::snapshot::tests::write;

fn url(directory: &std::path::Path) -> DirectoryUrl {
    format!("file://{}", directory.display()).parse().unwrap()
}

fn save(control: &mut Control<Null>, directory: &std::path::Path) -> Result<Reply, ControlError> {
    control.serve_call(Call::Snapshot(VmSnapshotConfig { destination_url: url(directory) }))
}

fn restore(control: &mut Control<Null>, directory: &std::path::Path, resume: bool) -> Result<Reply, ControlError> {
    let source = serde_json::json!({"source_url": url(directory), "resume": resume});
    control.serve_call(Call::Restore(serde_json::from_value(source).unwrap()))
}

fn watched() -> (Control<Null>, EventMonitor, File) {
    let file = tempfile::tempfile().unwrap();
    let monitor = EventMonitor::new(file.try_clone().unwrap()).unwrap();
    (Control::new(monitor.clone(), Options::default()), monitor, file)
}

fn told(monitor: &EventMonitor, file: &File) -> Vec<String> {
    events(monitor, file).into_iter().map(|(name, _)| name).collect()
}

#[test]
fn vm_is_saved_while_it_is_paused_only_and_stays_so() {
    let directory = TempDir::new().unwrap();
    let (mut control, monitor, file) = watched();
    assert!(matches!(save(&mut control, directory.path()), Err(ControlError::NotCreated)));
    control.create(config("fail-save")).unwrap();
    let refused = save(&mut control, directory.path()).unwrap_err();
    assert_eq!(refused.to_string(), "the VM is created, but not booted: vm.snapshot needs it paused (vm.pause)");
    control.boot().unwrap();
    assert!(matches!(save(&mut control, directory.path()), Err(ControlError::WrongState { .. })));
    control.pause().unwrap();
    assert!(matches!(save(&mut control, directory.path()), Err(ControlError::Vm(VmError::Guest(_)))));
    assert_eq!(state(&mut control), Some(VmState::Paused));
    control.resume().unwrap();
    control.delete();

    control.create(config("")).unwrap();
    control.boot().unwrap();
    control.pause().unwrap();
    save(&mut control, directory.path()).unwrap();
    std::fs::write(directory.path().join("state.json"), "").unwrap();
    let refused = save(&mut control, directory.path()).unwrap_err();
    assert!(refused.to_string().contains("is there already"), "{refused}");
    assert_eq!(state(&mut control), Some(VmState::Paused));
    control.resume().unwrap();
    let told = told(&monitor, &file);
    let of_saving: Vec<_> = told.iter().filter(|event| event.starts_with("snap")).collect();
    assert_eq!(of_saving, ["snapshotting", "snapshotting", "snapshotted", "snapshotting"]);
    control.delete();
}

#[test]
fn restored_vm_is_paused_unless_it_is_to_run() {
    let directory = TempDir::new().unwrap();
    write(&directory.path().join("vm"));
    let directory = directory.path().join("vm");
    let (mut control, monitor, file) = watched();
    restore(&mut control, &directory, false).unwrap();
    assert_eq!(state(&mut control), Some(VmState::Paused));
    assert!(matches!(restore(&mut control, &directory, false), Err(ControlError::AlreadyCreated)));
    control.resume().unwrap();
    control.delete();
    restore(&mut control, &directory, true).unwrap();
    assert_eq!(state(&mut control), Some(VmState::Running));
    control.reboot().unwrap();
    control.delete();
    let once = ["restoring", "restored", "resuming", "resumed"];
    let expected: Vec<&str> =
        [&once[..], &["shutdown", "deleted"], &once, &["rebooting", "rebooted", "shutdown", "deleted"]].concat();
    assert_eq!(told(&monitor, &file), expected);
}

#[test]
fn what_cannot_be_restored_leaves_no_vm() {
    let directory = TempDir::new().unwrap();
    let (mut control, monitor, file) = watched();
    let refused = restore(&mut control, &directory.path().join("none"), false).unwrap_err();
    assert!(matches!(&refused, ControlError::Vm(error) if error.is_user_error()), "{refused}");
    assert_eq!(state(&mut control), None);
    assert_eq!(told(&monitor, &file), ["restoring", "failed"]);
    control.create(config("")).unwrap();
    control.boot().unwrap();
    control.delete();
}
