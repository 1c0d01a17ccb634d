// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A virtio device as a PCI function.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use log::{debug, warn};
use thiserror::Error;

use super::common::{Action, CommonConfig, status};
use super::interrupts::Interrupts;
use super::layout::{
    self, COMMON, DEVICE, ISR, MAX_QUEUES, MSIX_PENDING, MSIX_TABLE, NOTIFY, NOTIFY_BAR, NOTIFY_MULTIPLIER, PAGE,
    SHARED_BAR, STRUCTURES_BAR, Shape, access,
};
use crate::pci::{Bar, ConfigSpace, MsixTable, PciDevice};
use crate::platform::{DeviceEvent, DeviceObserver, MsiAllocator};
use crate::ram::Ram;
use crate::sync::lock;
use crate::virtio::{Activation, DeviceError, Interrupt, VirtioDevice};

/// Why a virtio device could not be put on PCI.
#[derive(Debug, Error)]
pub enum TransportError {
    /// The device has more queues than the transport can number.
    #[error("{0} queues: the transport has room for {MAX_QUEUES}")]
    Queues(usize),
    /// The device's configuration is larger than its page.
    #[error("{0} bytes of device configuration: the transport has room for {PAGE}")]
    Config(usize),
    /// The platform had no interrupt vectors.
    #[error("allocating {count} interrupt vectors: {source}")]
    Vectors {
        /// How many were asked for.
        count: u16,
        /// What the platform said.
        source: io::Error,
    },
}

/// What the driver sees of the device's state: the part of the function that threads of the device reach too.
struct State {
    id: String,
    interrupts: Interrupts,
    common: Mutex<CommonConfig>,
    /// The device was activated and neither reset nor failed since.
    live: AtomicBool,
    /// The device was activated and not reset since. Changed with `common` locked.
    activated: AtomicBool,
    complained: AtomicBool,
    observer: Option<Arc<dyn DeviceObserver>>,
}

impl State {
    /// Keeps whether the device is active, and tells the observer of a change.
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

    /// The device cannot go on until its driver resets it (virtio 1.3, section 2.1.2).
    fn fail(&self, cause: &dyn std::fmt::Display) {
        {
            let mut common = lock(&self.common);
            // A reset may have come in between; then there is nothing to stop.
            if common.status() & status::DRIVER_OK == 0 {
                return;
            }
            self.live.store(false, Ordering::Release);
            common.set_needs_reset();
        }
        if self.complained.swap(true, Ordering::Relaxed) {
            debug!("{}: the guest's driver must reset the device: {cause}", self.id);
        } else {
            warn!("{}: the guest's driver must reset the device: {cause} (reported once)", self.id);
        }
        self.observe(DeviceEvent::Failed);
        self.interrupts.config_changed(true);
    }
}

impl Interrupt for State {
    fn queue_used(&self, queue: u16) {
        self.interrupts.queue_used(queue);
    }

    fn config_changed(&self, notify: bool) {
        self.interrupts.config_changed(notify);
    }

    fn failed(&self, error: &DeviceError) {
        self.fail(error);
    }
}

/// A virtio device on the modern PCI transport.
pub struct VirtioPciDevice {
    device: Arc<dyn VirtioDevice>,
    memory: Arc<Ram>,
    state: Arc<State>,
    space: Mutex<ConfigSpace>,
    /// What `space` is at power-on, with the addresses that the VMM assigned.
    pristine: Mutex<ConfigSpace>,
    msix_capability: u16,
    access_capability: u16,
    /// A copy of the command register's bit, for notifications.
    bus_master: AtomicBool,
}

impl VirtioPciDevice {
    /// Puts `device` on PCI. `id` names it in logs; its queues lie in `memory`; `msi` gives one vector for each queue
    /// and one for configuration changes. `observer` learns when the device is activated and reset.
    ///
    /// # Errors
    /// The device does not fit the transport, or the platform has no vectors.
    pub fn new(
        id: String,
        device: Arc<dyn VirtioDevice>,
        memory: Arc<Ram>,
        msi: &dyn MsiAllocator,
        observer: Option<Arc<dyn DeviceObserver>>,
    ) -> Result<Self, TransportError> {
        let sizes = device.queue_sizes();
        let queues = u16::try_from(sizes.len()).ok().filter(|count| usize::from(*count) <= MAX_QUEUES);
        let queues = queues.ok_or(TransportError::Queues(sizes.len()))?;
        let config_len = u32::try_from(device.config_len()).ok().filter(|len| u64::from(*len) <= PAGE);
        let config_len = config_len.ok_or(TransportError::Config(device.config_len()))?;
        let count = queues + 1;
        let vectors = msi.allocate(count).map_err(|source| TransportError::Vectors { count, source })?;
        let space = layout::build(&Shape {
            device_type: device.device_type(),
            class: device.pci_class(),
            queues,
            config_len,
            shared: device.shared_region(),
        });
        let state = State {
            id,
            interrupts: Interrupts::new(MsixTable::new(vectors), sizes.len()),
            common: Mutex::new(CommonConfig::new(device.features(), sizes)),
            live: AtomicBool::new(false),
            activated: AtomicBool::new(false),
            complained: AtomicBool::new(false),
            observer,
        };
        Ok(Self {
            state: Arc::new(state),
            device,
            memory,
            pristine: Mutex::new(space.config.clone()),
            space: Mutex::new(space.config),
            msix_capability: space.msix,
            access_capability: space.access,
            bus_master: AtomicBool::new(false),
        })
    }

    /// The way to the driver, for changes that come from the VMM's side.
    pub fn interrupt(&self) -> Arc<dyn Interrupt> {
        self.state.clone()
    }

    /// A write at `place` of a notification structure: the queue's number is in the address; what is written only
    /// repeats it.
    fn notify_at(&self, place: u64) {
        if let Ok(queue) = u16::try_from(place / u64::from(NOTIFY_MULTIPLIER)) {
            self.notify(queue);
        }
    }

    fn notify(&self, queue: u16) {
        if !self.state.live.load(Ordering::Acquire) || !self.bus_master.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = self.device.notify(queue) {
            self.state.fail(&error);
        }
    }

    fn write_common(&self, offset: u64, data: &[u8]) {
        let mut common = lock(&self.state.common);
        let started = match common.write(offset, data, &self.state.interrupts) {
            Action::None => true,
            Action::Reset => {
                self.reset_device(&mut common, false);
                true
            }
            Action::Start => self.start(&common),
        };
        drop(common);
        if !started {
            self.state.fail(&"the rings of a queue are misaligned or not in guest memory");
        }
    }

    /// Activates the device; `false` if its queues cannot be used. The lock on the registers is held, so that no reset
    /// comes in between.
    fn start(&self, common: &CommonConfig) -> bool {
        self.state.interrupts.set_running(true);
        let Some(queues) = common.build_queues(&self.memory) else { return false };
        let (memory, interrupt) = (self.memory.clone(), self.interrupt());
        self.device.activate(Activation { memory, queues, interrupt, features: common.features() });
        self.state.live.store(true, Ordering::Release);
        self.state.set_activated(true);
        true
    }

    /// `of_all`: the whole VM is reset.
    fn reset_device(&self, common: &mut CommonConfig, of_all: bool) {
        self.state.live.store(false, Ordering::Release);
        if of_all {
            self.device.system_reset();
        } else {
            self.device.reset();
        }
        self.state.interrupts.reset();
        common.reset();
        self.state.set_activated(false);
    }

    /// The access that the PCI configuration access capability describes: BAR, place and width, if it is a legal one into
    /// a BAR that holds structures (virtio 1.3, section 4.1.4.9.1). The shared memory region is not reached this way.
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
            COMMON => lock(&self.state.common).read(place, data, &self.state.interrupts),
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
            self.bus_master.store(space.is_bus_master(), Ordering::Relaxed);
            let control = self.msix_capability + 2;
            let control = touches(offset, data.len(), control, 2).then(|| space.word(control));
            let described = self.reads_access_data(offset, data.len()).then(|| self.described_access(&space)).flatten();
            (control, described, space.dword(self.access_capability + access::DATA))
        };
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
        if index == SHARED_BAR { self.device.shared_region_moved(address) } else { Ok(()) }
    }

    fn bar_released(&self, index: u8) -> io::Result<()> {
        // Chunks may be shown there, and their memory slots are not made anew for a place that is not decoded.
        if index == SHARED_BAR { Err(io::Error::other("the shared memory region keeps its place")) } else { Ok(()) }
    }

    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]) {
        // Notifications, and the shared region where it has no memory, read as zero.
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
        self.bus_master.store(false, Ordering::Relaxed);
        self.reset_device(&mut lock(&self.state.common), true);
        self.state.interrupts.with_msix(MsixTable::reset);
        let pristine = lock(&self.pristine).clone();
        *lock(&self.space) = pristine;
        Ok(())
    }
}

/// Whether an access of `len` bytes at `offset` touches `[start, start + size)`.
fn touches(offset: u16, len: usize, start: u16, size: u16) -> bool {
    let end = usize::from(offset) + len;
    usize::from(offset) < usize::from(start + size) && end > usize::from(start)
}
