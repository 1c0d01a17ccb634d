// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A virtio device as a PCI function.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use log::{debug, warn};
use thiserror::Error;

use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::EventFd;

use super::bus_gate::BusGate;
use super::common::{Action, CommonConfig, status};
use super::doorbells::QueueDoorbells;
use super::interrupts::Interrupts;
use super::layout::{
    self, COMMON, DEVICE, ISR, MAX_QUEUES, MSIX_PENDING, MSIX_TABLE, NOTIFY, NOTIFY_BAR, NOTIFY_MULTIPLIER, PAGE,
    SHARED_BAR, STRUCTURES_BAR, Shape, access,
};
use super::lifecycle::{DriverNumber, Lifecycle};
use super::state::{STATE, TransportState};
use crate::dma::DeviceMemory;
use crate::pci::regs::{COMMAND, PM_CONTROL, PM_CONTROL_STATE};
use crate::pci::{Bar, ConfigSpace, MsixTable, PciDevice};
use crate::platform::{DeviceEvent, DeviceObserver, Doorbells, MsiAllocator};
use crate::state::{DeviceState, StateError};
use crate::sync::lock;
use crate::virtio::{DeviceError, DeviceProperties, Driver, Interrupt, LastRequests, VirtioDevice};

/// Reason why a virtio PCI device cannot be created.
#[derive(Debug, Error)]
pub enum TransportError {
    /// The device has more queues than the transport supports.
    #[error("the device has {0} queues, but the virtio PCI transport supports at most {MAX_QUEUES}")]
    Queues(usize),
    /// The device configuration is larger than one page, its maximum size in the BAR.
    #[error("the device configuration has {0} bytes, but the virtio PCI transport supports at most {PAGE} bytes")]
    Config(usize),
    /// The process has no free file descriptor.
    #[error("cannot create the device's eventfds: {0}; if too many files are open, raise the limit (ulimit -n)")]
    Descriptors(#[source] io::Error),
    /// The platform cannot allocate the interrupt vectors.
    #[error("cannot allocate {count} interrupt vectors: {source}")]
    Vectors {
        /// Number of requested vectors.
        count: u16,
        /// Error of the platform.
        source: io::Error,
    },
}

/// Driver-visible state of the device. The device's threads also access this state.
struct State {
    id: String,
    interrupts: Interrupts,
    common: Mutex<CommonConfig>,
    lifecycle: Lifecycle,
    /// True if the device was activated and has not been reset since then. This value changes only while `common` is locked.
    activated: AtomicBool,
    complained: AtomicBool,
    observer: Option<Arc<dyn DeviceObserver>>,
}

impl State {
    /// Sets `activated`, and reports a change to the observer.
    fn set_activated(&self, activated: bool) {
        if self.activated.swap(activated, Ordering::Relaxed) != activated {
            self.observe(if activated { DeviceEvent::Activated } else { DeviceEvent::Reset });
        }
    }

    fn observe(&self, event: DeviceEvent) {
        if let Some(observer) = &self.observer {
            observer.observe(&self.id, event);
        }
    }

    /// Marks the device as failed until this driver resets it (virtio 1.3, section 2.1.2). The device's threads call this function. So the
    /// function must not lock the registers: a reset holds this lock while it waits for the threads (deadlock).
    fn fail(&self, driver: DriverNumber, cause: &dyn std::fmt::Display) {
        if !self.lifecycle.fail(driver) {
            return;
        }
        if self.complained.swap(true, Ordering::Relaxed) {
            debug!("{}: the guest's driver must reset the device: {cause}", self.id);
        } else {
            warn!("{}: the guest's driver must reset the device: {cause} (reported once)", self.id);
        }
        self.observe(DeviceEvent::Failed);
        self.interrupts.config_changed(true);
    }

    /// Locks the registers. If the device has failed, sets `NEEDS_RESET` in the status.
    fn registers(&self) -> MutexGuard<'_, CommonConfig> {
        let mut common = lock(&self.common);
        if self.lifecycle.has_failed() {
            common.set_needs_reset();
        }
        common
    }
}

/// Interface through which a device notifies the driver that has activated it.
struct DriverLine {
    state: Arc<State>,
    driver: DriverNumber,
}

impl Interrupt for DriverLine {
    fn queue_used(&self, queue: u16) {
        self.state.interrupts.queue_used(queue);
    }

    fn queue_event(&self, queue: u16) -> Option<EventFd> {
        self.state.interrupts.queue_event(queue)
    }

    fn config_changed(&self, notify: bool) {
        self.state.interrupts.config_changed(notify);
    }

    fn failed(&self, error: &DeviceError) {
        self.state.fail(self.driver, error);
    }
}

/// Parameters of a virtio device on PCI.
pub struct VirtioPciParams {
    /// Name of the device in logs and the API.
    pub id: String,
    /// The device.
    pub device: Arc<dyn VirtioDevice>,
    /// Memory that the device can access. The queues lie in this memory.
    pub memory: DeviceMemory,
    /// Allocator of interrupt vectors: one for each queue and one for configuration changes.
    pub msi: Arc<dyn MsiAllocator>,
    /// Platform interface that connects the doorbells of queues. `None` if each notification exits to the VMM.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Observer that is notified when the device is activated, fails or is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Virtio device on the modern PCI transport.
pub struct VirtioPciDevice {
    device: Arc<dyn VirtioDevice>,
    memory: DeviceMemory,
    doorbells: QueueDoorbells,
    requests: Arc<LastRequests>,
    state: Arc<State>,
    space: Mutex<ConfigSpace>,
    /// Value of `space` at power-on, with the BAR addresses that the VMM assigned.
    pristine: Mutex<ConfigSpace>,
    msix_capability: u16,
    access_capability: u16,
    power_capability: u16,
    gate: BusGate,
}

impl VirtioPciDevice {
    /// Creates the PCI function of a device.
    ///
    /// # Errors
    /// The device has too many queues or too large a configuration for the transport, or the platform cannot allocate the vectors.
    pub fn new(params: VirtioPciParams) -> Result<Self, TransportError> {
        let VirtioPciParams { id, device, memory, msi, doorbells, observer } = params;
        let DeviceProperties { device_type, pci_class: class, features, queue_sizes: sizes, config_len } =
            device.properties();
        let queues = u16::try_from(sizes.len()).ok().filter(|count| usize::from(*count) <= MAX_QUEUES);
        let queues = queues.ok_or(TransportError::Queues(sizes.len()))?;
        let visible_len = u32::try_from(config_len).ok().filter(|len| u64::from(*len) <= PAGE);
        let config_len = visible_len.ok_or(TransportError::Config(config_len))?;
        let count = queues + 1;
        let vectors = msi.allocate(count).map_err(|source| TransportError::Vectors { count, source })?;
        let shared = device.shared_region();
        let space = layout::build(&Shape { device_type, class, queues, config_len, shared });
        let requests = LastRequests::new(&id, device_type, sizes.len());
        let state = State {
            id,
            interrupts: Interrupts::new(MsixTable::new(vectors), sizes.len()),
            common: Mutex::new(CommonConfig::new(features, memory.is_translated(), sizes)),
            lifecycle: Lifecycle::default(),
            activated: AtomicBool::new(false),
            complained: AtomicBool::new(false),
            observer,
        };
        let gate = BusGate::closed(&*device, &state.interrupts);
        Ok(Self {
            state: Arc::new(state),
            device,
            memory,
            doorbells: QueueDoorbells::new(doorbells),
            requests: Arc::new(requests),
            pristine: Mutex::new(space.config.clone()),
            space: Mutex::new(space.config),
            msix_capability: space.msix,
            access_capability: space.access,
            power_capability: space.power,
            gate,
        })
    }

    /// Returns the interface through which the VMM notifies the current driver, for example of a changed device configuration.
    pub fn interrupt(&self) -> Arc<dyn Interrupt> {
        Arc::new(DriverLine { state: self.state.clone(), driver: self.state.lifecycle.driver() })
    }

    /// Handles a write at offset `place` of a notification structure. The offset determines the queue. The written value is ignored,
    /// because it only repeats the queue's number.
    fn notify_at(&self, place: u64) {
        if let Ok(queue) = u16::try_from(place / u64::from(NOTIFY_MULTIPLIER)) {
            self.notify(queue);
        }
    }

    fn notify(&self, queue: u16) {
        let Some(driver) = self.state.lifecycle.served() else { return };
        let exists = usize::from(queue) < self.device.queue_sizes().len();
        if !exists || !self.gate.is_open() {
            return;
        }
        if let Err(error) = self.device.notify(queue) {
            self.state.fail(driver, &error);
        }
    }

    fn write_common(&self, offset: u64, data: &[u8]) {
        let mut common = self.state.registers();
        match common.write(offset, data, &self.state.interrupts) {
            Action::None => {}
            Action::Reset => self.reset_device(&mut common, false),
            Action::Start => {
                self.state.interrupts.set_running(true);
                let driver = self.state.lifecycle.driver();
                match self.build_queues(&common) {
                    Some(queues) => self.start(&common, queues, driver),
                    None => self.state.fail(
                        driver,
                        &"the rings of a queue must be aligned, and in memory that the device can access",
                    ),
                }
            }
        }
        drop(common);
        self.update_doorbells();
    }

    fn build_queues(&self, common: &CommonConfig) -> Option<Vec<Option<Queue>>> {
        common.build_queues(&self.memory.view())
    }

    /// Activates the device and starts its queues. The caller holds the lock on the registers, so that no reset can interfere.
    fn start(&self, common: &CommonConfig, queues: Vec<Option<Queue>>, driver: DriverNumber) {
        self.device.activate(self.driver(common, driver));
        self.start_queues(queues, driver);
        self.state.set_activated(true);
    }

    fn driver(&self, common: &CommonConfig, driver: DriverNumber) -> Driver {
        let interrupt = Arc::new(DriverLine { state: self.state.clone(), driver });
        Driver { memory: self.memory.clone(), interrupt, features: common.features(), requests: self.requests.clone() }
    }

    fn start_queues(&self, queues: Vec<Option<Queue>>, driver: DriverNumber) {
        for (index, queue) in (0..).zip(queues) {
            let started = queue.map_or(Ok(()), |queue| self.device.start_queue(index, queue));
            if let Err(source) = started {
                self.state.fail(driver, &DeviceError::Thread { queue: index, source });
            }
        }
        self.state.lifecycle.start();
    }

    /// Resets the device. `of_all` is true if the whole VM is reset.
    fn reset_device(&self, common: &mut CommonConfig, of_all: bool) {
        // While this function waits for the device's threads, these threads may still report failures. From here on, such failures have no
        // effect.
        self.state.lifecycle.stop();
        for index in 0..self.queue_count() {
            self.device.stop_queue(index);
        }
        if of_all {
            self.device.system_reset();
        } else {
            self.device.reset();
        }
        self.state.interrupts.reset();
        common.reset();
        self.state.set_activated(false);
    }

    fn queue_count(&self) -> u16 {
        u16::try_from(self.device.queue_sizes().len()).expect("checked when the device was created")
    }

    /// Pauses or resumes the device according to its bus-master bit and power state.
    fn follow_bus(&self) {
        let power_control = self.power_capability + PM_CONTROL;
        self.gate.follow(&*self.device, &self.state.interrupts, || {
            let space = lock(&self.space);
            space.is_bus_master() && space.word(power_control) & PM_CONTROL_STATE == 0
        });
    }

    /// Connects or disconnects the doorbells, according to the device's state and the BAR.
    fn update_doorbells(&self) {
        let serves = self.state.lifecycle.served().is_some() && self.gate.is_open();
        let decoded = lock(&self.space).bar_address(NOTIFY_BAR);
        self.doorbells.update(&*self.device, serves, decoded);
    }

    /// Returns the access that the PCI configuration access capability describes: BAR, offset and width (virtio 1.3, section 4.1.4.9.1).
    /// Returns `None` if the access is illegal. An access to the shared memory region is illegal.
    fn described_access(&self, space: &ConfigSpace) -> Option<(u8, u64, usize)> {
        let mut index = [0];
        space.read(self.access_capability + access::BAR, &mut index);
        let bar = space.bars().iter().find(|bar| bar.index == index[0] && bar.index != SHARED_BAR)?;
        let offset = u64::from(space.dword(self.access_capability + access::OFFSET));
        let len = space.dword(self.access_capability + access::LENGTH);
        let legal = matches!(len, 1 | 2 | 4) && offset.is_multiple_of(len.into()) && offset < bar.size;
        legal.then_some((bar.index, offset, usize::try_from(len).ok()?))
    }

    fn reads_access_data(&self, offset: u16, len: usize) -> bool {
        touches(offset, len, self.access_capability + access::DATA, 4)
    }

    fn read_structures(&self, offset: u64, data: &mut [u8]) {
        let place = offset % PAGE;
        match offset - place {
            COMMON => self.state.registers().read(place, data, &self.state.interrupts),
            ISR => {
                data.fill(0);
                if let (0, Some(first)) = (place, data.first_mut()) {
                    *first = self.state.interrupts.take_isr();
                }
            }
            DEVICE => {
                data.fill(0);
                self.device.read_config(usize::try_from(place).unwrap_or(usize::MAX), data);
            }
            MSIX_TABLE => self.state.interrupts.with_msix(|msix| {
                msix.read_table(place, data);
                Ok(())
            }),
            MSIX_PENDING => self.state.interrupts.with_msix(|msix| {
                msix.read_pending(place, data);
                Ok(())
            }),
            _ => data.fill(0),
        }
    }

    fn write_structures(&self, offset: u64, data: &[u8]) {
        let place = offset % PAGE;
        match offset - place {
            NOTIFY => self.notify_at(place),
            COMMON => self.write_common(place, data),
            DEVICE => self.device.write_config(usize::try_from(place).unwrap_or(usize::MAX), data),
            MSIX_TABLE => self.state.interrupts.with_msix(|msix| msix.write_table(place, data)),
            _ => {}
        }
    }
}

impl PciDevice for VirtioPciDevice {
    fn id(&self) -> &str {
        &self.state.id
    }

    fn read_config(&self, offset: u16, data: &mut [u8]) {
        if self.reads_access_data(offset, data.len()) {
            let described = self.described_access(&lock(&self.space));
            if let Some((bar, place, len)) = described {
                let mut value = [0; 4];
                self.read_bar(bar, place, &mut value[..len]);
                lock(&self.space).preset(self.access_capability + access::DATA, &value);
            }
        }
        lock(&self.space).read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        let (control, described, value) = {
            let mut space = lock(&self.space);
            space.write(offset, data);
            let control = self.msix_capability + 2;
            let control = touches(offset, data.len(), control, 2).then(|| space.word(control));
            let described = self.reads_access_data(offset, data.len()).then(|| self.described_access(&space)).flatten();
            (control, described, space.dword(self.access_capability + access::DATA))
        };
        if touches(offset, data.len(), COMMAND, 2) || touches(offset, data.len(), self.power_capability + PM_CONTROL, 2)
        {
            self.follow_bus();
            self.update_doorbells();
        }
        if let Some(control) = control {
            self.state.interrupts.with_msix(|msix| msix.set_control(control));
        }
        if let Some((bar, place, len)) = described {
            self.write_bar(bar, place, &value.to_le_bytes()[..len]);
        }
    }

    fn bars(&self) -> Vec<Bar> {
        lock(&self.pristine).bars().to_vec()
    }

    fn assign_bar(&self, index: u8, address: u64) {
        lock(&self.pristine).assign_bar(index, address);
        lock(&self.space).assign_bar(index, address);
    }

    fn bar_address(&self, index: u8) -> Option<u64> {
        lock(&self.space).bar_address(index)
    }

    fn bar_moved(&self, index: u8, address: u64) -> io::Result<()> {
        match index {
            SHARED_BAR => return self.device.shared_region_moved(address),
            NOTIFY_BAR => {
                self.doorbells.set_bar(Some(address));
                self.update_doorbells();
            }
            _ => {}
        }
        Ok(())
    }

    fn bar_released(&self, index: u8) -> io::Result<()> {
        match index {
            SHARED_BAR => return self.device.shared_region_released(),
            NOTIFY_BAR => {
                self.doorbells.set_bar(None);
                self.update_doorbells();
            }
            _ => {}
        }
        Ok(())
    }

    fn is_memory(&self, index: u8) -> bool {
        index == SHARED_BAR
    }

    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]) {
        // The notification BAR reads as zero. A part of the shared region that is not backed by memory reads as zero too.
        if index == STRUCTURES_BAR { self.read_structures(offset, data) } else { data.fill(0) }
    }

    fn write_bar(&self, index: u8, offset: u64, data: &[u8]) {
        match index {
            NOTIFY_BAR => self.notify_at(offset),
            STRUCTURES_BAR => self.write_structures(offset, data),
            _ => {}
        }
    }

    fn reset(&self) -> io::Result<()> {
        self.reset_device(&mut lock(&self.state.common), true);
        self.state.interrupts.with_msix(MsixTable::reset);
        let pristine = lock(&self.pristine).clone();
        *lock(&self.space) = pristine;
        self.follow_bus();
        self.update_doorbells();
        Ok(())
    }

    fn pause(&self) {
        self.gate.pause_vm(&*self.device);
    }

    fn resume(&self) {
        self.gate.resume_vm(&*self.device);
    }

    fn save(&self) -> Result<DeviceState, StateError> {
        let common = self.state.registers();
        let state = TransportState {
            config: lock(&self.space).state(),
            interrupts: self.state.interrupts.state(),
            common: common.state(|queue| self.device.queue_state(queue)),
            device: self.device.save()?,
        };
        DeviceState::new(STATE.0, STATE.1, &state)
    }

    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let state: TransportState = state.payload(STATE.0, STATE.1)?;
        let mut common = lock(&self.state.common);
        common.restore(&state.common)?;
        // A restored function is paused. Its queues resume when the VM resumes, if the registers allow bus use.
        self.gate.pause_vm(&*self.device);
        lock(&self.space).restore(&state.config)?;
        self.follow_bus();
        let (ready, failed) = (common.status() & status::DRIVER_OK != 0, common.status() & status::NEEDS_RESET != 0);
        self.state.interrupts.restore(&state.interrupts)?;
        self.state.interrupts.set_running(ready);
        let driver = self.state.lifecycle.driver();
        if failed {
            self.state.lifecycle.fail(driver);
        }
        if !ready || failed {
            return self.device.restore(&state.device);
        }
        self.device.activate(self.driver(&common, driver));
        self.device.restore(&state.device)?;
        // Build the queues after the device is restored. The check of the rings needs the device's mappings, and these mappings are part of
        // the state of the device or the IOMMU.
        let unusable = || {
            StateError::rule(
                "common.queues",
                "the saved rings must be aligned, and in memory that the device can access",
            )
        };
        let mut queues = self.build_queues(&common).ok_or_else(unusable)?;
        for (queue, setup) in queues.iter_mut().zip(&state.common.queues) {
            match (queue, setup.served) {
                (Some(queue), Some(served)) => {
                    queue.set_next_avail(served.next_avail);
                    queue.set_next_used(served.next_used);
                }
                (None, None) => {}
                _ => {
                    return Err(StateError::rule(
                        "common.queues",
                        "if the driver is ready, `served` must contain a position for each enabled queue, and must be null for all other queues: restore from an unmodified snapshot",
                    ));
                }
            }
        }
        self.start_queues(queues, driver);
        self.state.set_activated(true);
        Ok(())
    }
}

/// True if an access of `len` bytes at `offset` overlaps `[start, start + size)`.
fn touches(offset: u16, len: usize, start: u16, size: u16) -> bool {
    let end = usize::from(offset) + len;
    usize::from(offset) < usize::from(start + size) && end > usize::from(start)
}
