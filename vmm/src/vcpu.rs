// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vCPU threads. Each thread runs its vCPU, handles its exits, and pauses or stops when the VM orders it.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use devices::handshake::{Handshake, Order};
use devices::host_memory::{Cause, Loss, missing_memory, truncated_memory};
use devices::peer_timeouts::Operation;
use devices::platform::Space;
use devices::sandbox::{self, HostCpus};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use crate::address_space::IoMap;
use crate::kvm::port_accesses;
use crate::mailbox::{GuestEvent, Mailbox};
use crate::process::thread_roles::VCPU;

/// Interval at which a vCPU that must pause is signalled again. A signal has no effect if it arrives between the check of the order and the
/// entry into the guest.
const KICK_AGAIN: Duration = Duration::from_millis(5);

/// Delay before a vCPU is run again after the host had no memory to run it.
const MEMORY_TIME: Duration = Duration::from_millis(10);
/// Maximum number of successive retries after the host had no memory to run a vCPU.
const MEMORY_TIMES: u32 = 300;

/// State that the VM and one vCPU thread share.
struct Shared {
    /// Orders of the VM to the thread. A parked thread is outside the guest.
    handshake: Handshake,
    /// True if the vCPU has put an event into the mailbox that ends or resets the guest. The vCPU enters the guest again only after a
    /// reset.
    halted: AtomicBool,
    vcpu: Arc<Mutex<VcpuFd>>,
}

/// vCPU with its thread.
pub struct Vcpu {
    id: u32,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

extern "C" fn kicked(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

impl Vcpu {
    /// Starts the thread of vCPU `id`. The vCPU is paused at first. If `cpus` is set, the thread runs only on these host CPUs. The thread
    /// ends when the returned value is dropped. After that, another thread can be started for the vCPU.
    pub fn spawn(
        id: u32,
        cpus: Option<HostCpus>,
        vcpu: Arc<Mutex<VcpuFd>>,
        io_map: Arc<IoMap>,
        mailbox: Arc<Mailbox>,
    ) -> io::Result<Self> {
        register_signal_handler(SIGRTMIN(), kicked)?;
        let shared = Arc::new(Shared { handshake: Handshake::new(Order::Pause), halted: AtomicBool::new(false), vcpu });
        let of_thread = shared.clone();
        let thread = sandbox::start_on(VCPU, format!("vcpu{id}"), cpus, move || {
            let runner = Runner { id, shared: of_thread, io_map, mailbox, shortages: Cell::new(0) };
            // A panic must end the VM. Otherwise the VM would continue without one of its CPUs.
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runner.run())).is_err() {
                runner.mailbox.leave(GuestEvent::Failed(format!(
                    "the thread of vCPU {id} panicked: this is an error in Carom; report it with the log"
                )));
            }
            runner.shared.handshake.end();
        })?;
        Ok(Self { id, shared, thread: Some(thread) })
    }

    /// Waits until the thread has started and is paused. From then on, clients can find the thread by its name.
    pub fn wait_started(&self) {
        self.shared.handshake.wait_parked();
    }

    /// Returns the number of the vCPU.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Calls `change` with the vCPU, which must be paused.
    pub fn with_fd<R>(&self, change: impl FnOnce(&VcpuFd) -> R) -> R {
        change(&self.shared.vcpu.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Orders the vCPU to run.
    pub fn resume(&self) {
        self.shared.handshake.give(Order::Run);
    }

    /// Orders the vCPU to pause. [`Vcpu::wait_paused`] waits until it has paused.
    pub fn pause(&self) {
        self.give(Order::Pause);
    }

    /// Allows a paused vCPU that has put an event into the mailbox to enter the guest again. Called after a reset.
    pub fn forget_halt(&self) {
        self.shared.halted.store(false, Ordering::Release);
    }

    /// Waits until the vCPU is outside the guest. After that, all of the vCPU's accesses to devices are complete, so its registers can be
    /// read and written.
    pub fn wait_paused(&self) {
        self.shared.handshake.wait_parked_nudging(KICK_AGAIN, || self.kick());
    }

    fn give(&self, order: Order) {
        self.shared.handshake.give(order);
        self.kick();
    }

    fn kick(&self) {
        if let Some(Err(error)) = self.thread.as_ref().map(|thread| thread.kill(SIGRTMIN())) {
            log::debug!("vCPU {}: cannot signal its thread: {error}", self.id);
        }
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.give(Order::Stop);
        let Some(thread) = self.thread.take() else { return };
        while !thread.is_finished() {
            // The thread's handle stays valid for signals until the thread is joined.
            if thread.kill(SIGRTMIN()).is_err() {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        if thread.join().is_err() {
            log::error!("the thread of vCPU {} panicked: this is an error in Carom; report it with the log", self.id);
        }
    }
}

/// Result of one entry of a vCPU into KVM, after the exit was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entered {
    /// The vCPU must enter again: the exit may be only part of an access.
    Again,
    /// KVM did not run the guest, or was interrupted. No access is in progress.
    Interrupted,
}

/// Data of a vCPU's thread.
struct Runner {
    id: u32,
    shared: Arc<Shared>,
    io_map: Arc<IoMap>,
    mailbox: Arc<Mailbox>,
    /// Number of successive runs for which the host had no memory.
    shortages: Cell<u32>,
}

impl Runner {
    fn run(&self) {
        let Shared { handshake, halted, .. } = &*self.shared;
        while handshake.wait_to_run(|| ()) {
            if halted.load(Ordering::Acquire) {
                handshake.wait_while_running();
                continue;
            }
            let mut vcpu = self.shared.vcpu.lock().unwrap_or_else(PoisonError::into_inner);
            self.run_until_stopped(&mut vcpu);
        }
    }

    /// Runs the guest while the order is to run and the vCPU has put no event into the mailbox. Afterwards every access is complete, unless
    /// the guest has failed.
    fn run_until_stopped(&self, vcpu: &mut VcpuFd) {
        let mut runs = self.is_running();
        while runs {
            // The operation limits the total time that the vCPU waits for a device server. It covers this exit. If the vCPU must pause, it
            // also covers the exits that complete the access.
            let _operation = Operation::begin();
            let entered = self.enter(vcpu);
            runs = entered.is_ok() && self.is_running();
            // After a failure, the VM ends, so the access is not completed. An access that failed because memory was lost must not continue
            // with wrong bytes.
            let is_over = matches!(entered, Err(GuestEvent::Failed(_)));
            let completed = if runs || is_over { Ok(()) } else { self.complete_io(vcpu) };
            if let Err(event) = entered.map(drop).and(completed) {
                // The flag is set before the event is put into the mailbox, because the reset that handles the event clears the flag.
                self.shared.halted.store(true, Ordering::Release);
                self.mailbox.leave(event);
            }
        }
    }

    fn is_running(&self) -> bool {
        self.shared.handshake.runs()
    }

    /// Completes the access that the last exit began, without entering the guest.
    ///
    /// KVM completes an access when the vCPU is run again. The instruction may then make another access: the second half of 16 bytes, the
    /// next word of a string, or the store of a read-modify-write. In this case, the run returns another exit for a device to serve. When
    /// no access is left, KVM returns EINTR (Documentation/virt/kvm/api.rst, "immediate_exit").
    fn complete_io(&self, vcpu: &mut VcpuFd) -> Result<(), GuestEvent> {
        vcpu.set_kvm_immediate_exit(1);
        let completed = loop {
            match self.enter(vcpu) {
                Ok(Entered::Again) => {}
                Ok(Entered::Interrupted) => break Ok(()),
                Err(event) => break Err(event),
            }
        };
        vcpu.set_kvm_immediate_exit(0);
        completed
    }

    /// Waits outside the guest, so that the host can free memory. KVM repeats the failed step when the vCPU is run again. Returns false if
    /// memory was missing for too long.
    fn wait_for_memory(&self) -> bool {
        let shortages = self.shortages.get();
        if shortages == 0 {
            log::warn!("vCPU {}: the host has no memory to run this vCPU: free host memory; trying again", self.id);
        }
        if shortages == MEMORY_TIMES {
            return false;
        }
        self.shortages.set(shortages + 1);
        // The wait ends earlier if a new order arrives.
        self.shared.handshake.wait_for_time(MEMORY_TIME);
        true
    }

    /// Returns the event for a triple fault, which is usually a reset of the guest. If guest memory was truncated, the truncation is the
    /// likely cause. A reset would hide the cause, so the guest fails instead.
    fn triple_fault(&self) -> GuestEvent {
        if let Some(cause) = truncated_memory() {
            return GuestEvent::Failed(format!("vCPU {}: triple fault; likely cause: {cause}", self.id));
        }
        log::warn!("vCPU {}: triple fault; the guest is reset", self.id);
        GuestEvent::Reset
    }

    /// Runs the guest until its next exit, and serves the exit.
    fn enter(&self, vcpu: &mut VcpuFd) -> Result<Entered, GuestEvent> {
        let exit = vcpu.run();
        if exit.is_ok() {
            self.shortages.set(0);
        }
        match exit {
            Ok(VcpuExit::MmioWrite(address, data)) => self.io_map.write_memory(address, data).map_err(lost_memory)?,
            Ok(VcpuExit::MmioRead(address, data)) => self.io_map.read_memory(address, data).map_err(lost_memory)?,
            Ok(VcpuExit::IoOut(port, _)) => {
                port_accesses(vcpu).for_each(|data| self.io_map.write(Space::Port, port.into(), data));
            }
            Ok(VcpuExit::IoIn(port, _)) => {
                port_accesses(vcpu).for_each(|data| self.io_map.read(Space::Port, port.into(), data));
            }
            Ok(VcpuExit::Shutdown) => return Err(self.triple_fault()),
            Ok(VcpuExit::SystemEvent(kind, _)) => return Err(system_event(kind)),
            Ok(VcpuExit::Intr | VcpuExit::Hlt | VcpuExit::IrqWindowOpen) => {}
            Ok(VcpuExit::MemoryFault { gpa, .. }) => return Err(lost_memory(self.io_map.loss(gpa))),
            Ok(exit) => {
                let exit = format!("{exit:?}");
                // Lost memory may be the cause, because KVM cannot emulate instructions whose bytes are lost.
                let cause = missing_memory().map(|cause| format!("; likely cause: {cause}")).unwrap_or_default();
                return Err(GuestEvent::Failed(format!("vCPU {}: KVM cannot run the guest: {exit}{cause}", self.id)));
            }
            // EAGAIN: another vCPU must start this vCPU, so no access is in progress.
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => return Ok(Entered::Interrupted),
            Err(error) if error.errno() == libc::ENOMEM && self.wait_for_memory() => {}
            Err(error) if error.errno() == libc::EFAULT => return Err(lost_memory(unknown_place(Cause::Missing))),
            Err(error) if error.errno() == libc::EHWPOISON => return Err(lost_memory(unknown_place(Cause::Poisoned))),
            Err(error) => return Err(GuestEvent::Failed(format!("vCPU {}: cannot run the guest: {error}", self.id))),
        }
        Ok(Entered::Again)
    }
}

/// Returns the event for a lost page of guest memory, after which the guest must not continue.
fn lost_memory(loss: Loss) -> GuestEvent {
    GuestEvent::Failed(loss.explain())
}

/// Returns the loss to report for a page whose address KVM did not report.
fn unknown_place(cause: Cause) -> Loss {
    Loss { address: None, gpa: None, cause }
}

fn system_event(kind: u32) -> GuestEvent {
    match kind {
        kvm_bindings::KVM_SYSTEM_EVENT_SHUTDOWN => GuestEvent::PowerOff,
        kvm_bindings::KVM_SYSTEM_EVENT_RESET => GuestEvent::Reset,
        kvm_bindings::KVM_SYSTEM_EVENT_CRASH => GuestEvent::Failed("the guest reported a crash".into()),
        kind => GuestEvent::Failed(format!("KVM reported the unknown system event {kind}")),
    }
}

#[cfg(test)]
mod tests;
