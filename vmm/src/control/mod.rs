// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The control thread, which owns the VM. Only this thread creates, boots, pauses, resets and deletes the VM.
//!
//! Other threads send messages ([`ControlHandle`]). The control thread serves one message at a time, so changes of the VM never overlap. It
//! answers a call after the call is complete. While it waits for messages, other threads can read the VM's state (`vm.info`).

mod bounce;
mod channel;
mod counters;
mod error;
pub(crate) mod figures;
mod hotplug;
mod lost_memory;
mod notices;
mod reply;
mod reset_pace;
mod resize;
mod signals;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use std::{fmt, mem};

use carom_api::types::{DeviceNode, IommuBounceChange, IommuBounceReport, VmCounters, VmInfo, VmState};
use carom_api::{
    Call, CheckedConfig, ConfigError, IommuBounceConfig, PartConfig, RestoreConfig, VmConfig, VmDefaults,
    VmSnapshotConfig,
};
use devices::peer_timeouts::Operation;
use devices::virtio::iommu::IommuStatus;

use crate::error::VmError;
use crate::limits::{file_bounds::FileBounds, file_limits};
use crate::machine::{Machine, PartCounters};
use crate::mailbox::{GuestEvent, Mailbox};
use crate::process::{event_monitor::EventMonitor, log_stream, time_slice::ShortSlice};
use crate::snapshot::{NewSnapshot, Snapshot};
use crate::vm::Vm;

pub use channel::{Answer, ControlHandle};
pub use error::ControlError;
pub use reply::{Figures, Reply};

use channel::{Message, Readable};
use reset_pace::ResetPace;

/// State of a created VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Configured, but not built yet.
    Created,
    /// The guest runs.
    Running,
    /// The vCPUs are stopped. Devices stay open, and their DMA continues.
    Paused,
    /// The guest has ended or was shut down. Only the configuration is left.
    Shutdown,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Created => "created, but not booted",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Shutdown => "shut down",
        })
    }
}

/// Options of the control thread.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Defaults for VMs that clients create.
    pub defaults: VmDefaults,
    /// True if the VMM keeps running after the guest has ended.
    pub no_shutdown: bool,
    /// True if the API is served, so that a client can resume or end a paused VM.
    pub has_api: bool,
    /// Files that the program removes when it ends.
    pub removed: Vec<PathBuf>,
    /// Files that a VM's configuration may name.
    pub bounds: FileBounds,
}

/// Created VM.
struct Created<M> {
    config: CheckedConfig,
    state: State,
    /// True once a boot or a restore has applied the file restrictions that the configuration enables.
    limited: bool,
    /// Present while the state is `Running` or `Paused`.
    booted: Option<Booted<M>>,
    /// Reason why the last guest failed.
    failure: Option<String>,
}

impl<M: Machine> Created<M> {
    /// Returns the VM's information, with the `status` of its virtio-iommu.
    fn info(&self, status: Option<IommuStatus>) -> Box<VmInfo> {
        let devices = self.booted.iter().flat_map(|booted| booted.vm.devices());
        let held = self.booted.as_ref().map_or(0, |booted| booted.vm.held_ram());
        let mut config = VmConfig::clone(&self.config);
        let vm = self.booted.as_ref().map(|booted| &booted.vm);
        config.serial.file = vm.and_then(M::serial_pty).map(PathBuf::from).or(config.serial.file);
        if let (Some(pty), Some(console)) = (vm.and_then(M::console_pty), &mut config.console) {
            console.file = Some(pty.to_path_buf());
        }
        Box::new(VmInfo {
            iommu_bounce: self.config.iommu_bounce.as_ref().map(|config| bounce::status(config, status.as_ref())),
            config,
            state: match self.state {
                // As in Cloud Hypervisor, a VM whose guest has ended is reported as created.
                State::Created | State::Shutdown => VmState::Created,
                State::Running => VmState::Running,
                State::Paused => VmState::Paused,
            },
            memory_actual_size: self.config.memory.total().saturating_sub(held),
            device_tree: devices.map(|device| (device.id.clone(), device)).collect(),
            failure: self.failure.clone(),
        })
    }
}

struct Booted<M> {
    vm: M,
    mailbox: Arc<Mailbox>,
    /// Devices that the guest was asked to release and still has. They are no longer in the configuration.
    leaving: Vec<PartConfig>,
    /// IDs of the devices that the host asks Carom to release.
    requested: BTreeSet<String>,
    /// Limit on the rate of resets that the guest asks for.
    resets: ResetPace,
}

/// State of the control thread.
pub struct Control<M: Machine = Vm> {
    created: Option<Created<M>>,
    monitor: EventMonitor,
    options: Options,
    handle: ControlHandle,
    messages: Receiver<Message>,
    device_errors: u64,
    device_requests: u64,
}

impl<M: Machine> Control<M> {
    /// Creates a control thread without a VM. Events are written to `monitor`.
    pub fn new(monitor: EventMonitor, options: Options) -> Self {
        let (handle, messages) = channel::channel();
        Self { created: None, monitor, options, handle, messages, device_errors: 0, device_requests: 0 }
    }

    /// Returns a handle of this thread.
    pub fn handle(&self) -> ControlHandle {
        self.handle.clone()
    }

    /// Starts to handle the process's signals. Before this call, signals have their default action, which ends the process.
    pub fn watch_signals(&self) -> Result<(), VmError> {
        signals::watch(self.handle(), self.monitor.clone())
            .map_err(|source| VmError::Device { what: "watch for signals", source })
    }

    /// Stores the configuration of a VM that will be booted.
    pub fn create(&mut self, config: CheckedConfig) -> Result<(), ControlError> {
        if self.created.is_some() {
            return Err(ControlError::AlreadyCreated);
        }
        file_limits::check(&config)?;
        self.created = Some(Created { config, state: State::Created, limited: false, booted: None, failure: None });
        Ok(())
    }

    /// Builds the VM and starts the guest. On failure, an event gives the reason, and the VM's state does not change. File restrictions
    /// that were applied stay in force.
    pub fn boot(&mut self) -> Result<(), ControlError> {
        let mailbox = self.handle.mailbox();
        let created = self.created.as_mut().ok_or(ControlError::NotCreated)?;
        if created.booted.is_some() {
            let needed = "created or shut down";
            return Err(ControlError::WrongState { call: "vm.boot", state: created.state, needed });
        }
        self.monitor.event("vm", "booting");
        let limited = if created.limited {
            Ok(())
        } else {
            let Options { removed, bounds, .. } = &mut self.options;
            file_limits::apply(&created.config, removed, None, bounds).map(|()| created.limited = true)
        };
        let built = limited.and_then(|()| M::build(&created.config, mailbox.clone(), &self.monitor));
        let started = built.and_then(|mut vm| vm.start(true).map(|()| vm)).map_err(file_limits::blame);
        let vm = started.inspect_err(|error| emit_failure(&self.monitor, error))?;
        created.booted =
            Some(Booted { vm, mailbox, leaving: Vec::new(), requested: BTreeSet::new(), resets: ResetPace::default() });
        (created.state, created.failure) = (State::Running, None);
        self.monitor.event("vm", "booted");
        Ok(())
    }

    /// Serves messages until the VMM must end. Returns an error if the VMM ends because the guest failed.
    pub fn run(mut self) -> Result<(), VmError> {
        let slice = ShortSlice::take();
        let handle = self.handle();
        let messages = mem::replace(&mut self.messages, mpsc::channel().1);
        let control = Arc::new(Mutex::new(self));
        // The lock is held while a message is served, but not while the thread waits for a message. So other threads see the VM only
        // between two changes.
        let lock = || control.lock().unwrap_or_else(PoisonError::into_inner);
        handle.let_read(&control);
        let result = loop {
            let due = lock().reset_due();
            let message = reset_pace::receive(&messages, due);
            // Queries run in short time slices so that they are answered soon. Other messages may start threads, such as vCPUs, which
            // would inherit the short slice.
            let is_question = message.as_ref().is_some_and(Message::is_question);
            let _ordinary = slice.as_ref().filter(|_| !is_question).map(ShortSlice::ordinary);
            let mut control = lock();
            let served = match message {
                Some(message) => control.serve(message),
                None => control.reset_for_guest(),
            };
            if let ControlFlow::Break(result) = served {
                break result;
            }
        };
        lock().delete();
        result
    }

    fn serve(&mut self, message: Message) -> ControlFlow<Result<(), VmError>> {
        match message {
            Message::Guest => return self.serve_guest(),
            Message::ReportCounters => {
                if let Some(booted) = self.created.as_ref().and_then(|created| created.booted.as_ref()) {
                    booted.vm.report_counters(&self.monitor);
                }
            }
            Message::LostMemory(lost) => return self.lose_memory(&lost),
            Message::Terminate(signal) => {
                signals::log_end(signal);
                return ControlFlow::Break(Ok(()));
            }
            Message::Call(call, caller) if matches!(*call, Call::ShutdownVmm) => {
                self.delete();
                caller.answer(Ok(Reply::Done));
                return ControlFlow::Break(Ok(()));
            }
            Message::Call(call, caller) => {
                if matches!(*call, Call::Snapshot(_)) {
                    // Serve the guest's pending events first. Otherwise the snapshot would lose an event that is queued after this call.
                    self.serve_guest()?;
                }
                let outcome = self.serve_call(*call);
                caller.answer(outcome);
            }
        }
        ControlFlow::Continue(())
    }

    pub(crate) fn serve_call(&mut self, call: Call) -> Result<Reply, ControlError> {
        self.do_call(call).map_err(|error| match error {
            ControlError::Vm(error) => file_limits::blame(error).into(),
            error => error,
        })
    }

    fn do_call(&mut self, call: Call) -> Result<Reply, ControlError> {
        match call {
            Call::Create(config) => {
                let defaults = &self.options.defaults;
                self.create(config.with(|config| {
                    defaults.apply(config);
                    Ok::<_, ConfigError>(())
                })?)?;
            }
            Call::Boot => self.boot()?,
            Call::Delete => self.delete(),
            Call::Shutdown => {
                self.booted("vm.shutdown")?;
                self.shut_down();
            }
            Call::Reboot => self.reboot()?,
            Call::Pause => self.pause()?,
            Call::Resume => self.resume()?,
            Call::Snapshot(destination) => self.save(&destination)?,
            Call::Restore(source) => self.restore(&source)?,
            Call::Info => return self.info().map(Reply::Info),
            Call::Counters => {
                let mut counters = counters_of(self.booted("vm.counters")?.1);
                counters.insert(counters::VMM.into(), counters::of_vmm(log_stream::lost_lines(), self.monitor.lost()));
                return Ok(Reply::Counters(counters));
            }
            Call::Bounce => return self.bounce().map(Reply::Bounce),
            Call::TuneBounce(change) => self.tune_bounce(&change)?,
            Call::Figures => return Ok(Reply::Figures(Box::new(self.figures()))),
            Call::PowerButton => self.booted("vm.power-button")?.1.press_power_button()?,
            Call::Nmi => self.raise_nmi()?,
            Call::Resize(size) => self.resize(&size)?,
            Call::ResizeDisk(size) => self.resize_disk(&size)?,
            Call::AddDevice(mut device) => {
                self.options.defaults.apply_to(&mut device);
                return self.add_device(device);
            }
            Call::RemoveDevice(id) => self.remove_device(&id)?,
            // `serve` handles this call, because the call ends the message loop.
            Call::ShutdownVmm => {}
        }
        Ok(Reply::Done)
    }

    /// Returns the booted VM, or the error for `call` if the VM is not booted.
    fn booted(&mut self, call: &'static str) -> Result<(&mut State, &mut M), ControlError> {
        let created = self.created.as_mut().ok_or(ControlError::NotCreated)?;
        match &mut created.booted {
            Some(booted) => Ok((&mut created.state, &mut booted.vm)),
            None => Err(ControlError::WrongState { call, state: created.state, needed: "booted (vm.boot)" }),
        }
    }

    fn info(&self) -> Result<Box<VmInfo>, ControlError> {
        let created = self.created.as_ref().ok_or(ControlError::NotCreated)?;
        Ok(created.info(created.booted.as_ref().and_then(|booted| booted.vm.iommu())))
    }

    fn bounce(&self) -> Result<Box<IommuBounceReport>, ControlError> {
        let created = self.created.as_ref().ok_or(ControlError::NotCreated)?;
        let config = created.config.iommu_bounce.as_ref().ok_or_else(no_windows)?;
        let vm = created.booted.as_ref().map(|booted| &booted.vm);
        let status = bounce::status(config, vm.and_then(M::iommu).as_ref());
        Ok(Box::new(bounce::report(status, vm.and_then(M::engine_report).as_ref())))
    }

    /// Changes the limits of the bounce windows in the configuration, and in the VM if it is booted.
    fn tune_bounce(&mut self, change: &IommuBounceChange) -> Result<(), ControlError> {
        let created = self.created.as_mut().ok_or(ControlError::NotCreated)?;
        let config = created.config.with(|config| {
            let bounce = config.iommu_bounce.as_mut().ok_or_else(no_windows)?;
            Ok::<_, ControlError>(change.apply(bounce)?)
        })?;
        if let Some(booted) = &created.booted {
            booted.vm.tune_bounce(change)?;
        }
        created.config = config;
        Ok(())
    }

    fn figures(&self) -> Figures {
        let (device_errors, device_requests) = (self.device_errors, self.device_requests);
        let (lost_log_lines, lost_events) = (log_stream::lost_lines(), self.monitor.lost());
        let Some(created) = &self.created else {
            return Figures { device_errors, device_requests, lost_log_lines, lost_events, ..Figures::default() };
        };
        let vm = created.booted.as_ref().map(|booted| &booted.vm);
        Figures {
            state: Some(created.state),
            vcpus: created.config.cpus.boot_vcpus,
            memory_bytes: created.config.memory.total(),
            iommu: vm.and_then(M::iommu),
            engine: vm.and_then(M::engine_report),
            devices: vm.map(M::devices).unwrap_or_default(),
            parts: vm.map(M::part_counters).unwrap_or_default(),
            device_errors,
            device_requests,
            lost_log_lines,
            lost_events,
        }
    }

    /// Raises an NMI. KVM can queue an NMI only for a vCPU outside `KVM_RUN`, so a running VM is stopped for a moment.
    fn raise_nmi(&mut self) -> Result<(), ControlError> {
        let (state, vm) = self.booted("vm.nmi")?;
        if *state != State::Running {
            return Ok(vm.raise_nmi()?);
        }
        let stopped = vm.pause();
        let raised = stopped.and_then(|()| {
            let raised = vm.raise_nmi();
            vm.resume().map(|()| raised)
        });
        Ok(self.or_end(raised)??)
    }

    /// Returns `outcome`, the outcome of a step. If the step failed, writes an event with the reason and shuts down the VM, because the
    /// guest cannot run after the failure.
    fn or_end<T>(&mut self, outcome: Result<T, VmError>) -> Result<T, VmError> {
        outcome.inspect_err(|error| {
            emit_failure(&self.monitor, error);
            self.shut_down();
        })
    }

    fn pause(&mut self) -> Result<(), ControlError> {
        let monitor = self.monitor.clone();
        let (state, vm) = self.booted("vm.pause")?;
        if *state != State::Running {
            return Err(ControlError::WrongState { call: "vm.pause", state: *state, needed: "running" });
        }
        monitor.event("vm", "pausing");
        let paused = vm.pause().map(|()| *state = State::Paused);
        self.or_end(paused)?;
        monitor.event("vm", "paused");
        Ok(())
    }

    fn resume(&mut self) -> Result<(), ControlError> {
        let monitor = self.monitor.clone();
        let (state, vm) = self.booted("vm.resume")?;
        if *state != State::Paused {
            return Err(ControlError::WrongState { call: "vm.resume", state: *state, needed: "paused (vm.pause)" });
        }
        monitor.event("vm", "resuming");
        let resumed = vm.resume().map(|()| *state = State::Running);
        self.or_end(resumed)?;
        monitor.event("vm", "resumed");
        Ok(())
    }

    /// Saves the VM to a directory, after a pending reset. If the reset fails, the VM is shut down. Otherwise the VM stays paused.
    fn save(&mut self, destination: &VmSnapshotConfig) -> Result<(), ControlError> {
        let (call, needed) = ("vm.snapshot", "paused (vm.pause)");
        let state = self.created.as_ref().ok_or(ControlError::NotCreated)?.state;
        let wrong_state = ControlError::WrongState { call, state, needed };
        if state != State::Paused {
            return Err(wrong_state);
        }
        self.do_due_reset()?;
        let Some(Created { config, booted: Some(booted), .. }) = &mut self.created else { return Err(wrong_state) };
        self.monitor.event("vm", "snapshotting");
        let mut snapshot = NewSnapshot::create(destination.destination_url.path()).map_err(VmError::from)?;
        booted.vm.save(config, &mut snapshot)?;
        self.monitor.event("vm", "snapshotted");
        Ok(())
    }

    /// Restores the VM from a directory. On failure, no VM exists, and an event gives the reason.
    pub fn restore(&mut self, source: &RestoreConfig) -> Result<(), ControlError> {
        if self.created.is_some() {
            return Err(ControlError::AlreadyCreated);
        }
        self.monitor.event("vm", "restoring");
        let mailbox = self.handle.mailbox();
        let change = |config: &mut VmConfig| source.apply(config);
        let made = Snapshot::open(source.source_url.path(), change).map_err(VmError::from).and_then(|snapshot| {
            let Options { removed, bounds, .. } = &mut self.options;
            file_limits::check_snapshot(&snapshot, bounds)?;
            file_limits::apply(&snapshot.config, removed, Some(source.source_url.path()), bounds)?;
            let vm = M::restore(&snapshot, source.reads_all(), mailbox.clone(), &self.monitor)?;
            Ok((vm, snapshot.config))
        });
        let (vm, config) = made.map_err(file_limits::blame).inspect_err(|error| emit_failure(&self.monitor, error))?;
        let booted =
            Booted { vm, mailbox, leaving: Vec::new(), requested: BTreeSet::new(), resets: ResetPace::default() };
        self.created =
            Some(Created { config, state: State::Paused, limited: true, booted: Some(booted), failure: None });
        self.monitor.event("vm", "restored");
        // If resuming fails, delete the VM: a client that repeats the restore must not find a leftover VM.
        if source.resume { self.resume().inspect_err(|_| self.delete()) } else { Ok(()) }
    }

    /// Resets the guest and runs it, even if it was paused. A VM that cannot be reset is shut down.
    fn reboot(&mut self) -> Result<(), ControlError> {
        self.booted("vm.reboot")?;
        let reset = self.reset(true);
        Ok(self.or_end(reset)?)
    }

    /// Resets the VM to its power-on state and boots the guest again. Runs the vCPUs if `run` is set.
    fn reset(&mut self, run: bool) -> Result<(), VmError> {
        let Some(created) = &mut self.created else { return Ok(()) };
        let Some(Booted { vm, mailbox, .. }) = &mut created.booted else { return Ok(()) };
        self.monitor.event("vm", "rebooting");
        if created.state == State::Running {
            vm.pause()?;
        }
        vm.report_counters(&self.monitor);
        mailbox.forget_resets();
        vm.reset()?;
        self.close_devices();
        let Some(Created { booted: Some(Booted { vm, resets, .. }), state, .. }) = &mut self.created else {
            return Ok(());
        };
        vm.start(run)?;
        resets.done(Instant::now());
        *state = if run { State::Running } else { State::Paused };
        self.monitor.event("vm", "rebooted");
        Ok(())
    }

    /// Stops the guest and releases everything except the configuration.
    fn shut_down(&mut self) {
        let Some(created) = &mut self.created else { return };
        let Some(Booted { mut vm, .. }) = created.booted.take() else { return };
        if let Err(error) = vm.pause() {
            log::error!("the VM is shut down, although pausing it failed: {error}");
        }
        vm.report_counters(&self.monitor);
        let operation = Operation::begin();
        drop(vm);
        drop(operation);
        created.state = State::Shutdown;
        self.monitor.event("vm", "shutdown");
    }

    fn delete(&mut self) {
        self.shut_down();
        if self.created.take().is_some() {
            self.monitor.event("vm", "deleted");
        }
    }

    fn serve_guest(&mut self) -> ControlFlow<Result<(), VmError>> {
        let booted = self.created.as_ref().and_then(|created| created.booted.as_ref());
        let Some((host, note)) = booted.map(|booted| booted.mailbox.take()) else { return ControlFlow::Continue(()) };
        self.serve_host(&host)?;
        // The host's notes may have paused or ended the VM.
        let Some(Created { booted: Some(_), .. }) = self.created else { return ControlFlow::Continue(()) };
        match note {
            // Only the host left notes, or the message came from a VM that no longer exists.
            None => ControlFlow::Continue(()),
            Some(GuestEvent::PowerOff) => {
                log::info!("the guest powered off");
                self.end_of_guest(Ok(()))
            }
            Some(GuestEvent::Failed(reason)) => self.end_of_guest(Err(VmError::Guest(reason))),
            Some(GuestEvent::Left) => {
                if let Some(Created { booted: Some(booted), .. }) = &mut self.created {
                    booted.vm.close_vcpus();
                }
                self.close_devices();
                ControlFlow::Continue(())
            }
            Some(GuestEvent::Reset) => self.handle_reset_request(),
        }
    }

    /// Handles the end of the guest: ends the VMM too, unless `no_shutdown` is set.
    fn end_of_guest(&mut self, result: Result<(), VmError>) -> ControlFlow<Result<(), VmError>> {
        if let Err(error) = &result {
            emit_failure(&self.monitor, error);
        }
        if !self.options.no_shutdown {
            return ControlFlow::Break(result);
        }
        if let Err(error) = &result {
            log::error!("the guest failed, and its VM is shut down: {error}");
            if let Some(created) = &mut self.created {
                created.failure = Some(error.to_string());
            }
        }
        self.shut_down();
        ControlFlow::Continue(())
    }
}

impl<M: Machine> Readable for Mutex<Control<M>> {
    fn info_soon(&self) -> Option<Result<Reply, ControlError>> {
        let control = self.try_lock().ok()?;
        let Some(created) = &control.created else { return Some(Err(ControlError::NotCreated)) };
        let status = match &created.booted {
            Some(booted) => booted.vm.iommu_soon()?,
            None => None,
        };
        Some(Ok(Reply::Info(created.info(status))))
    }
}

/// Returns the counters of a VM's devices, by ID.
fn counters_of<M: Machine>(vm: &M) -> VmCounters {
    let iommu = vm.iommu().map(|status| (IommuBounceConfig::ID.to_string(), counters::of_iommu(&status)));
    let engine = vm.engine_report();
    let devices = engine.iter().flat_map(|engine| {
        let of = |device: DeviceNode| Some((device.id, counters::of_endpoint(engine, &device.pci_bdf)?));
        vm.devices().into_iter().filter_map(of)
    });
    let mut all: VmCounters = iommu.into_iter().chain(devices).collect();
    // The entry may exist already, because a device with counters of its own may also be behind the virtio-iommu.
    for PartCounters { id, counters, .. } in vm.part_counters() {
        let counters = counters.into_iter().map(|counter| (counter.name.to_string(), counter.value));
        all.entry(id).or_default().extend(counters);
    }
    all
}

fn no_windows() -> ControlError {
    ControlError::NoSuchPart("the VM has no bounce windows: create the VM with iommu_bounce".into())
}

/// Writes the event `vm:failed`.
fn emit_failure(monitor: &EventMonitor, error: &VmError) {
    monitor.event_with("vm", "failed", Some(BTreeMap::from([("reason", error.to_string())])));
}
