// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests that compare the control thread with a model of the VM's life cycle: every call in every state, and random sequences of
//! calls.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{Read, Seek};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use carom_api::DeviceConfig;
use carom_api::config::{MemoryConfig, PayloadConfig};
use carom_api::types::{PciDeviceInfo, VmResize};
use proptest::prelude::*;

use super::*;
use crate::process::time_slice;
use crate::vm_state::{StateSink, StateSource};

mod hotplug;
mod notices;
mod parallel;
mod resize;
mod snapshot;

thread_local! {
    /// Number of calls so far that changed the bounce windows of a VM.
    static TUNED: Cell<usize> = const { Cell::new(0) };
    /// Number of VMs that exist now.
    static ALIVE: Cell<usize> = const { Cell::new(0) };
    /// Methods of VMs that were called, each with the time slice of the calling thread.
    static SLICES: RefCell<Vec<(&'static str, u64)>> = const { RefCell::new(Vec::new()) };
    /// Mailbox of the VM that was built last.
    static MAILBOX: RefCell<Option<Arc<Mailbox>>> = const { RefCell::new(None) };
}

/// VM without a guest. With the kernel command line `fail`, this VM cannot be built. With `fail-STEP`, such as `fail-pause`, that
/// step returns an error. Only `pause` and `resume` still have their effect. A device with the path `/fail` cannot be opened.
struct Null {
    fails: String,
    vcpus_run: bool,
    /// ID of each device, and true if the guest was asked to release this device.
    devices: Vec<(String, bool)>,
    added_ram: u64,
    /// Number of present vCPUs, and number of wanted vCPUs.
    vcpus: (u32, u32),
}

impl Machine for Null {
    fn build(config: &VmConfig, mailbox: Arc<Mailbox>, _: &EventMonitor) -> Result<Self, VmError> {
        if config.payload.cmdline == "fail" {
            return Err(VmError::Guest("cannot be built".into()));
        }
        assert_eq!(ALIVE.replace(1), 0, "two VMs at once");
        note_slice("build");
        MAILBOX.set(Some(mailbox));
        let fails = config.payload.cmdline.clone();
        let names = config.parts().filter_map(|part| part.id());
        let devices = names.map(|id| (id.to_string(), false)).collect();
        let vcpus = (config.cpus.boot_vcpus, config.cpus.boot_vcpus);
        Ok(Self { fails, vcpus_run: false, devices, added_ram: 0, vcpus })
    }

    fn restore(source: &dyn StateSource, _: bool, mailbox: Arc<Mailbox>, _: &EventMonitor) -> Result<Self, VmError> {
        Self::build(source.config(), mailbox, &EventMonitor::none())
    }

    fn save(&mut self, _: &VmConfig, _: &mut dyn StateSink) -> Result<(), VmError> {
        assert!(!self.vcpus_run, "saved while the vCPUs run");
        self.outcome("save")
    }

    fn start(&mut self, run: bool) -> Result<(), VmError> {
        assert!(!self.vcpus_run);
        self.outcome("start")?;
        self.vcpus_run = run;
        Ok(())
    }

    fn pause(&mut self) -> Result<(), VmError> {
        self.vcpus_run = false;
        self.outcome("pause")
    }

    fn resume(&mut self) -> Result<(), VmError> {
        assert!(!self.vcpus_run);
        self.vcpus_run = true;
        self.outcome("resume")
    }

    fn press_power_button(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn reset(&mut self) -> Result<(), VmError> {
        assert!(!self.vcpus_run, "reset of a VM whose vCPUs run");
        self.outcome("reset")
    }

    fn add_ram(&mut self, _: &MemoryConfig, len: u64) -> Result<(), VmError> {
        if self.fails == "fail-ram" {
            return Err(VmError::MoreRam("none is left".into()));
        }
        self.added_ram += len;
        Ok(())
    }

    fn resize_device(&self, id: &str, bytes: u64) -> Result<(), VmError> {
        assert!(self.devices.iter().any(|(other, _)| other == id), "there is no {id}");
        let rule = ConfigError::new(carom_api::types::VmResizeDisk::DESIRED_SIZE, "none is left");
        if (id, bytes) == ("disk", 0) { Err(rule.into()) } else { Ok(()) }
    }

    fn added_ram(&self) -> u64 {
        self.added_ram
    }

    /// Surplus vCPUs count as released at the next `GuestEvent::Left`.
    fn set_vcpus(&mut self, count: u32, run: bool) -> Result<(), VmError> {
        assert_eq!(run, self.vcpus_run);
        self.outcome("vcpus")?;
        self.vcpus = (self.vcpus.0.max(count), count);
        Ok(())
    }

    fn leaving_vcpu(&self, count: u32) -> Option<u32> {
        let (has, wanted) = self.vcpus;
        (wanted < has && count > wanted).then_some(wanted)
    }

    fn close_vcpus(&mut self) {
        self.vcpus.0 = self.vcpus.1;
    }

    fn raise_nmi(&self) -> Result<(), VmError> {
        assert!(!self.vcpus_run, "NMI while the vCPUs run");
        Ok(())
    }

    fn devices(&self) -> Vec<DeviceNode> {
        let node = |(id, _): &(String, bool)| DeviceNode {
            id: id.clone(),
            resources: Vec::new(),
            children: Vec::new(),
            pci_bdf: "0000:00:02.0".into(),
        };
        self.devices.iter().map(node).collect()
    }

    fn add_device(&mut self, device: &PartConfig) -> Result<PciDeviceInfo, VmError> {
        note_slice("add_device");
        if device.source() == Some("/fail".as_ref()) {
            return Err(VmError::Guest("cannot be opened".into()));
        }
        let id = device.id().unwrap().to_string();
        assert!(self.devices.iter().all(|(other, _)| *other != id), "two devices of one name");
        self.devices.push((id.clone(), false));
        Ok(PciDeviceInfo { id, bdf: "0000:00:02.0".into() })
    }

    fn remove_device(&mut self, id: &str) -> bool {
        let device = self.devices.iter_mut().find(|(other, _)| other == id);
        device.map(|(_, to_go)| *to_go = true).is_some()
    }

    /// Each device that the guest was asked to release counts as released.
    fn close_devices(&mut self) -> Vec<PciDeviceInfo> {
        let (gone, kept) = mem::take(&mut self.devices).into_iter().partition(|(_, to_go)| *to_go);
        self.devices = kept;
        let gone: Vec<(String, bool)> = gone;
        gone.into_iter().map(|(id, _)| PciDeviceInfo { id, bdf: "0000:00:02.0".into() }).collect()
    }

    fn iommu(&self) -> Option<IommuStatus> {
        note_slice("iommu");
        Some(IommuStatus::default())
    }

    fn iommu_soon(&self) -> Option<Option<IommuStatus>> {
        (!self.is_busy()).then(|| Some(IommuStatus::default()))
    }

    fn tune_bounce(&self, _: &IommuBounceChange) -> Result<(), VmError> {
        TUNED.set(TUNED.get() + 1);
        Ok(())
    }
}

impl Null {
    /// True if the IOMMU is too busy to answer a thread that cannot wait.
    fn is_busy(&self) -> bool {
        self.fails == "busy"
    }

    fn outcome(&self, step: &str) -> Result<(), VmError> {
        if self.fails == format!("fail-{step}") {
            return Err(VmError::Guest(format!("cannot {step}")));
        }
        Ok(())
    }
}

impl Drop for Null {
    fn drop(&mut self) {
        assert!(!self.vcpus_run, "dropped with its vCPUs running");
        ALIVE.set(0);
    }
}

fn note_slice(asked: &'static str) {
    SLICES.with_borrow_mut(|slices| slices.push((asked, time_slice::of_this_thread())));
}

/// Creates a control thread's state with an event monitor, and the file that receives the events.
fn watched(options: Options) -> (Control<Null>, EventMonitor, File) {
    let file = tempfile::tempfile().unwrap();
    let monitor = EventMonitor::new(file.try_clone().unwrap()).unwrap();
    (Control::new(monitor.clone(), options), monitor, file)
}

fn config(cmdline: &str) -> CheckedConfig {
    unchecked(cmdline).check().unwrap()
}

fn unchecked(cmdline: &str) -> VmConfig {
    VmConfig {
        payload: PayloadConfig { cmdline: cmdline.into(), ..PayloadConfig::of_kernel("kernel") },
        memory: MemoryConfig::with_size(64 << 20),
        ..VmConfig::default()
    }
}

#[test]
fn vm_that_cannot_go_on_is_shut_down_and_an_event_says_why() {
    // Each case has the step that fails, the calls after the boot, and the events before the failure.
    let cases: [(&str, &[Step], &[&str]); 7] = [
        ("", &[], &["booting"]),
        ("-start", &[], &["booting"]),
        ("-pause", &[Step::Pause], &["booting", "booted", "pausing"]),
        ("-pause", &[Step::Nmi], &["booting", "booted"]),
        ("-resume", &[Step::Pause, Step::Resume], &["booting", "booted", "pausing", "paused", "resuming"]),
        ("-resume", &[Step::Nmi], &["booting", "booted"]),
        ("-reset", &[Step::Reboot], &["booting", "booted", "rebooting"]),
    ];
    for (step, calls, before) in cases {
        let (mut control, monitor, file) = watched(Options::default());
        control.create(config(&format!("fail{step}"))).unwrap();
        let mut outcomes: Vec<_> =
            [&[Step::Boot][..], calls].concat().iter().map(|call| apply(&mut control, *call)).collect();
        assert_eq!(outcomes.pop(), Some(Err(Refusal::Unbootable)), "{step}");
        assert!(outcomes.iter().all(Result::is_ok), "{step}: {outcomes:?}");
        assert_eq!(state(&mut control), Some(VmState::Created), "{step}");
        let mut expected: Vec<&str> = [before, &["failed"]].concat();
        if !calls.is_empty() {
            expected.push("shutdown");
        }
        let seen: Vec<_> = events(&monitor, &file).into_iter().map(|(name, _)| name).collect();
        assert_eq!(seen, expected, "{step}");
        // Nothing is left of the failed VM: the next VM boots.
        control.delete();
        control.create(config("")).unwrap();
        control.boot().unwrap();
        control.delete();
    }
}

/// Returns the events of a monitor so far, with their properties.
fn events(monitor: &EventMonitor, mut file: &File) -> Vec<(String, serde_json::Value)> {
    monitor.flush(Duration::from_secs(60));
    let mut text = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.map(|mut line| (line["event"].as_str().unwrap().to_string(), line["properties"].take())).collect()
}

/// Step of a VM's life.
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

/// Reason why a call is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    Rule,
    NotCreated,
    AlreadyCreated,
    WrongState,
    Unbootable,
}

/// Model of a VM's life cycle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
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
            (Step::Grow, state @ Some(Created | Shutdown)) => state,
            // `hotplug_size` is 0, so no RAM can be added to a booted VM.
            (Step::Grow, Some(Running | Paused)) => return Err(Refusal::Rule),
            (Step::AddDevice, state) => state,
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
        ControlError::Config(_) => Refusal::Rule,
        ControlError::Vm(_) => Refusal::Unbootable,
        other => panic!("{other}"),
    }
}

/// Returns a number that was not used before. It is also usable as a size of RAM in units of 2 MiB.
fn next_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(64);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

fn guest(control: &mut Control<Null>, event: GuestEvent) {
    // The mailbox of an ended VM is kept, so that tests can leave notes in it. Such notes must have no effect.
    if let Some(mailbox) = MAILBOX.with_borrow(Clone::clone) {
        mailbox.leave(event);
    }
    while let Ok(message) = control.messages.try_recv() {
        assert!(control.serve(message).is_continue());
    }
}

/// Returns the call that does `step`, or `None` if `step` is not a single call.
fn call_of(step: Step) -> Option<Call> {
    Some(match step {
        Step::Create => Call::Create(Box::new(config(""))),
        Step::CreateUnbootable => Call::Create(Box::new(config("fail"))),
        Step::Boot => Call::Boot,
        Step::Pause => Call::Pause,
        Step::Resume => Call::Resume,
        Step::Reboot => Call::Reboot,
        Step::PowerButton => Call::PowerButton,
        Step::Nmi => Call::Nmi,
        Step::Grow => Call::Resize(VmResize { desired_ram: Some(next_number() << 21), ..VmResize::default() }),
        Step::Shutdown => Call::Shutdown,
        Step::Delete => Call::Delete,
        Step::AddDevice | Step::GuestPowersOff | Step::GuestResets | Step::GuestFails => return None,
    })
}

fn apply(control: &mut Control<Null>, step: Step) -> Result<(), Refusal> {
    if let Some(call) = call_of(step) {
        return control.serve_call(call).map(drop).map_err(|error| refusal(&error));
    }
    match step {
        Step::AddDevice => {
            // The device is removed again, because the number of slots is limited.
            let id = format!("device{}", next_number());
            let device = DeviceConfig {
                path: format!("/{id}").into(),
                iommu: false,
                pci_segment: 0,
                pci_device_id: None,
                id: Some(id.clone()),
            };
            let added = control.serve_call(Call::AddDevice(PartConfig::Vfio(device))).map(drop);
            let removed = added.and_then(|()| control.serve_call(Call::RemoveDevice(id)).map(drop));
            guest(control, GuestEvent::Left);
            return removed.map_err(|error| refusal(&error));
        }
        Step::GuestPowersOff => guest(control, GuestEvent::PowerOff),
        Step::GuestResets => guest(control, GuestEvent::Reset),
        Step::GuestFails => guest(control, GuestEvent::Failed("it broke".into())),
        step => unreachable!("{step:?} is a call"),
    }
    Ok(())
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
    let mut control = Control::<Null>::new(EventMonitor::none(), Options { no_shutdown: true, ..Options::default() });
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
fn end_of_the_guest_ends_the_vmm_by_default() {
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

fn device(path: &str, id: Option<&str>) -> DeviceConfig {
    DeviceConfig { path: path.into(), iommu: false, pci_segment: 0, pci_device_id: None, id: id.map(Into::into) }
}

fn add(control: &mut Control<Null>, path: &str, id: Option<&str>) -> Result<Option<String>, String> {
    match control.serve_call(Call::AddDevice(PartConfig::Vfio(device(path, id)))) {
        Ok(Reply::Done) => Ok(None),
        Ok(Reply::Added(info)) => Ok(Some(info.id)),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns two lists of device IDs: the devices in the configuration, and the devices in the VM.
fn names(control: &mut Control<Null>) -> (Vec<String>, Vec<String>) {
    match control.serve_call(Call::Info) {
        Ok(Reply::Info(info)) => {
            let configured = info.config.devices.iter().map(|device| device.id.clone().unwrap());
            (configured.collect(), info.device_tree.into_keys().collect())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn windows_are_changed_for_the_running_vm_and_for_its_next_boot() {
    let mut control = Control::<Null>::new(EventMonitor::none(), Options::default());
    let change = |budget| Call::TuneBounce(IommuBounceChange { budget: Some(budget), ..Default::default() });
    assert!(matches!(control.serve_call(change(4 << 20)), Err(ControlError::NotCreated)));
    control.create(config("")).unwrap();
    assert!(matches!(control.serve_call(change(4 << 20)), Err(ControlError::NoSuchPart(_))));
    assert!(matches!(control.serve_call(Call::Bounce), Err(ControlError::NoSuchPart(_))));
    control.delete();

    let mut with_windows = unchecked("");
    with_windows.devices.push(DeviceConfig {
        path: "/d".into(),
        iommu: true,
        pci_segment: 0,
        pci_device_id: None,
        id: None,
    });
    with_windows.iommu_bounce = Some("size=8M,max=16M".parse().unwrap());
    control.create(with_windows.check().unwrap()).unwrap();
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
fn queries_run_in_short_slices_and_vm_building_in_ordinary() {
    time_slice::in_ordinary_thread(|| {
        let own = time_slice::of_this_thread();
        let control = Control::<Null>::new(EventMonitor::none(), Options { no_shutdown: true, ..Options::default() });
        let handle = control.handle();
        let client = thread::spawn(move || {
            let create = Call::Create(Box::new(config("")));
            let add = Call::AddDevice(PartConfig::Vfio(device("/d", None)));
            for wanted in [create, Call::Info, Call::Boot, Call::Info, add, Call::Info, Call::ShutdownVmm] {
                let _ = call(&handle, wanted);
            }
        });
        control.run().unwrap();
        client.join().unwrap();

        let slices = SLICES.take();
        let asked: Vec<_> = slices.iter().map(|(asked, _)| *asked).collect();
        assert_eq!(asked, ["build", "iommu", "add_device", "iommu"]);
        assert_eq!((slices[0].1, slices[2].1), (own, own), "{slices:?}");
        assert!(time_slice::is_short(slices[1].1) && time_slice::is_short(slices[3].1), "{slices:?}");
    });
}
