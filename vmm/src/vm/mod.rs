// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Builds a VM from its configuration, and starts, pauses and resets the VM. [`crate::control`] decides when to call these operations.

mod added_ram;
mod base;
mod build;
mod loading;
mod processors;
mod serial;
mod state;

use std::path::Path;
use std::sync::Arc;

use carom_api::config::MemoryConfig;
use carom_api::types::{DeviceNode, IommuBounceChange, PciDeviceInfo};
use carom_api::{PartConfig, VmConfig};
use devices::pci::{PciAddress, PciRoot};
use devices::peer_timeouts::Operation;
use devices::platform::MemorySlots;
use devices::ram::Ram;
use devices::sandbox::ThreadRole;
use devices::virtio::iommu::IommuStatus;
use devices::watchdog;
use iommu_bounce::Report;

use crate::address_space::IoMapOwner;
use crate::arch::board::Board;
use crate::arch::clock::ClockState;
use crate::arch::irqchip::IrqchipState;
use crate::arch::registers::{self, Entry};
use crate::console::ConsoleLinks;
use crate::error::VmError;
use crate::kvm::{KvmError, KvmVm};
use crate::machine::{Machine, PartCounters};
use crate::mailbox::Mailbox;
use crate::parts::{self, bus::PartBus};
use crate::process::event_monitor::EventMonitor;
use crate::process::thread_roles::STARTED;
use crate::vcpu::Vcpu;
use crate::vm_state::{StateSink, StateSource};

use added_ram::AddedRam;
use base::Base;
use loading::Contents;
use processors::Processors;
use state::StoppedClock;

/// Returns the roles of all threads, except the first thread and the thread that starts the other threads.
pub fn thread_roles() -> Vec<ThreadRole> {
    [&STARTED[..], &[watchdog::ROLE], &parts::thread_roles()].concat()
}

/// ID of the device with which the guest reports a panic.
const PVPANIC_ID: &str = "_pvpanic";
/// ID of the device that resets an unresponsive guest.
const WATCHDOG_ID: &str = "_watchdog";

/// VM with its devices and vCPUs. The vCPUs of a newly built VM are paused.
///
/// Rust drops the fields in the order of their declaration. First the vCPUs stop, because their threads use the devices. Then the devices
/// close their host resources, and RAM is freed. Last, `serial` waits for the readers of the serial port's output, while the terminal still
/// belongs to the guest.
pub struct Vm {
    processors: Processors,
    initial_irqchip: IrqchipState,
    _io_map: IoMapOwner,
    pci: Arc<PciRoot>,
    board: Board,
    parts: PartBus,
    /// Closed devices that `close_devices` has not returned yet.
    closed: Vec<PciDeviceInfo>,
    contents: Contents,
    /// Entry point of the guest, while RAM holds the loaded contents and the guest has not run.
    loaded: Option<Entry>,
    kvm: KvmVm,
    /// Dropped before `memory`, because KVM must not map memory that is unmapped in this process.
    slots: Arc<dyn MemorySlots>,
    memory: Arc<Ram>,
    /// Bytes of RAM at boot.
    ram_size: u64,
    added_ram: AddedRam,
    /// Guest clock, saved when the VM was paused.
    clock: Option<StoppedClock>,
    /// True if the guest's ACPI tables have the VM Generation ID. If a snapshot of an older version was restored, its tables lack the ID
    /// until the guest boots again.
    knows_generation_id: bool,
    serial: ConsoleLinks,
}

impl Machine for Vm {
    fn build(config: &VmConfig, mailbox: Arc<Mailbox>, monitor: &EventMonitor) -> Result<Self, VmError> {
        Self::new(config, Base::of_new(config)?, mailbox, monitor)
    }

    fn restore(
        source: &dyn StateSource,
        prefault: bool,
        mailbox: Arc<Mailbox>,
        monitor: &EventMonitor,
    ) -> Result<Self, VmError> {
        let mut vm = Self::new(source.config(), Base::of_saved(source, prefault)?, mailbox, monitor)?;
        vm.restore_state(source)?;
        Ok(vm)
    }

    fn save(&mut self, config: &VmConfig, sink: &mut dyn StateSink) -> Result<(), VmError> {
        Ok(self.save_to(config, sink)?)
    }

    fn start(&mut self, run: bool) -> Result<(), VmError> {
        let entry = match self.loaded.take() {
            Some(entry) => entry,
            None => self.contents.load(&self.memory, self.ram_size)?,
        };
        self.knows_generation_id = self.contents.generation_id.is_some();
        for vcpu in self.processors.iter() {
            vcpu.with_fd(registers::set_mtrr_write_back)?;
        }
        // Only the boot processor needs an entry point, because all other processors wait until the boot processor starts them.
        if let Some(boot_processor) = self.processors.iter().next() {
            boot_processor.with_fd(|fd| registers::set_entry(fd, entry))?;
        }
        self.clock = None;
        if run {
            // Resume the devices too, because the VM may have been paused when it was reset.
            self.pci.resume();
            self.processors.iter().for_each(Vcpu::resume);
        }
        Ok(())
    }

    fn pause(&mut self) -> Result<(), VmError> {
        self.interrupt_iommu(true);
        self.processors.stop();
        // The devices pause after the vCPUs, so that they still serve the vCPUs' last requests.
        self.pci.pause();
        self.interrupt_iommu(false);
        if self.clock.is_none() {
            self.clock = Some(StoppedClock::Paused(ClockState::save(&self.kvm.fd)?));
        }
        Ok(())
    }

    /// Orders the vCPUs to stop, and drops the serial port's links, which restores the terminal. Leaks everything else.
    fn abandon(mut self) {
        self.processors.iter().for_each(Vcpu::pause);
        drop(std::mem::take(&mut self.serial));
        std::mem::forget(self);
    }

    /// Resumes the guest. The guest's clock continues from its saved value. If the VM was restored, the clock catches up with real time
    /// instead. The guest is notified of the pause, so that its watchdogs do not report a lockup.
    fn resume(&mut self) -> Result<(), VmError> {
        match self.clock.take() {
            Some(StoppedClock::Paused(clock)) => clock.go_on(&self.kvm.fd)?,
            Some(StoppedClock::Restored(clock)) => clock.catch_up(&self.kvm.fd)?,
            None => {}
        }
        self.pci.resume();
        for vcpu in self.processors.iter() {
            if let Err(error) = vcpu.with_fd(|fd| fd.kvmclock_ctrl()) {
                // This call fails if the guest does not use kvmclock.
                log::debug!("vCPU {}: cannot notify the guest of the pause: {error}", vcpu.id());
            }
            vcpu.resume();
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<(), VmError> {
        self.interrupt_iommu(true);
        self.processors.stop();
        let _operation = Operation::begin();
        // Remove the devices and vCPUs that the guest was asked to release. All devices behind the virtio-iommu must stop their DMA before
        // the virtio-iommu is reset.
        self.board.hotplug.reset();
        if let Some(registers) = &self.board.memory_devices {
            registers.reset();
        }
        if let Some(registers) = &self.board.processors {
            registers.reset();
        }
        self.park_gone();
        self.close_gone();
        let reset = self.pci.reset();
        self.interrupt_iommu(false);
        reset.map_err(|source| VmError::Device { what: "reset the devices", source })?;
        self.board.reset();
        self.contents.payload.ram_was_used();
        self.initial_irqchip.restore(&self.kvm.fd)?;
        Ok(self.processors.reset(&self.kvm)?)
    }

    fn add_ram(&mut self, config: &MemoryConfig, len: u64) -> Result<(), VmError> {
        self.add_piece(config, len)
    }

    fn resize_device(&self, id: &str, bytes: u64) -> Result<(), VmError> {
        self.parts.resize(id, bytes)
    }

    fn added_ram(&self) -> u64 {
        self.added_ranges().iter().map(|(_, len)| len).sum()
    }

    fn held_ram(&self) -> u64 {
        self.parts.held_ram()
    }

    fn set_vcpus(&mut self, count: u32, run: bool) -> Result<(), VmError> {
        self.want_vcpus(count, run)
    }

    fn leaving_vcpu(&self, count: u32) -> Option<u32> {
        self.board.processors.as_ref()?.in_the_way(count)
    }

    fn close_vcpus(&mut self) {
        self.park_gone();
    }

    fn press_power_button(&self) -> Result<(), VmError> {
        Ok(self.board.press_power_button()?)
    }

    fn raise_nmi(&self) -> Result<(), VmError> {
        for vcpu in self.processors.iter() {
            vcpu.with_fd(|fd| fd.nmi()).map_err(KvmError::call(format!("raise an NMI on vCPU {}", vcpu.id())))?;
        }
        Ok(())
    }

    fn serial_pty(&self) -> Option<&Path> {
        self.serial.pty_path()
    }

    fn console_pty(&self) -> Option<&Path> {
        self.parts.console_pty()
    }

    /// Returns the devices on the bus, and the devices that have left the bus and are not closed yet.
    fn devices(&self) -> Vec<DeviceNode> {
        let node = |id: &str, address: PciAddress| DeviceNode {
            id: id.to_string(),
            resources: Vec::new(),
            children: Vec::new(),
            pci_bdf: address.to_string(),
        };
        let on_bus = self.pci.devices();
        let is_on_bus = |address| on_bus.iter().any(|(other, _)| *other == address);
        let left = self.parts.places().filter(|(_, address)| !is_on_bus(*address));
        let left = left.map(|(id, address)| node(id, address)).collect::<Vec<_>>();
        on_bus.iter().map(|(address, function)| node(function.id(), *address)).chain(left).collect()
    }

    fn add_device(&mut self, device: &PartConfig) -> Result<PciDeviceInfo, VmError> {
        let address = self.parts.add(device)?;
        self.board.hotplug.announce(address);
        Ok(PciDeviceInfo { id: device.id().unwrap_or_default().to_string(), bdf: address.to_string() })
    }

    fn remove_device(&mut self, id: &str) -> bool {
        let address = self.parts.find(id);
        if let Some(address) = address {
            self.board.hotplug.request(address);
        }
        address.is_some()
    }

    fn close_devices(&mut self) -> Vec<PciDeviceInfo> {
        self.close_gone();
        std::mem::take(&mut self.closed)
    }

    fn iommu(&self) -> Option<IommuStatus> {
        self.parts.iommu().map(|iommu| iommu.status())
    }

    fn iommu_soon(&self) -> Option<Option<IommuStatus>> {
        self.parts.iommu().map(|iommu| iommu.status_soon()).map_or(Some(None), |status| status.map(Some))
    }

    fn part_counters(&self) -> Vec<PartCounters> {
        let mut counters = self.parts.counters();
        if self.serial.has_output() {
            let of_serial = self.serial.counters().into();
            counters.push(PartCounters { id: serial::ID.into(), kind: serial::KIND, counters: of_serial });
        }
        counters
    }

    fn engine_report(&self) -> Option<Report> {
        self.parts.iommu().map(|iommu| iommu.engine_report())
    }

    fn tune_bounce(&self, change: &IommuBounceChange) -> Result<(), VmError> {
        let Some(iommu) = self.parts.iommu() else { return Ok(()) };
        let budget = change.budget.map_or(Ok(()), |bytes| iommu.set_budget(bytes));
        budget
            .and_then(|()| change.threshold.map_or(Ok(()), |bytes| iommu.set_threshold(bytes)))
            .and_then(|()| change.threshold_write.map_or(Ok(()), |bytes| iommu.set_threshold_write(bytes)))
            .and_then(|()| {
                let max_mapped = change.max_mapped.map(|bytes| Some(bytes).filter(|bytes| *bytes != 0));
                max_mapped.map_or(Ok(()), |bytes| iommu.set_max_mapped_bytes(bytes))
            })
            .map_err(|error| VmError::Iommu(error.to_string()))
    }

    fn report_counters(&self, monitor: &EventMonitor) {
        if let Some(iommu) = self.parts.iommu() {
            monitor.event_with("virtio-iommu", "counters", Some(iommu.counters()));
        }
    }
}

impl Vm {
    /// If `wanted` is set, interrupts slow requests to the virtio-iommu, so that vCPUs and other threads do not wait long for them.
    /// Otherwise stops interrupting requests. The virtio-iommu serves interrupted requests after the resume.
    fn interrupt_iommu(&self, wanted: bool) {
        if let Some(iommu) = self.parts.iommu() {
            iommu.interrupt(wanted);
        }
    }

    /// Closes devices that have left the bus.
    fn close_gone(&mut self) {
        for address in self.board.hotplug.take_gone() {
            let closed = self.parts.close(address);
            self.closed.extend(closed.map(|id| PciDeviceInfo { id, bdf: address.to_string() }));
        }
    }
}

impl Drop for Vm {
    /// Interrupts slow requests to the virtio-iommu before the vCPUs end. Otherwise the vCPUs would wait for these requests.
    fn drop(&mut self) {
        self.interrupt_iommu(true);
    }
}
