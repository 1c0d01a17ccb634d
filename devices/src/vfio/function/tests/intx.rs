// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of INTx: the times when INTx is enabled, the guest's view, and the result if the host cannot enable INTx.

use super::*;

const ENABLE: [Event; 2] = [Event::Enable(IrqKind::Intx, 1), Event::Unmask];
const DISABLE: Event = Event::Disable(IrqKind::Intx);

/// Adds INTx to a function. The function's own interrupt pin is INTC#.
fn with_intx(host: FakeFunction) -> FakeFunction {
    host.set(regs::INTERRUPT_PIN, &[3]);
    host.offer(IrqKind::Intx);
    host
}

/// Creates a function that has no other interrupt than INTx.
fn only_intx() -> FakeFunction {
    with_intx(FakeFunction::new(256, &[(0, 0, 0x1000)], (0, 0)))
}

fn pin_and_line(m: &Machine) -> [u8; 2] {
    [read::<1>(&m.device, regs::INTERRUPT_PIN)[0], read::<1>(&m.device, regs::INTERRUPT_LINE)[0]]
}

#[test]
fn guest_sees_the_first_pin_and_its_own_line() {
    let m = machine(&only_intx());

    assert_eq!(pin_and_line(&m), [1, FakeLine::NUMBER]);
    m.device.write_config(regs::INTERRUPT_LINE, &[11, 4]);
    assert_eq!((pin_and_line(&m), m.host.events()), ([1, 11], vec![]));
    m.device.reset().unwrap();
    assert_eq!(pin_and_line(&m), [1, FakeLine::NUMBER]);
}

#[test]
fn intx_is_enabled_from_power_on_until_drop() {
    let host = only_intx();
    let line = Arc::new(FakeLine::default());

    let device = assemble(&host, Some(line.clone())).unwrap();

    assert!(host.events().ends_with(&ENABLE), "after the reset");
    assert_eq!(line.connected(), 1);
    drop(device);
    assert_eq!(line.connected(), 0);
}

#[test]
fn command_register_masks_intx_in_the_host() {
    let m = machine(&only_intx());

    m.device.write_config(regs::COMMAND, &[6, 4]);

    assert_eq!(m.host.events(), [Event::Config(regs::COMMAND, vec![6, 4])]);
    assert_eq!((read(&m.device, regs::COMMAND), m.line.connected()), ([6, 4], 1));
    let asks = 1 << 3;
    m.host.set(regs::STATUS, &[asks, 0]);
    assert_eq!(read::<1>(&m.device, regs::STATUS)[0] & asks, asks, "the device reports that it asserts INTx");
}

#[test]
fn msi_or_msix_replaces_intx_which_returns_after_disable() {
    for (host, control, kind, vectors) in [(with_msi(), 0x52, IrqKind::Msi, 1), (nvme(), 0x42, IrqKind::Msix, 1)] {
        let m = machine(&with_intx(host));
        let on = if kind == IrqKind::Msi { [1, 0] } else { [0, 0x80] };

        m.device.write_config(control, &on);
        assert_eq!(m.host.events(), [DISABLE, Event::Enable(kind, vectors)]);
        assert_eq!(m.line.connected(), 0);

        m.device.write_config(control, &[0, 0]);
        assert_eq!(m.host.events(), [&[Event::Disable(kind)][..], &ENABLE].concat());
        assert_eq!(m.line.connected(), 1);

        // A write that enables neither MSI nor MSI-X changes nothing.
        m.device.write_config(control, &[0, 0]);
        assert_eq!(m.host.events(), []);
    }
}

#[test]
fn interrupt_kind_switches_even_if_host_disable_fails() {
    let m = machine(&with_intx(nvme()));
    m.device.write_config(0x42, &[0, 0x80]);
    m.host.events();
    m.host.0.is_gone.store(true, Ordering::Relaxed);
    m.device.write_config(0x42, &[0, 0]);
    assert_eq!(m.host.events(), [&[Event::Disable(IrqKind::Msix)][..], &ENABLE].concat());
    m.device.write_config(0x42, &[0, 0x80]);
    assert_eq!(m.host.events(), [DISABLE, Event::Enable(IrqKind::Msix, 1)]);
}

#[test]
fn intx_is_disabled_during_a_device_reset() {
    let m = machine(&only_intx());

    m.device.reset().unwrap();

    let quiet = Event::Config(regs::COMMAND, DECODE.to_vec());
    let around = [quiet.clone(), DISABLE, Event::Reset, quiet];
    assert_eq!(m.host.events(), [&around[..], &ENABLE].concat());
    assert_eq!(m.line.connected(), 1);
}

#[test]
fn device_taken_back_by_the_host_has_no_intx() {
    let host = only_intx();
    host.offer(IrqKind::Request);
    let m = machine(&host);
    let (sender, notices) = mpsc::channel();
    m.device.watch(Arc::new(Listener(sender))).unwrap();
    host.0.held.store(true, Ordering::Relaxed);
    assert!(host.signal(IrqKind::Request));
    notices.recv_timeout(Duration::from_secs(60)).unwrap();

    m.device.reset().unwrap();

    assert_eq!(m.line.connected(), 0);
}

#[test]
fn intx_only_device_is_refused_when_host_cannot_forward_it() {
    let host = only_intx();
    let line = || Some(Arc::new(FakeLine::default()));
    let error = assemble(&host, None).err().unwrap();
    assert!(
        error.to_string().contains("has only INTx") && error.to_string().contains("KVM_CAP_IRQFD_RESAMPLE"),
        "{error}"
    );

    host.0.refused.lock().unwrap().push(IrqKind::Intx);
    let error = assemble(&host, line()).err().unwrap();
    assert!(matches!(error, VfioPciError::OnlyIntx { .. }) && error.is_user_error(), "{error}");

    let host = only_intx();
    host.0.keeps_intx_masked.store(true, Ordering::Relaxed);
    let line = line();
    let error = assemble(&host, line.clone()).err().unwrap();
    assert!(matches!(error, VfioPciError::OnlyIntx { .. }), "{error}");
    assert_eq!((host.events().last(), line.unwrap().connected()), (Some(&DISABLE), 0));
}

#[test]
fn device_with_msi_works_without_intx() {
    let host = with_intx(with_msi());
    host.0.refused.lock().unwrap().push(IrqKind::Intx);
    let m = machine(&host);

    assert_eq!((pin_and_line(&m)[0], m.line.connected()), (0, 0));
    m.device.write_config(0x52, &[1, 0]);
    m.device.write_config(0x52, &[0, 0]);
    m.device.reset().unwrap();
    let of_interrupts: Vec<Event> =
        host.events().into_iter().filter(|event| !matches!(event, Event::Config(..) | Event::Reset)).collect();
    assert_eq!(of_interrupts, [Event::Enable(IrqKind::Msi, 1), Event::Disable(IrqKind::Msi)]);
    assert_eq!((pin_and_line(&m)[0], m.line.connected()), (0, 0));

    // A device with MSI works even if the VM has no interrupt line for INTx.
    let device = assemble(&with_intx(with_msi()), None).unwrap();
    assert_eq!(read(&device, regs::INTERRUPT_PIN), [0]);
}

#[test]
fn interrupt_pin_is_hidden_if_the_host_has_no_intx() {
    let host = FakeFunction::new(256, &[(0, 0, 0x1000)], (0, 0));
    host.set(regs::INTERRUPT_PIN, &[1]);
    let m = machine(&host);

    assert_eq!((pin_and_line(&m), m.line.connected()), ([0, 0], 0));
}
