// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the host's notices about devices, and of their effect on the VM.

use devices::platform::{HostListener, HostNotice};

use super::*;

/// Delivers several notices of the host about devices at the same time.
fn tell(control: &mut Control<Null>, notices: &[(&str, HostNotice)]) -> ControlFlow<Result<(), VmError>> {
    let mailbox = MAILBOX.with_borrow(Clone::clone).unwrap();
    notices.iter().for_each(|(id, notice)| mailbox.notify(id, "0000:03:00.0", *notice));
    while let Ok(message) = control.messages.try_recv() {
        control.serve(message)?;
    }
    ControlFlow::Continue(())
}

/// Returns the events so far whose names are in `wanted`, with their properties.
fn some_events(monitor: &EventMonitor, file: &File, wanted: &[&str]) -> Vec<(String, serde_json::Value)> {
    events(monitor, file).into_iter().filter(|(name, _)| wanted.contains(&name.as_str())).collect()
}

fn figures(control: &mut Control<Null>) -> (u64, u64) {
    match control.serve_call(Call::Figures) {
        Ok(Reply::Figures(figures)) => (figures.device_errors, figures.device_requests),
        other => panic!("{other:?}"),
    }
}

fn names_of(event: &str, id: &str) -> (String, serde_json::Value) {
    (event.into(), serde_json::json!({"id": id, "bdf": "0000:00:02.0", "host": "0000:03:00.0"}))
}

#[test]
fn device_is_removed_once_for_repeated_host_requests() {
    let (mut control, monitor, file) = watched(Options { no_shutdown: true, ..Options::default() });
    control.create(config("")).unwrap();
    add(&mut control, "/a", Some("a")).unwrap();
    add(&mut control, "/b", Some("b")).unwrap();
    control.boot().unwrap();
    for _ in 0..3 {
        assert!(tell(&mut control, &[("a", HostNotice::Requested), ("nobody", HostNotice::Requested)]).is_continue());
        assert_eq!(names(&mut control), (vec!["b".into()], vec!["a".into(), "b".into()]));
    }
    assert_eq!((state(&mut control), figures(&mut control)), (Some(VmState::Running), (0, 1)));
    guest(&mut control, GuestEvent::Left);
    assert_eq!(names(&mut control), (vec!["b".into()], vec!["b".into()]));
    assert!(tell(&mut control, &[("a", HostNotice::Requested)]).is_continue());

    // The device is added again under the same ID, and the host asks for it again. This time a client removes the device first, and a reset
    // completes the removal.
    add(&mut control, "/a", Some("a")).unwrap();
    control.serve_call(Call::RemoveDevice("a".into())).unwrap();
    MAILBOX.with_borrow(|mailbox| mailbox.as_ref().unwrap().leave(GuestEvent::Reset));
    assert!(tell(&mut control, &[("a", HostNotice::Requested)]).is_continue());
    assert_eq!(names(&mut control), (vec!["b".into()], vec!["b".into()]));
    assert_eq!((state(&mut control), figures(&mut control)), (Some(VmState::Running), (0, 2)));
    let seen = some_events(&monitor, &file, &["device-requested", "device-removed"]);
    let gone = ("device-removed".to_string(), serde_json::json!({"id": "a", "bdf": "0000:00:02.0"}));
    assert_eq!(seen, [names_of("device-requested", "a"), gone.clone(), names_of("device-requested", "a"), gone]);
    control.delete();
    assert!(tell(&mut control, &[("b", HostNotice::Requested), ("b", HostNotice::Failed)]).is_continue());
    assert_eq!((state(&mut control), figures(&mut control)), (None, (0, 2)));
}

#[test]
fn error_of_a_device_pauses_the_vm_until_a_client_decides() {
    let (mut control, monitor, file) = watched(Options { has_api: true, ..Options::default() });
    control.create(config("")).unwrap();
    add(&mut control, "/a", Some("a")).unwrap();
    control.boot().unwrap();
    let fail = |control: &mut Control<Null>| {
        assert!(tell(control, &[("a", HostNotice::Failed)]).is_continue());
        assert_eq!(state(control), Some(VmState::Paused));
    };
    assert!(tell(&mut control, &[("nobody", HostNotice::Failed)]).is_continue());
    assert_eq!(state(&mut control), Some(VmState::Running));
    for (call, then) in [
        (Call::Resume, VmState::Running),
        (Call::Reboot, VmState::Running),
        (Call::Shutdown, VmState::Created),
        (Call::Boot, VmState::Running),
    ] {
        if !matches!(call, Call::Boot) {
            fail(&mut control);
            fail(&mut control);
        }
        control.serve_call(call).unwrap();
        assert_eq!(state(&mut control), Some(then));
    }
    // If the guest asks for a reset while its device fails, the guest is reset and stays paused.
    MAILBOX.with_borrow(|mailbox| mailbox.as_ref().unwrap().leave(GuestEvent::Reset));
    fail(&mut control);
    assert_eq!(figures(&mut control), (7, 0));
    let seen = some_events(&monitor, &file, &["device-error", "paused"]);
    let (errors, pauses): (Vec<_>, Vec<_>) = seen.into_iter().partition(|(name, _)| name == "device-error");
    assert_eq!((errors, pauses.len()), (vec![names_of("device-error", "a"); 7], 4));
    control.delete();
}

#[test]
fn device_error_ends_a_guest_if_no_client_can_resume_it() {
    for no_shutdown in [false, true] {
        let (mut control, monitor, file) = watched(Options { no_shutdown, ..Options::default() });
        control.create(config("")).unwrap();
        add(&mut control, "/a", Some("a")).unwrap();
        control.boot().unwrap();
        // After the error of the device, this event of the guest has no effect.
        MAILBOX.with_borrow(|mailbox| mailbox.as_ref().unwrap().leave(GuestEvent::Failed("it broke".into())));
        let end = tell(&mut control, &[("a", HostNotice::Failed), ("a", HostNotice::Requested)]);
        match end {
            ControlFlow::Break(Err(VmError::Guest(reason))) if !no_shutdown => {
                assert!(reason.contains("device 'a' at 0000:03:00.0") && reason.contains("--api-socket"), "{reason}");
                assert_eq!(state(&mut control), Some(VmState::Running), "the VM runs until the program ends");
            }
            ControlFlow::Continue(()) if no_shutdown => assert_eq!(state(&mut control), Some(VmState::Created)),
            other => panic!("{other:?}"),
        }
        let seen = some_events(&monitor, &file, &["device-requested", "device-error", "failed"]);
        let order: Vec<_> = seen.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(order, ["device-requested", "device-error", "failed"]);
        control.delete();
    }
}
