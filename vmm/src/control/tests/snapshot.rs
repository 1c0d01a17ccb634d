// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of saving and restoring in the control thread.

use carom_api::VmSnapshotConfig;
use carom_api::snapshot::DirectoryUrl;
use tempfile::TempDir;

use super::*;
use crate::control::reset_pace::ResetPace;
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

fn seen(monitor: &EventMonitor, file: &File) -> Vec<String> {
    events(monitor, file).into_iter().map(|(name, _)| name).collect()
}

#[test]
fn vm_is_saved_only_while_paused_and_stays_paused() {
    let directory = TempDir::new().unwrap();
    let (mut control, monitor, file) = watched(Options::default());
    assert!(matches!(save(&mut control, directory.path()), Err(ControlError::NotCreated)));
    control.create(config("fail-save")).unwrap();
    let refused = save(&mut control, directory.path()).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the VM is created, but not booted: vm.snapshot needs a VM that is paused (vm.pause)"
    );
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
    assert!(refused.to_string().contains("already exists"), "{refused}");
    assert_eq!(state(&mut control), Some(VmState::Paused));
    control.resume().unwrap();
    let seen = seen(&monitor, &file);
    let of_saving: Vec<_> = seen.iter().filter(|event| event.starts_with("snap")).collect();
    assert_eq!(of_saving, ["snapshotting", "snapshotting", "snapshotted", "snapshotting"]);
    control.delete();
}

#[test]
fn restored_vm_is_paused_unless_resume_is_set() {
    let directory = TempDir::new().unwrap();
    write(&directory.path().join("vm"));
    let directory = directory.path().join("vm");
    let (mut control, monitor, file) = watched(Options::default());
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
    assert_eq!(seen(&monitor, &file), expected);
}

#[test]
fn failed_restore_leaves_no_vm() {
    let directory = TempDir::new().unwrap();
    let (mut control, monitor, file) = watched(Options::default());
    let refused = restore(&mut control, &directory.path().join("none"), false).unwrap_err();
    assert!(matches!(&refused, ControlError::Vm(error) if error.is_user_error()), "{refused}");
    assert_eq!(state(&mut control), None);
    assert_eq!(seen(&monitor, &file), ["restoring", "failed"]);
    control.create(config("")).unwrap();
    control.boot().unwrap();
    control.delete();
}

#[test]
fn failed_resume_after_restore_deletes_the_vm() {
    let directory = TempDir::new().unwrap();
    let directory = directory.path().join("vm");
    write(&directory);
    let path = directory.join("config.json");
    let mut saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    saved["payload"]["cmdline"] = "fail-resume".into();
    std::fs::write(&path, saved.to_string()).unwrap();
    let (mut control, monitor, file) = watched(Options::default());
    for _ in 0..2 {
        let failed = restore(&mut control, &directory, true).unwrap_err();
        assert!(matches!(failed, ControlError::Vm(VmError::Guest(_))), "{failed}");
        assert_eq!((state(&mut control), ALIVE.get()), (None, 0));
    }
    let once = ["restoring", "restored", "resuming", "failed", "shutdown", "deleted"];
    assert_eq!(seen(&monitor, &file), [once, once].concat());
    // Without `resume`, the restore succeeds, and the VM is paused.
    restore(&mut control, &directory, false).unwrap();
    assert_eq!(state(&mut control), Some(VmState::Paused));
    control.delete();
}

/// Returns the events from the pause on.
fn told_since_pausing(monitor: &EventMonitor, file: &File) -> Vec<String> {
    seen(monitor, file).into_iter().skip_while(|event| event != "pausing").collect()
}

#[test]
fn delayed_reset_is_done_before_a_snapshot() {
    let directory = TempDir::new().unwrap();
    let (mut control, monitor, file) = watched(Options::default());
    control.create(config("")).unwrap();
    control.boot().unwrap();
    while control.reset_due().is_none() {
        guest(&mut control, GuestEvent::Reset);
    }
    assert!(matches!(save(&mut control, directory.path()), Err(ControlError::WrongState { .. })));
    assert!(control.reset_due().is_some(), "a running VM is not saved, so its reset stays pending");
    control.pause().unwrap();
    save(&mut control, directory.path()).unwrap();
    assert_eq!((state(&mut control), control.reset_due()), (Some(VmState::Paused), None));
    save(&mut control, directory.path()).unwrap();
    let once = ["snapshotting", "snapshotted"];
    let expected = [&["pausing", "paused", "rebooting", "rebooted"], &once[..], &once].concat();
    assert_eq!(told_since_pausing(&monitor, &file), expected);
    control.delete();
}

#[test]
fn failed_reset_before_a_snapshot_shuts_the_vm_down() {
    let directory = TempDir::new().unwrap();
    let (mut control, monitor, file) = watched(Options::default());
    control.create(config("fail-reset")).unwrap();
    control.boot().unwrap();
    let pace: &mut ResetPace = &mut control.created.as_mut().unwrap().booted.as_mut().unwrap().resets;
    let now = Instant::now();
    while pace.asked(now) {
        pace.done(now);
    }
    control.pause().unwrap();
    assert!(matches!(save(&mut control, directory.path()), Err(ControlError::Vm(VmError::Guest(_)))));
    assert_eq!((state(&mut control), ALIVE.get()), (Some(VmState::Created), 0));
    assert_eq!(told_since_pausing(&monitor, &file), ["pausing", "paused", "rebooting", "failed", "shutdown"]);
    control.delete();
}

/// Queues two client calls, which pause a VM and save it. The guest leaves `event` before the calls are served. Returns the answers,
/// and true if the VMM continues.
fn save_as_the_guest(control: &mut Control<Null>, event: GuestEvent) -> (Vec<Result<Reply, ControlError>>, bool) {
    let directory = TempDir::new().unwrap();
    control.create(config("")).unwrap();
    control.boot().unwrap();
    let (sender, answers) = mpsc::channel();
    for call in [Call::Pause, Call::Snapshot(VmSnapshotConfig { destination_url: url(directory.path()) })] {
        let sender = sender.clone();
        control.handle().call(call, Box::new(move |outcome| sender.send(outcome).unwrap()));
    }
    MAILBOX.with_borrow(|mailbox| mailbox.as_ref().unwrap().leave(event));
    let mut goes_on = true;
    while let (true, Ok(message)) = (goes_on, control.messages.try_recv()) {
        goes_on = control.serve(message).is_continue();
    }
    (answers.try_iter().collect(), goes_on)
}

#[test]
fn guest_events_from_before_a_pause_precede_the_snapshot() {
    let (mut control, monitor, file) = watched(Options::default());
    let (answers, goes_on) = save_as_the_guest(&mut control, GuestEvent::Reset);
    assert!(matches!(answers[..], [Ok(_), Ok(_)]) && goes_on, "{answers:?}");
    assert_eq!(state(&mut control), Some(VmState::Paused));
    let expected = ["pausing", "paused", "rebooting", "rebooted", "snapshotting", "snapshotted"];
    assert_eq!(told_since_pausing(&monitor, &file), expected);
    control.delete();

    let (answers, goes_on) = save_as_the_guest(&mut control, GuestEvent::PowerOff);
    assert!(matches!(answers[..], [Ok(_), Err(ControlError::Ending)]) && !goes_on, "{answers:?}");
    control.delete();
    control.options.no_shutdown = true;
    let (answers, goes_on) = save_as_the_guest(&mut control, GuestEvent::PowerOff);
    assert!(matches!(answers[..], [Ok(_), Err(ControlError::WrongState { .. })]) && goes_on, "{answers:?}");
    control.delete();
}
