// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Implementation of [`VirtioDevice`] for vhost-user devices.

use std::io;
use std::sync::Arc;

use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

use super::control_queue::ControlQueue;
use super::counters::{Counts, VhostUserCounters};
use super::error::ServerError;
use super::events::QueueEvents;
use super::kicker::Kicker;
use super::link::{Address, Connected};
use super::mapper::VhostUserMapper;
use super::model::{ConfigSource, Model};
use super::session::Session;
use super::watcher::{Shared, Watcher};
use crate::dma::DmaTable;
use crate::ram::RamRegion;
use crate::state::{DeviceState, StateError};
use crate::sync::lock;
use crate::virtio::device::read_bytes;
use crate::virtio::{DeviceError, DeviceProperties, Driver, QueueState, VirtioDevice};

/// Error text for an attempt to save or restore the device.
const NO_STATE: &str =
    "a vhost-user device cannot be saved or restored, because its state is in the server; remove the device first";

/// Front end of a vhost-user device.
pub struct VhostUserDevice {
    model: Model,
    features: u64,
    queue_sizes: Vec<u16>,
    shared: Arc<Shared>,
    events: Arc<Vec<QueueEvents>>,
    kicker: Arc<Kicker>,
    counts: Arc<Counts>,
    control: Option<ControlQueue>,
    _watcher: Watcher,
}

impl VhostUserDevice {
    /// Connects to the server at `address` and creates the device. `table` contains the mappings if the device is behind the virtio-iommu.
    pub(super) fn connect(address: Address, table: Option<Arc<DmaTable>>) -> Result<Self, ServerError> {
        let host = |source| ServerError::Host { what: "create the vhost-user device", source };
        let Connected { link, socket, back_channel } = address.connect_first()?;
        let (model, counts) = (address.model.clone(), Arc::new(Counts::default()));
        Counts::add(&counts.server_connections);
        let (features, config) = (link.offer.for_driver(&model), link.offer.config.clone());
        let session = Session::new(&address.id, model.clone(), link, counts.clone(), table).map_err(host)?;
        let (events, kicker) = (session.events.clone(), session.kicker.clone());
        let shared = Arc::new(Shared::new(session, config).map_err(host)?);
        let control = model.pairs.map(|pairs| ControlQueue::new(&address.id, pairs, shared.clone()));
        let control = control.transpose().map_err(host)?;
        let watcher = Watcher::spawn(shared.clone(), address, socket, back_channel).map_err(host)?;
        let queue_sizes = model.queue_sizes();
        Ok(Self { model, features, queue_sizes, shared, events, kicker, counts, control, _watcher: watcher })
    }

    /// Returns the control queue if queue `index` is the control queue.
    fn control(&self, index: u16) -> Option<&ControlQueue> {
        self.control.as_ref().filter(|control| control.has_index(index))
    }

    /// Returns the counters.
    pub fn counters(&self) -> VhostUserCounters {
        self.counts.read()
    }

    /// Returns a mapper that fills `table`. The caller passes the table that the device was created with.
    pub(super) fn mapper(&self, table: Arc<DmaTable>) -> VhostUserMapper {
        VhostUserMapper::new(self.shared.clone(), table)
    }

    /// Sends the server a new region of guest RAM.
    ///
    /// # Errors
    /// The server does not accept the region, or no file backs the region.
    pub fn add_ram(&self, region: &RamRegion) -> Result<(), ServerError> {
        self.shared.session_first().add_ram(region)
    }

    /// Removes a region of RAM from the server, because the region could not be added to the guest.
    pub fn take_ram(&self, region: &RamRegion) {
        self.shared.session_first().take_ram(region);
    }
}

impl VirtioDevice for VhostUserDevice {
    fn properties(&self) -> DeviceProperties<'_> {
        let Model { device_type, pci_class, .. } = self.model;
        DeviceProperties::new(device_type, pci_class, self.features, &self.queue_sizes, self.model.config_len())
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_bytes(&lock(&self.shared.config), offset, data);
    }

    fn write_config(&self, offset: usize, data: &[u8]) {
        let ConfigSource::Server { writable, .. } = &self.model.config else { return };
        let Some(end) = offset.checked_add(data.len()) else { return };
        let Ok(place) = u32::try_from(offset) else { return };
        if data.is_empty() || offset < writable.start || end > writable.end {
            return;
        }
        if self.shared.session_first().write_config(place, data)
            && let Some(bytes) = lock(&self.shared.config).get_mut(offset..end)
        {
            bytes.copy_from_slice(data);
        }
    }

    fn activate(&self, driver: Driver) {
        if let Some(control) = &self.control {
            control.activate(driver.clone());
        }
        self.shared.session_first().activate(driver);
    }

    fn start_queue(&self, index: u16, queue: Queue) -> io::Result<()> {
        if let (Some(control), Some(doorbell)) = (self.control(index), self.doorbell(index)) {
            return control.start(index, queue, doorbell);
        }
        self.shared.session_first().start(index, &queue);
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Option<QueueState> {
        self.control(index).map_or_else(|| self.shared.session_first().stop(index), ControlQueue::stop)
    }

    fn queue_state(&self, index: u16) -> Option<QueueState> {
        self.control(index).map_or_else(|| self.shared.session_first().state(index), ControlQueue::state)
    }

    fn doorbell(&self, queue: u16) -> Option<&EventFd> {
        // When the transport disconnects a doorbell, this method must return the same eventfd as when the transport connected the doorbell.
        // So the result must not depend on the features that the current driver accepted.
        let of_server = self.events.get(usize::from(queue)).map(|events| &events.kick);
        of_server.or_else(|| self.control.as_ref()?.doorbell(queue))
    }

    /// Notifies the server of new buffers in `queue`, after the driver's notification has exited to the VMM.
    fn notify(&self, queue: u16) -> Result<(), DeviceError> {
        if let Some(doorbell) = self.control.as_ref().and_then(|control| control.doorbell(queue)) {
            // The write fails only if the eventfd's counter would overflow. A notification is then already pending.
            let _ = doorbell.write(1);
        }
        self.kicker.kick(queue);
        Ok(())
    }

    fn reset(&self) {
        if let Some(control) = &self.control {
            control.reset();
        }
        self.shared.session_first().reset();
    }

    fn pause(&self) {
        // Pause the control queue first, so that the pause does not interrupt a command of the driver.
        self.control.iter().for_each(ControlQueue::pause);
        self.shared.session_first().pause();
    }

    fn resume(&self) {
        self.shared.session_first().resume();
        self.control.iter().for_each(ControlQueue::resume);
    }

    fn save(&self) -> Result<DeviceState, StateError> {
        Err(StateError::Unsupported(NO_STATE))
    }

    fn restore(&self, _: &DeviceState) -> Result<(), StateError> {
        Err(StateError::Unsupported(NO_STATE))
    }
}
