// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Session that connects the driver and the server of a device. The session keeps the state of the driver's queues, and asks the server to
//! start and stop these queues.
//!
//! One lock protects the whole session. A thread also holds the lock while it waits for an answer of the server. This wait has a time
//! limit.

use std::collections::BTreeSet;
use std::fs::File;
use std::num::Wrapping;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use iommu_bounce::Permissions;
use log::{error, info};
use vhost::vhost_user::message::{VhostUserInflight, VhostUserProtocolFeatures as Protocol};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::connection::{Connection, Rings};
use super::counters::Counts;
use super::error::ServerError;
use super::events::QueueEvents;
use super::kicker::Kicker;
use super::model::{Model, OnLoss};
use super::offer::{self, BASE_REGIONS, Offer};
use super::spec::RING_INDEX;
use super::translation::{FilePart, RegionName, Translation};
use crate::dma::DmaTable;
use crate::ram::{Ram, RamRegion};
use crate::virtio::{DeviceError, Driver, QueueState};

/// Connection to a server, and the negotiated capabilities.
pub(super) struct Link {
    pub(super) connection: Connection,
    pub(super) offer: Offer,
}

/// Queue that the driver has set up.
struct ActiveQueue {
    rings: Rings,
    /// Position in the rings when the queue was last stopped.
    state: QueueState,
    /// True if the server serves the queue.
    runs: bool,
}

/// Session of a device, as described in the module documentation.
pub(super) struct Session {
    id: String,
    model: Model,
    link: Option<Link>,
    driver: Option<Driver>,
    queues: Vec<Option<ActiveQueue>>,
    /// Number of queue pairs that the driver uses. `None` unless the device is a network card with more than one pair.
    pairs: Option<u16>,
    /// File in which the server records requests in flight.
    inflight: Option<(VhostUserInflight, File)>,
    /// Translations. `None` unless the device is behind the virtio-iommu.
    translation: Option<Translation>,
    /// First addresses of the RAM regions that the server has.
    sent: BTreeSet<u64>,
    paused: bool,
    /// True if a failure of the device was reported to the driver.
    broken: bool,
    pub(super) events: Arc<Vec<QueueEvents>>,
    pub(super) kicker: Arc<Kicker>,
    pub(super) errors: Arc<EventFd>,
    pub(super) counts: Arc<Counts>,
}

impl Session {
    /// Starts a session. `table` contains the mappings if the device is behind the virtio-iommu.
    pub(super) fn new(
        id: &str,
        model: Model,
        link: Link,
        counts: Arc<Counts>,
        table: Option<Arc<DmaTable>>,
    ) -> std::io::Result<Self> {
        let event = || EventFd::new(EFD_NONBLOCK);
        let events = model.queues.iter().map(|_| Ok(QueueEvents { kick: event()?, call: event()? }));
        let events: Arc<Vec<_>> = Arc::new(events.collect::<std::io::Result<_>>()?);
        Ok(Self {
            id: id.into(),
            link: Some(link),
            driver: None,
            queues: model.queues.iter().map(|_| None).collect(),
            pairs: model.pairs.map(|_| 1),
            inflight: None,
            translation: table.map(Translation::new),
            sent: BTreeSet::new(),
            paused: false,
            broken: false,
            kicker: Arc::new(Kicker::new(id, events.clone())?),
            events,
            errors: Arc::new(event()?),
            counts,
            model,
        })
    }

    /// Activates the device for a driver that is ready.
    pub(super) fn activate(&mut self, driver: Driver) {
        self.driver = Some(driver);
        self.broken = false;
        self.pairs = self.model.pairs.map(|_| 1);
        let prepared = self.prepare();
        self.note(prepared);
    }

    /// Stores queue `index`. Starts the queue on the server, unless the device is paused or has failed.
    pub(super) fn start(&mut self, index: u16, queue: &Queue) {
        let rings = Rings {
            size: queue.size(),
            descriptors: queue.desc_table(),
            available: queue.avail_ring(),
            used: queue.used_ring(),
        };
        let Some(place) = self.queues.get_mut(usize::from(index)) else { return };
        *place = Some(ActiveQueue { rings, state: QueueState::of(queue), runs: false });
        if !self.paused && !self.broken {
            let started = self.run_queue(index);
            self.note(started);
        }
    }

    /// Stops queue `index`. Returns the queue's position after the stop, or `None` if the queue was not started.
    pub(super) fn stop(&mut self, index: u16) -> Option<QueueState> {
        let stopped = self.halt_queue(index);
        self.note(stopped);
        self.queues.get_mut(usize::from(index))?.take().map(|queue| queue.state)
    }

    /// Returns the position of a stopped queue.
    pub(super) fn state(&self, index: u16) -> Option<QueueState> {
        self.queues.get(usize::from(index))?.as_ref().map(|queue| queue.state)
    }

    /// Drops the driver. If the server supports `RESET_DEVICE`, resets the server's device. The caller has stopped all queues.
    pub(super) fn reset(&mut self) {
        if self.driver.take().is_some()
            && let Some(link) = self.link.as_mut().filter(|link| link.offer.has(Protocol::RESET_DEVICE))
        {
            let reset = link.connection.reset_device();
            self.note(reset);
        }
        (self.inflight, self.broken) = (None, false);
        self.translation.iter_mut().for_each(Translation::reset);
        self.sent.clear();
    }

    /// Enables the first `pairs` queue pairs on the server, and disables all other pairs.
    pub(super) fn set_pairs(&mut self, pairs: u16) -> Result<(), ServerError> {
        let before = self.pairs.replace(pairs);
        let Some(link) = &mut self.link else { return Ok(()) };
        let mut done = Ok(());
        for (index, queue) in (0..).zip(&self.queues) {
            if done.is_ok() && queue.as_ref().is_some_and(|queue| queue.runs) {
                done = link.connection.enable_queue(index, index / 2 < pairs);
            }
        }
        match done {
            Err(error @ ServerError::Refused(_)) => {
                self.pairs = before;
                self.count(&error);
                Err(error)
            }
            // If the server was lost, the next server gets the number from `self.pairs`.
            _ => Ok(()),
        }
    }

    /// Stops all queues.
    pub(super) fn pause(&mut self) {
        self.paused = true;
        self.halt();
    }

    /// Starts all queues again, unless the device has failed.
    pub(super) fn resume(&mut self) {
        self.paused = false;
        if !self.broken {
            let resumed = self.run();
            self.note(resumed);
        }
    }

    /// Sends the server a new region of guest RAM.
    pub(super) fn add_ram(&mut self, region: &RamRegion) -> Result<(), ServerError> {
        let gpa = region.start_addr().raw_value();
        let (Some(link), Some(driver)) = (&mut self.link, &self.driver) else { return Ok(()) };
        if self.broken || self.sent.contains(&gpa) {
            return Ok(());
        }
        let most = link.offer.regions;
        if self.sent.len() + self.translation.as_ref().map_or(0, Translation::regions) >= most {
            return Err(ServerError::Unfit(format!(
                "supports {most} memory regions, and all are in use; use a server with more regions"
            )));
        }
        let added = if link.offer.has(Protocol::CONFIGURE_MEM_SLOTS) {
            link.connection.add_memory(region)
        } else {
            // Stop the queues first: while the server replaces its memory table, it may not have the regions that contain the rings.
            let ram = driver.memory.ram().clone();
            let known: Vec<&RamRegion> =
                ram.iter().filter(|other| self.sent.contains(&other.start_addr().raw_value())).collect();
            self.halt();
            let outcome = match &mut self.link {
                Some(link) => link.connection.set_memory(&[known.as_slice(), &[region]].concat()),
                None => Ok(()),
            };
            let runs = if self.paused { Ok(()) } else { self.run() };
            outcome.and(runs)
        };
        match added {
            Ok(()) => {
                self.sent.insert(gpa);
                Ok(())
            }
            Err(error) => {
                self.count(&error);
                Err(error)
            }
        }
    }

    /// Removes a region of RAM from the server, because the region could not be added to the guest.
    pub(super) fn take_ram(&mut self, region: &RamRegion) {
        let sent = self.sent.remove(&region.start_addr().raw_value());
        let slots = self.link.as_mut().filter(|link| sent && link.offer.has(Protocol::CONFIGURE_MEM_SLOTS));
        // A server that does not support removal keeps the region. This is harmless, because the guest has no RAM at the address.
        let taken = slots.map_or(Ok(()), |link| link.connection.remove_memory(region));
        self.note(taken);
    }

    /// Sends the server the translation for an access. Returns false if the server did not get a translation.
    pub(super) fn translate(&mut self, iova: u64, access: Permissions) -> bool {
        let (Some(translation), Some(link)) = (&mut self.translation, &mut self.link) else { return false };
        // Without a driver, the server must not access any memory.
        if self.driver.is_none() {
            return false;
        }
        let outcome = translation.answer(&mut link.connection, iova, access);
        outcome.unwrap_or_else(|error| {
            self.note(Err(error));
            false
        })
    }

    /// Reports to the guest that the server has denied an access.
    pub(super) fn stopped(&mut self, iova: u64, access: Permissions) {
        self.translation.iter_mut().for_each(|translation| translation.report(iova, access));
    }

    /// Asks the server to drop its translations of a range that is already blocked in the table. The time limit starts at `begin`. If the
    /// server does not confirm in time, the connection is closed and the device fails.
    pub(super) fn forget(&mut self, iova: u64, len: u64, begin: Instant) -> Result<(), ServerError> {
        let (Some(translation), Some(link)) = (&mut self.translation, &mut self.link) else { return Ok(()) };
        let connection = &mut link.connection;
        if connection.gone().is_some() {
            return Ok(());
        }
        let time = connection.time().saturating_sub(begin.elapsed());
        let Err(error) = translation.forget(connection, iova, len, time) else { return Ok(()) };
        if connection.has_left() {
            return Ok(());
        }
        let reason = format!("did not drop its translation of memory that the guest unmapped: {error}");
        connection.give_up(reason.clone());
        self.count(&error);
        self.fail(&reason);
        Err(error)
    }

    /// Adds one use of a memory region, for a new mapping. The region has `len` bytes. The file part `part` backs the region.
    pub(super) fn add_region(&mut self, name: RegionName, len: u64, part: FilePart) -> Result<(), ServerError> {
        let (Some(translation), has) = (&mut self.translation, self.sent.len()) else { return Ok(()) };
        let most = self.link.as_ref().map_or(usize::MAX, |link| link.offer.regions);
        let connection = self.link.as_mut().map(|link| &mut link.connection).filter(|_| has != 0);
        let added = translation.add_region(connection, name, (len, part), (has, most));
        added.inspect_err(|error| self.count(error))
    }

    /// Removes one use of a memory region. When the last use ends, the region is removed from the server.
    pub(super) fn take_region(&mut self, name: RegionName) {
        let Some(translation) = &mut self.translation else { return };
        let taken = translation.take_region(self.link.as_mut().map(|link| &mut link.connection), name);
        self.note(taken);
    }

    /// Re-reads the device configuration from the server. Returns `None` if the server does not send the configuration, or if the front end
    /// itself provides the configuration.
    pub(super) fn read_config(&mut self) -> Option<Vec<u8>> {
        let link = self.link.as_mut().filter(|_| self.model.asks_for_config())?;
        let config = offer::read_config(&mut link.connection, &self.model);
        config.map_err(|error| self.note(Err(error))).ok()
    }

    /// Writes the device configuration. Returns false if the server did not accept the write.
    pub(super) fn write_config(&mut self, offset: u32, value: &[u8]) -> bool {
        let Some(link) = &mut self.link else { return false };
        match link.connection.set_config(offset, value) {
            Ok(()) => true,
            Err(error) => {
                self.count(&error);
                false
            }
        }
    }

    /// Notifies the driver of a changed device configuration.
    pub(super) fn config_changed(&self) {
        if let Some(driver) = &self.driver {
            driver.interrupt.config_changed(true);
        }
    }

    /// Notifies the driver of used buffers in this queue.
    pub(super) fn queue_used(&self, index: u16) {
        if let Some(driver) = &self.driver {
            driver.interrupt.queue_used(index);
        }
    }

    /// Fails the device because the server reported an error in a queue.
    pub(super) fn queue_broken(&mut self) {
        self.fail("reported an error in a queue");
    }

    /// Handles the end of the connection to the server.
    pub(super) fn lost(&mut self) {
        let Some(link) = self.link.take() else { return };
        let reason = link.connection.gone().unwrap_or("closed the connection").to_string();
        error!("{}: the vhost-user server {reason}", self.id);
        self.sent.clear();
        self.translation.iter_mut().for_each(Translation::lost);
        let ran = self.queues.iter().flatten().any(|queue| queue.runs);
        for index in 0..self.queues.len() {
            let used = self.used_index(index);
            if let Some(queue) = self.queues[index].as_mut().filter(|queue| queue.runs) {
                queue.runs = false;
                // The server has completed all requests that it has added to the used ring. The next server must serve all later requests,
                // even if the lost server had already taken these requests.
                let done = used.unwrap_or(queue.state.next_used);
                queue.state = QueueState { next_avail: done, next_used: done };
            }
        }
        match (self.model.on_loss, self.pending().filter(|_| self.inflight.is_none())) {
            (OnLoss::Fail, _) if ran => self.fail(&reason),
            (OnLoss::GoOn, Some(count)) if ran => {
                self.fail(&format!(
                    "{reason}, and did not record its {count} requests in flight, so no other server can continue them"
                ));
            }
            _ => {}
        }
        // Count the loss last, so that a reader of the counter also sees all effects of the loss.
        Counts::add(&self.counts.server_losses);
    }

    /// Continues with another server.
    pub(super) fn adopt(&mut self, link: Link) {
        info!("{}: reconnected to the vhost-user server", self.id);
        Counts::add(&self.counts.server_connections);
        let accepted = self.driver.as_ref().map_or(0, |driver| driver.features);
        // The server need not support these features: the front end and the transport implement them.
        let own = self.model.own_features | super::spec::VERSION_1;
        let fits = link.offer.can_go_on(accepted, own);
        self.link = Some(link);
        if self.driver.is_none() || self.broken {
            return;
        }
        if !fits {
            self.fail("lacks features that the driver negotiated with the previous server");
            return;
        }
        let prepared = self.prepare().and_then(|()| if self.paused { Ok(()) } else { self.run() });
        self.note(prepared);
    }

    /// Prepares the server for the driver. Sends the accepted features, the file for requests in flight, and the memory regions.
    fn prepare(&mut self) -> Result<(), ServerError> {
        let gone = || ServerError::Gone("is not connected".into());
        let driver = self.driver.as_ref().ok_or_else(gone)?;
        let Link { connection, offer } = self.link.as_mut().ok_or_else(gone)?;
        connection.set_features(offer.for_server(driver.features))?;
        if offer.has(Protocol::INFLIGHT_SHMFD) {
            if self.inflight.is_none() {
                let queues = u16::try_from(self.queues.len()).unwrap_or(u16::MAX);
                let size = self.model.queues.iter().max().copied().unwrap_or(0);
                self.inflight = Some(connection.new_inflight(queues, size)?);
            }
            if let Some((inflight, file)) = &self.inflight {
                connection.set_inflight(inflight, file)?;
            }
        }
        let ram: &Ram = driver.memory.ram();
        let regions: Vec<&RamRegion> = ram.iter().collect();
        let count = regions.len() + self.translation.as_ref().map_or(0, Translation::regions);
        if count > offer.regions {
            let rule = format!(
                "supports {} memory regions, but the device needs {count}; use a server with more regions",
                offer.regions
            );
            return Err(ServerError::Unfit(rule));
        }
        // One SET_MEM_TABLE message has room for `BASE_REGIONS` regions.
        let (first, rest) = regions.split_at(regions.len().min(BASE_REGIONS));
        connection.set_memory(first)?;
        rest.iter().try_for_each(|region| connection.add_memory(region))?;
        self.translation.as_mut().map_or(Ok(()), |translation| translation.give_regions(connection))?;
        self.sent = regions.iter().map(|region| region.start_addr().raw_value()).collect();
        Ok(())
    }

    /// Starts a stopped queue on the server.
    fn run_queue(&mut self, index: u16) -> Result<(), ServerError> {
        let (Some(link), Some(driver)) = (&mut self.link, &self.driver) else { return Ok(()) };
        let Some(Some(queue)) = self.queues.get_mut(usize::from(index)) else { return Ok(()) };
        let events = &self.events[usize::from(index)];
        let interrupt = driver.interrupt.queue_event(index);
        link.connection.set_queue(index, &queue.rings, queue.state.next_avail)?;
        queue.runs = true;
        link.connection.set_events(index, interrupt.as_ref().unwrap_or(&events.call), &self.errors, &events.kick)?;
        if link.offer.enables_queues() {
            link.connection.enable_queue(index, self.pairs.is_none_or(|pairs| index / 2 < pairs))?;
        }
        // The driver may have added buffers while the queue was stopped.
        self.kicker.kick(index);
        Ok(())
    }

    fn run(&mut self) -> Result<(), ServerError> {
        (0..self.queue_count()).try_for_each(|index| self.run_queue(index))
    }

    /// Stops a queue on the server.
    fn halt_queue(&mut self, index: u16) -> Result<(), ServerError> {
        let Some(Some(queue)) = self.queues.get_mut(usize::from(index)) else { return Ok(()) };
        let Some(link) = self.link.as_mut().filter(|_| queue.runs) else { return Ok(()) };
        if link.offer.enables_queues() {
            link.connection.enable_queue(index, false)?;
        }
        let next_avail = link.connection.stop_queue(index)?;
        let next_used = self.used_index(index.into());
        if let Some(Some(queue)) = self.queues.get_mut(usize::from(index)) {
            queue.state = QueueState { next_avail, next_used: next_used.unwrap_or(next_avail) };
            queue.runs = false;
        }
        Ok(())
    }

    fn halt(&mut self) {
        for index in 0..self.queue_count() {
            let halted = self.halt_queue(index);
            self.note(halted);
        }
    }

    fn queue_count(&self) -> u16 {
        u16::try_from(self.queues.len()).unwrap_or(u16::MAX)
    }

    fn ring_index(&self, ring: u64) -> Option<u16> {
        let memory = &self.driver.as_ref()?.memory;
        let index: u16 = memory.view().load(GuestAddress(ring.checked_add(RING_INDEX)?), Ordering::Acquire).ok()?;
        Some(u16::from_le(index))
    }

    /// Reads the server's index from the used ring of a queue.
    fn used_index(&self, index: usize) -> Option<u16> {
        self.ring_index(self.queues.get(index)?.as_ref()?.rings.used)
    }

    /// Returns the number of incomplete requests in all queues, or `None` if this number is 0.
    fn pending(&self) -> Option<u32> {
        let of = |queue: &ActiveQueue| {
            let available = Wrapping(self.ring_index(queue.rings.available)?);
            Some(u32::from((available - Wrapping(queue.state.next_used)).0))
        };
        let count = self.queues.iter().flatten().filter_map(of).sum();
        (count > 0).then_some(count)
    }

    /// Reports to the driver that the device has failed.
    fn fail(&mut self, reason: &str) {
        if let (false, Some(driver)) = (self.broken, &self.driver) {
            self.broken = true;
            driver.interrupt.failed(&DeviceError::Server { reason: reason.into() });
        }
    }

    /// Handles an error. If the server is gone, the watcher's thread handles the loss and connects to another server. After any other error
    /// the device fails, because the server would refuse the same request again.
    fn note(&mut self, result: Result<(), ServerError>) {
        let Err(error) = result else { return };
        self.count(&error);
        if !matches!(error, ServerError::Gone(_)) {
            self.fail(&error.reason());
        }
    }

    fn count(&mut self, error: &ServerError) {
        if matches!(error, ServerError::Refused(_)) {
            Counts::add(&self.counts.server_refusals);
            error!("{}: {error}", self.id);
        }
    }
}
