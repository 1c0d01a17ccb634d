// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The life cycle against a model: every call in every state, and random histories, with a null guest.

use std::cell::{Cell, RefCell};
use std::sync::mpsc;
use std::thread;

use proptest::prelude::*;

use super::*;
use crate::config::{ConsoleConfig, ConsoleMode, CpusConfig, MemoryConfig, PayloadConfig, PlatformConfig};

thread_local! {
    /// How often a VM was told to change its windows.
    static TUNED: Cell<usize> = const { Cell::new(0) };
    /// VMs that exist now.
    static ALIVE: Cell<usize> = const { Cell::new(0) };
    /// Mailbox of the VM that was built last.
    static MAILBOX: RefCell<Option<Arc<Mailbox>>> = const { RefCell::new(None) };
}

/// A VM without a guest. One whose command line is `fail` cannot be built.
struct Null {
    vcpus_run: bool,
}

impl Machine for Null {
    fn build(config: &VmConfig, mailbox: Arc<Mailbox>) -> Result<Self, VmError> {
        if config.payload.cmdline == "fail" {
            return Err(VmError::Guest("cannot be built".into()));
        }
        assert_eq!(ALIVE.replace(1), 0, "two VMs at once");
        MAILBOX.set(Some(mailbox));
        Ok(Self { vcpus_run: false })
    }

    fn start(&mut self, run: bool) -> Result<(), VmError> {
        assert!(!self.vcpus_run);
        self.vcpus_run = run;
        Ok(())
    }

    fn pause(&mut self) -> Result<(), VmError> {
        self.vcpus_run = false;
        Ok(())
    }

    fn resume(&mut self) -> Result<(), VmError> {
        assert!(!self.vcpus_run);
        self.vcpus_run = true;
        Ok(())
    }

    fn reset(&mut self) -> Result<(), VmError> {
        assert!(!self.vcpus_run, "reset of a VM whose vCPUs run");
        Ok(())
    }

    fn press_power_button(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn raise_nmi(&self) -> Result<(), VmError> {
        assert!(!self.vcpus_run, "NMI while the vCPUs run");
        Ok(())
    }

    fn devices(&self) -> Vec<DeviceNode> {
        Vec::new()
    }

    fn iommu(&self) -> Option<IommuStatus> {
        Some(IommuStatus::default())
    }

    fn engine_report(&self) -> Option<Report> {
        None
    }

    fn tune_bounce(&self, _: &IommuBounceChange) -> Result<(), VmError> {
        TUNED.set(TUNED.get() + 1);
        Ok(())
    }

    fn report_counters(&self, _: &EventMonitor) {}
}

impl Drop for Null {
    fn drop(&mut self) {
        assert!(!self.vcpus_run, "dropped with its vCPUs running");
        ALIVE.set(0);
    }
}

fn config(cmdline: &str) -> VmConfig {
    VmConfig {
        payload: PayloadConfig { kernel: "kernel".into(), initramfs: None, cmdline: cmdline.into() },
        cpus: CpusConfig::default(),
        memory: MemoryConfig::with_size(64 << 20),
        platform: PlatformConfig::default(),
        devices: Vec::new(),
        serial: ConsoleConfig { mode: ConsoleMode::Null, file: None },
        iommu_bounce: None,
    }
}

/// What happens to a VM.
#[derive(Clone, Copy, Debug)]
enum Step {
    Create,
    CreateUnbootable,
    Boot,
    Pause,
    Resume,
    Reboot,
    PowerButton,
    Nmi,
    Grow,
    AddDevice,
    Shutdown,
    Delete,
    GuestPowersOff,
    GuestResets,
    GuestFails,
}

const STEPS: [Step; 15] = [
    Step::Create,
    Step::CreateUnbootable,
    Step::Boot,
    Step::Pause,
    Step::Resume,
    Step::Reboot,
    Step::PowerButton,
    Step::Nmi,
    Step::Grow,
    Step::AddDevice,
    Step::Shutdown,
    Step::Delete,
    Step::GuestPowersOff,
    Step::GuestResets,
    Step::GuestFails,
];

/// How a call may be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    NotCreated,
    AlreadyCreated,
    WrongState,
    Unbootable,
}

/// The life cycle in a few lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Model {
    state: Option<State>,
    bootable: bool,
}

impl Model {
    fn step(&mut self, step: Step) -> Result<(), Refusal> {
        use State::{Created, Paused, Running, Shutdown};
        let next = match (step, self.state) {
            (Step::Create | Step::CreateUnbootable, None) => {
                self.bootable = matches!(step, Step::Create);
                Some(Created)
            }
            (Step::Create | Step::CreateUnbootable, Some(_)) => return Err(Refusal::AlreadyCreated),
            (Step::Delete, _) => None,
            (Step::GuestPowersOff | Step::GuestFails, Some(Running | Paused)) => Some(Shutdown),
            (Step::GuestPowersOff | Step::GuestFails | Step::GuestResets, state) => state,
            (_, None) => return Err(Refusal::NotCreated),
            (Step::Boot, Some(Created | Shutdown)) if self.bootable => Some(Running),
            (Step::Boot, Some(Created | Shutdown)) => return Err(Refusal::Unbootable),
            (Step::PowerButton | Step::Nmi, state @ Some(Running | Paused)) => state,
            (Step::Grow | Step::AddDevice, state @ Some(Created | Shutdown)) => state,
            (Step::Pause, Some(Running)) => Some(Paused),
            (Step::Resume, Some(Paused)) => Some(Running),
            (Step::Reboot, Some(Running | Paused)) => Some(Running),
            (Step::Shutdown, Some(Running | Paused)) => Some(Shutdown),
            _ => return Err(Refusal::WrongState),
        };
        self.state = next;
        Ok(())
    }
}

fn refusal(error: &ControlError) -> Refusal {
    match error {
        ControlError::NotCreated => Refusal::NotCreated,
        ControlError::AlreadyCreated => Refusal::AlreadyCreated,
        ControlError::WrongState { .. } => Refusal::WrongState,
        ControlError::Vm(_) => Refusal::Unbootable,
        other => panic!("{other}"),
    }
}

/// A number that was not there before, of RAM in units of 2 MiB too.
fn next_number() -> u64 {
    thread_local! { static LAST: Cell<u64> = const { Cell::new(64) } }
    LAST.set(LAST.get() + 1);
    LAST.get()
}

fn guest(control: &mut Control<Null>, event: GuestEvent) {
    // Notes of a VM that has ended must do nothing either, so the mailbox is kept.
    if let Some(mailbox) = MAILBOX.with_borrow(Clone::clone) {
        mailbox.leave(event);
    }
    while let Ok(message) = control.messages.try_recv() {
        assert!(control.serve(message).is_continue());
    }
}

fn apply(control: &mut Control<Null>, step: Step) -> Result<(), Refusal> {
    let call = match step {
        Step::Create => Call::Create(Box::new(config(""))),
        Step::CreateUnbootable => Call::Create(Box::new(config("fail"))),
        Step::Boot => Call::Boot,
        Step::Pause => Call::Pause,
        Step::Resume => Call::Resume,
        Step::Reboot => Call::Reboot,
        Step::PowerButton => Call::PowerButton,
        Step::Nmi => Call::Nmi,
        Step::Grow => Call::Resize(VmResize { desired_ram: Some(next_number() << 21), ..VmResize::default() }),
        Step::AddDevice => {
            // One is removed again, as only so many fit.
            let id = format!("device{}", next_number());
            let device = DeviceConfig { path: format!("/{id}").into(), iommu: false, id: Some(id.clone()) };
            let added = control.serve_call(Call::AddDevice(device)).map(drop);
            return added
                .and_then(|()| control.serve_call(Call::RemoveDevice(id)).map(drop))
                .map_err(|error| refusal(&error));
        }
        Step::Shutdown => Call::Shutdown,
        Step::Delete => Call::Delete,
        Step::GuestPowersOff => {
            guest(control, GuestEvent::PowerOff);
            return Ok(());
        }
        Step::GuestResets => {
            guest(control, GuestEvent::Reset);
            return Ok(());
        }
        Step::GuestFails => {
            guest(control, GuestEvent::Failed("it broke".into()));
            return Ok(());
        }
    };
    control.serve_call(call).map(drop).map_err(|error| refusal(&error))
}

fn state(control: &mut Control<Null>) -> Option<VmState> {
    match control.serve_call(Call::Info) {
        Ok(Reply::Info(info)) => Some(info.state),
        Ok(other) => panic!("{other:?}"),
        Err(error) => {
            assert!(matches!(error, ControlError::NotCreated));
            None
        }
    }
}

fn reported(state: State) -> VmState {
    match state {
        State::Created | State::Shutdown => VmState::Created,
        State::Running => VmState::Running,
        State::Paused => VmState::Paused,
    }
}

fn follow(steps: &[Step]) {
    let mut control = Control::<Null>::new(EventMonitor::none(), Options { no_shutdown: true });
    let mut model = Model::default();
    for (at, step) in steps.iter().enumerate() {
        let history = &steps[..=at];
        assert_eq!(apply(&mut control, *step), model.step(*step), "{history:?}");
        assert_eq!(state(&mut control), model.state.map(reported), "{history:?}");
        let built = matches!(model.state, Some(State::Running | State::Paused));
        assert_eq!(ALIVE.get(), usize::from(built), "{history:?}");
    }
    control.delete();
    assert_eq!(ALIVE.get(), 0);
}

#[test]
fn every_step_in_every_state_is_as_the_model_says() {
    let ways: [&[Step]; 6] = [
        &[],
        &[Step::Create],
        &[Step::CreateUnbootable],
        &[Step::Create, Step::Boot],
        &[Step::Create, Step::Boot, Step::Pause],
        &[Step::Create, Step::Boot, Step::Shutdown],
    ];
    for way in ways {
        for first in STEPS {
            for second in STEPS {
                follow(&[way, &[first, second]].concat());
            }
        }
    }
}

proptest! {
    #[test]
    fn random_histories_are_as_the_model_says(steps in prop::collection::vec(prop::sample::select(&STEPS[..]), 0..60)) {
        follow(&steps);
    }
}

#[test]
fn end_of_the_guest_ends_the_vmm_unless_it_is_to_stay() {
    for (event, fails) in [(GuestEvent::PowerOff, false), (GuestEvent::Failed("why".into()), true)] {
        let mut control = Control::<Null>::new(EventMonitor::none(), Options::default());
        control.create(config("")).unwrap();
        control.boot().unwrap();
        MAILBOX.with_borrow(|mailbox| mailbox.as_ref().unwrap().leave(event));
        let result = control.run();
        assert_eq!(result.is_err(), fails, "{result:?}");
        assert_eq!(ALIVE.get(), 0);
    }
}

#[test]
fn configuration_that_breaks_a_rule_creates_nothing() {
    let mut control = Control::<Null>::new(EventMonitor::none(), Options::default());
    let broken = VmConfig { cpus: CpusConfig { boot_vcpus: 0, max_vcpus: 0 }, ..config("") };
    assert!(matches!(control.create(broken), Err(ControlError::Config(_))));
    assert_eq!(state(&mut control), None);
}

#[test]
fn windows_are_changed_for_the_running_vm_and_for_its_next_boot() {
    let mut control = Control::<Null>::new(EventMonitor::none(), Options::default());
    let change = |budget| Call::TuneBounce(IommuBounceChange { budget: Some(budget), threshold: None });
    assert!(matches!(control.serve_call(change(4 << 20)), Err(ControlError::NotCreated)));
    control.create(config("")).unwrap();
    assert!(matches!(control.serve_call(change(4 << 20)), Err(ControlError::NoSuchPart(_))));
    assert!(matches!(control.serve_call(Call::Bounce), Err(ControlError::NoSuchPart(_))));
    control.delete();

    let mut with_windows = config("");
    with_windows.devices.push(DeviceConfig { path: "/d".into(), iommu: true, id: None });
    with_windows.iommu_bounce = Some("size=8M,max=16M".parse().unwrap());
    control.create(with_windows).unwrap();
    let budget = |control: &mut Control<Null>| match control.serve_call(Call::Bounce) {
        Ok(Reply::Bounce(report)) => report.bounce.budget,
        other => panic!("{other:?}"),
    };
    control.serve_call(change(4 << 20)).unwrap();
    assert_eq!((budget(&mut control), TUNED.get()), (4 << 20, 0));
    control.boot().unwrap();
    control.serve_call(change(16 << 20)).unwrap();
    assert_eq!((budget(&mut control), TUNED.get()), (16 << 20, 1));
    assert!(matches!(control.serve_call(change(18 << 20)), Err(ControlError::Config(_))));
    assert_eq!((budget(&mut control), TUNED.get()), (16 << 20, 1));
    control.delete();
}

/// Sends a call from another thread and waits for its answer.
fn call(handle: &ControlHandle, call: Call) -> Result<Reply, ControlError> {
    let (sender, answer) = mpsc::channel();
    handle.call(call, Box::new(move |outcome| sender.send(outcome).expect("the caller waits")));
    answer.recv().expect("every call is answered")
}

#[test]
fn calls_in_parallel_are_each_answered_and_end_in_a_stated_state() {
    const CLIENTS: usize = 16;
    let control = Control::<Null>::new(EventMonitor::none(), Options { no_shutdown: true });
    let handle = control.handle();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let handle = handle.clone();
            thread::spawn(move || {
                let mut done = 0;
                for round in 0..200 {
                    let wanted = match (client + round) % 8 {
                        0 => Call::Create(Box::new(config(""))),
                        1 => Call::Boot,
                        2 => Call::Pause,
                        3 => Call::Resume,
                        4 => Call::Reboot,
                        5 => Call::Shutdown,
                        6 => Call::Delete,
                        _ => Call::Info,
                    };
                    match call(&handle, wanted) {
                        Ok(_) => done += 1,
                        Err(error) => drop(refusal(&error)),
                    }
                }
                done
            })
        })
        .collect();
    let end = thread::spawn(move || {
        let done: usize = clients.into_iter().map(|client| client.join().unwrap()).sum();
        // Deleting always succeeds.
        assert!(done >= CLIENTS * 200 / 8, "{done}");
        call(&handle, Call::ShutdownVmm).unwrap();
        // Whoever comes too late is told so.
        loop {
            match call(&handle, Call::Info) {
                Err(ControlError::Ending) => break,
                Err(ControlError::NotCreated) => thread::yield_now(),
                other => panic!("{other:?}"),
            }
        }
    });
    control.run().unwrap();
    end.join().unwrap();
}
