// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A VM: built from its configuration, run until its end.

mod build;
mod error;
mod passthrough;
mod signals;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError};

use devices::pci::PciRoot;
use devices::vfio::GuestRamMapping;
use devices::virtio::iommu::IommuHandle;
use vm_memory::GuestMemoryMmap;

pub use error::VmError;

use crate::acpi;
use crate::address_space::IoMap;
use crate::boot::Payload;
use crate::event_monitor::EventMonitor;
use crate::kvm::registers::{self, Entry, VcpuState};
use crate::kvm::{IrqchipState, KvmVm};
use crate::terminal::RawMode;
use crate::vcpu::Vcpu;

/// How many events wait for the main thread at most. What guests cause beyond that is dropped: a guest that writes the
/// reset register in a loop must not fill the host's memory.
const MAX_EVENTS: usize = 16;

/// Hands an event to the main thread without ever waiting: the main thread may itself be waiting for the caller to pause.
pub(crate) fn report(events: &SyncSender<VmEvent>, event: VmEvent) {
    if let Err(TrySendError::Full(event)) = events.try_send(event) {
        log::debug!("too many events at once, dropped: {event:?}");
    }
}

/// What the main thread acts on.
#[derive(Debug)]
pub enum VmEvent {
    /// The guest powered off.
    PowerOff,
    /// The guest asked for a reset, or crashed such that a machine resets.
    Reset,
    /// The VM cannot go on.
    Failed(String),
    /// A signal asks the VMM to end.
    Terminate(i32),
    /// A signal asks for the counters.
    ReportCounters,
}

/// A VM whose devices are built and whose vCPUs are paused.
///
/// Fields are dropped in this order: the vCPUs stop first, then devices let go of the host's, then RAM.
pub struct Vm {
    vcpus: Vec<Vcpu>,
    initial: Vec<VcpuState>,
    initial_irqchip: IrqchipState,
    io_map: Arc<IoMap>,
    pci: Arc<PciRoot>,
    iommu: Option<Arc<IommuHandle>>,
    /// Held for its end: dropping it unmaps RAM for the devices.
    _ram: Option<GuestRamMapping>,
    machine: acpi::Machine,
    payload: Payload,
    kvm: KvmVm,
    memory: Arc<GuestMemoryMmap>,
    ram_size: u64,
    monitor: EventMonitor,
    events: Receiver<VmEvent>,
    sender: SyncSender<VmEvent>,
    _terminal: Option<RawMode>,
}

impl Vm {
    /// Runs the guest until it powers off, fails, or a signal ends it. The guest's resets happen within.
    pub fn run(self) -> Result<(), VmError> {
        signals::watch(self.sender.clone())?;
        self.monitor.event("vm", "booting");
        self.start()?;
        self.monitor.event("vm", "booted");
        let result = self.watch();
        self.vcpus.iter().for_each(Vcpu::pause);
        self.vcpus.iter().for_each(Vcpu::wait_paused);
        self.report_counters();
        self.monitor.event("vm", "shutdown");
        let monitor = self.monitor.clone();
        drop(self);
        monitor.event("vm", "deleted");
        result
    }

    fn watch(&self) -> Result<(), VmError> {
        loop {
            match self.events.recv().expect("the VM holds a sender") {
                VmEvent::PowerOff => {
                    log::info!("the guest powered off");
                    return Ok(());
                }
                VmEvent::Terminate(signal) => {
                    log::info!("signal {signal} ends the VM");
                    return Ok(());
                }
                VmEvent::Failed(reason) => return Err(VmError::Guest(reason)),
                VmEvent::ReportCounters => self.report_counters(),
                VmEvent::Reset => {
                    self.monitor.event("vm", "rebooting");
                    self.reset()?;
                    self.monitor.event("vm", "rebooted");
                }
            }
        }
    }

    /// Puts everything back to power-on and boots again.
    fn reset(&self) -> Result<(), VmError> {
        self.vcpus.iter().for_each(Vcpu::pause);
        self.vcpus.iter().for_each(Vcpu::wait_paused);
        self.report_counters();
        // Several vCPUs, or one that insists, may have asked for the same reset; what else came is kept.
        let others: Vec<_> = self.events.try_iter().filter(|event| !matches!(event, VmEvent::Reset)).collect();
        others.into_iter().for_each(|event| report(&self.sender, event));
        self.pci.reset().map_err(|source| VmError::Device { what: "resetting the devices", source })?;
        self.initial_irqchip.restore(&self.kvm.fd)?;
        for (vcpu, state) in self.vcpus.iter().zip(&self.initial) {
            vcpu.with_fd(|fd| state.restore(fd))?;
        }
        self.start()
    }

    /// Loads the kernel, points the boot processor at it, and lets all vCPUs run: all but that one wait for it.
    fn start(&self) -> Result<(), VmError> {
        let entry = load(&self.payload, &self.memory, self.ram_size, &self.machine)?;
        for vcpu in &self.vcpus {
            vcpu.with_fd(registers::set_mtrr_write_back)?;
        }
        if let Some(boot_processor) = self.vcpus.first() {
            boot_processor.with_fd(|fd| registers::set_entry(fd, entry))?;
        }
        self.vcpus.iter().for_each(Vcpu::resume);
        Ok(())
    }

    fn report_counters(&self) {
        if let Some(iommu) = &self.iommu {
            self.monitor.event_with("virtio-iommu", "counters", Some(iommu.counters()));
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // Their threads use the devices.
        self.vcpus.clear();
        self.io_map.clear();
    }
}

/// Writes kernel, initramfs, command line and tables to RAM.
fn load(payload: &Payload, memory: &GuestMemoryMmap, size: u64, machine: &acpi::Machine) -> Result<Entry, VmError> {
    let rsdp = acpi::write(memory, machine).map_err(VmError::Tables)?;
    Ok(payload.load(memory, size, rsdp)?)
}
