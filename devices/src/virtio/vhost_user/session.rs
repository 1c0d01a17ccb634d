// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device between its driver and its server: which queues run, and what a server must be told so that they do.
//!
//! All of it is behind one lock, which is held while the server is asked for something, each time for a while at most.

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

/// A server with what was agreed on.
pub(super) struct Link {
    pub(super) connection: Connection,
    pub(super) offer: Offer,
}

/// A queue that the driver has set up.
struct ActiveQueue {
    rings: Rings,
    /// How far it was served when it stood still last.
    state: QueueState,
    /// The server has it.
    runs: bool,
}

/// See the module.
pub(super) struct Session {
    id: String,
    model: Model,
    link: Option<Link>,
    driver: Option<Driver>,
    queues: Vec<Option<ActiveQueue>>,
    /// Of a network card with several pairs of queues: how many its driver uses.
    pairs: Option<u16>,
    /// The server's account of requests.
    inflight: Option<(VhostUserInflight, File)>,
    /// Of a device behind the virtio-iommu.
    translation: Option<Translation>,
    /// First addresses of the regions of RAM that the server has.
    shown: BTreeSet<u64>,
    paused: bool,
    /// The driver was told that the device has failed.
    broken: bool,
    pub(super) events: Arc<Vec<QueueEvents>>,
    pub(super) kicker: Arc<Kicker>,
    pub(super) errors: Arc<EventFd>,
    pub(super) counts: Arc<Counts>,
}

impl Session {
    /// `table` has the mappings of a device behind the virtio-iommu.
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
            shown: BTreeSet::new(),
            paused: false,
            broken: false,
            kicker: Arc::new(Kicker::new(id, events.clone())?),
            events,
            errors: Arc::new(event()?),
            counts,
            model,
        })
    }

    /// A driver is ready.
    pub(super) fn activate(&mut self, driver: Driver) {
        self.driver = Some(driver);
        self.broken = false;
        self.pairs = self.model.pairs.map(|_| 1);
        let prepared = self.prepare();
        self.note(prepared);
    }

    /// Queue `index` may run from now on.
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

    /// Queue `index` is no longer served. Returns how far it was, if it was started.
    pub(super) fn stop(&mut self, index: u16) -> Option<QueueState> {
        let stopped = self.halt_queue(index);
        self.note(stopped);
        self.queues.get_mut(usize::from(index))?.take().map(|queue| queue.state)
    }

    /// How far a queue is served that stands still.
    pub(super) fn state(&self, index: u16) -> Option<QueueState> {
        self.queues.get(usize::from(index))?.as_ref().map(|queue| queue.state)
    }

    /// The driver is gone. All queues were stopped.
    pub(super) fn reset(&mut self) {
        if self.driver.take().is_some()
            && let Some(link) = self.link.as_mut().filter(|link| link.offer.has(Protocol::RESET_DEVICE))
        {
            let reset = link.connection.reset_device();
            self.note(reset);
        }
        (self.inflight, self.broken) = (None, false);
        self.translation.iter_mut().for_each(Translation::reset);
        self.shown.clear();
    }

    /// The driver uses so many pairs of queues, and the server is to use no others.
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
            // The next server is told.
            _ => Ok(()),
        }
    }

    /// Has all queues stand still.
    pub(super) fn pause(&mut self) {
        self.paused = true;
        self.halt();
    }

    /// Lets them go on.
    pub(super) fn resume(&mut self) {
        self.paused = false;
        if !self.broken {
            let resumed = self.run();
            self.note(resumed);
        }
    }

    /// The guest gets this region of RAM.
    pub(super) fn add_ram(&mut self, region: &RamRegion) -> Result<(), ServerError> {
        let gpa = region.start_addr().raw_value();
        let (Some(link), Some(driver)) = (&mut self.link, &self.driver) else { return Ok(()) };
        if self.broken || self.shown.contains(&gpa) {
            return Ok(());
        }
        let most = link.offer.regions;
        if self.shown.len() + self.translation.as_ref().map_or(0, Translation::regions) >= most {
            return Err(ServerError::Unfit(format!("takes {most} regions of RAM, and has them all")));
        }
        let added = if link.offer.has(Protocol::CONFIGURE_MEM_SLOTS) {
            link.connection.add_memory(region)
        } else {
            // A server may not do with less for a moment what its queues are in.
            let ram = driver.memory.ram().clone();
            let known: Vec<&RamRegion> =
                ram.iter().filter(|other| self.shown.contains(&other.start_addr().raw_value())).collect();
            self.halt();
            let told = match &mut self.link {
                Some(link) => link.connection.set_memory(&[known.as_slice(), &[region]].concat()),
                None => Ok(()),
            };
            let runs = if self.paused { Ok(()) } else { self.run() };
            told.and(runs)
        };
        match added {
            Ok(()) => {
                self.shown.insert(gpa);
                Ok(())
            }
            Err(error) => {
                self.count(&error);
                Err(error)
            }
        }
    }

    /// The guest does not get it after all.
    pub(super) fn take_ram(&mut self, region: &RamRegion) {
        let shown = self.shown.remove(&region.start_addr().raw_value());
        let slots = self.link.as_mut().filter(|link| shown && link.offer.has(Protocol::CONFIGURE_MEM_SLOTS));
        // A server that knows no single regions keeps it: the guest cannot tell, as it has nothing there.
        let taken = slots.map_or(Ok(()), |link| link.connection.remove_memory(region));
        self.note(taken);
    }

    /// The server asks for the mapping that an access needs; whether it has got it.
    pub(super) fn translate(&mut self, iova: u64, access: Permissions) -> bool {
        let (Some(translation), Some(link)) = (&mut self.translation, &mut self.link) else { return false };
        // Without a driver there is nothing that it could access.
        if self.driver.is_none() {
            return false;
        }
        let told = translation.answer(&mut link.connection, iova, access);
        told.unwrap_or_else(|error| {
            self.note(Err(error));
            false
        })
    }

    /// The server was stopped at an access.
    pub(super) fn stopped(&mut self, iova: u64, access: Permissions) {
        self.translation.iter_mut().for_each(|translation| translation.report(iova, access));
    }

    /// Has the server forget what it knows of a range that nothing is told of any more. A server that does not say that it has, within
    /// its time from `begin` on, is given up, and the device fails.
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
        let reason = format!("does not forget what was unmapped: {}", error.reason());
        connection.give_up(reason.clone());
        self.count(&error);
        self.fail(&reason);
        Err(error)
    }

    /// Memory that is in this part of a file, `len` bytes, is mapped.
    pub(super) fn add_region(&mut self, name: RegionName, len: u64, part: FilePart) -> Result<(), ServerError> {
        let (Some(translation), has) = (&mut self.translation, self.shown.len()) else { return Ok(()) };
        let most = self.link.as_ref().map_or(usize::MAX, |link| link.offer.regions);
        let connection = self.link.as_mut().map(|link| &mut link.connection).filter(|_| has != 0);
        let added = translation.add_region(connection, name, (len, part), (has, most));
        added.inspect_err(|error| self.count(error))
    }

    /// It is no longer.
    pub(super) fn take_region(&mut self, name: RegionName) {
        let Some(translation) = &mut self.translation else { return };
        let taken = translation.take_region(self.link.as_mut().map(|link| &mut link.connection), name);
        self.note(taken);
    }

    /// Asks the server for the device configuration anew; `None` if it cannot be had.
    pub(super) fn read_config(&mut self) -> Option<Vec<u8>> {
        let link = self.link.as_mut().filter(|_| self.model.asks_for_config())?;
        let config = offer::read_config(&mut link.connection, &self.model);
        config.map_err(|error| self.note(Err(error))).ok()
    }

    /// Writes the device configuration; `false` if the server did not take it.
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

    /// Tells the driver that the device's configuration is another one.
    pub(super) fn config_changed(&self) {
        if let Some(driver) = &self.driver {
            driver.interrupt.config_changed(true);
        }
    }

    /// The driver has used buffers in this queue.
    pub(super) fn queue_used(&self, index: u16) {
        if let Some(driver) = &self.driver {
            driver.interrupt.queue_used(index);
        }
    }

    /// The server says that it has found a queue to be broken.
    pub(super) fn queue_broken(&mut self) {
        self.fail("reports an error in a queue");
    }

    /// The server has closed the connection, or it was ended.
    pub(super) fn lost(&mut self) {
        let Some(link) = self.link.take() else { return };
        let reason = link.connection.gone().unwrap_or("closed the connection").to_string();
        error!("{}: the vhost-user server {reason}", self.id);
        self.shown.clear();
        self.translation.iter_mut().for_each(Translation::lost);
        let ran = self.queues.iter().flatten().any(|queue| queue.runs);
        for index in 0..self.queues.len() {
            let used = self.used_index(index);
            if let Some(queue) = self.queues[index].as_mut().filter(|queue| queue.runs) {
                queue.runs = false;
                // Requests that were answered are done, whatever the server had taken beyond them.
                let done = used.unwrap_or(queue.state.next_used);
                queue.state = QueueState { next_avail: done, next_used: done };
            }
        }
        match (self.model.on_loss, self.pending().filter(|_| self.inflight.is_none())) {
            (OnLoss::Fail, _) if ran => self.fail(&reason),
            (OnLoss::GoOn, Some(count)) if ran => {
                self.fail(&format!("{reason}, with {count} requests under way of which it kept no account"));
            }
            _ => {}
        }
        // Whoever sees the count sees what came of it.
        Counts::add(&self.counts.server_losses);
    }

    /// Another server is there.
    pub(super) fn adopt(&mut self, link: Link) {
        info!("{}: connected to a vhost-user server again", self.id);
        Counts::add(&self.counts.server_connections);
        let accepted = self.driver.as_ref().map_or(0, |driver| driver.features);
        // The transport's own are between it and the driver.
        let own = self.model.own_features | super::spec::VERSION_1;
        let fits = link.offer.can_go_on(accepted, own);
        self.link = Some(link);
        if self.driver.is_none() || self.broken {
            return;
        }
        if !fits {
            self.fail("offers less than the one before it");
            return;
        }
        let prepared = self.prepare().and_then(|()| if self.paused { Ok(()) } else { self.run() });
        self.note(prepared);
    }

    /// Tells the server what holds for the whole device.
    fn prepare(&mut self) -> Result<(), ServerError> {
        let gone = || ServerError::Gone("is not there".into());
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
            let rule = format!("takes {} regions of RAM, and the guest has {count}", offer.regions);
            return Err(ServerError::Unfit(rule));
        }
        // A message has room for so many.
        let (first, rest) = regions.split_at(regions.len().min(BASE_REGIONS));
        connection.set_memory(first)?;
        rest.iter().try_for_each(|region| connection.add_memory(region))?;
        self.translation.as_mut().map_or(Ok(()), |translation| translation.give_regions(connection))?;
        self.shown = regions.iter().map(|region| region.start_addr().raw_value()).collect();
        Ok(())
    }

    /// Gives the server a queue that stands still.
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
        // What came while it stood still.
        self.kicker.kick(index);
        Ok(())
    }

    fn run(&mut self) -> Result<(), ServerError> {
        (0..self.queue_count()).try_for_each(|index| self.run_queue(index))
    }

    /// Takes a queue from the server.
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

    /// Index of the next element of the used ring, as the server has written it.
    fn used_index(&self, index: usize) -> Option<u16> {
        self.ring_index(self.queues.get(index)?.as_ref()?.rings.used)
    }

    /// How many requests of all queues are not done, if any.
    fn pending(&self) -> Option<u32> {
        let of = |queue: &ActiveQueue| {
            let available = Wrapping(self.ring_index(queue.rings.available)?);
            Some(u32::from((available - Wrapping(queue.state.next_used)).0))
        };
        let count = self.queues.iter().flatten().filter_map(of).sum();
        (count > 0).then_some(count)
    }

    /// Tells the driver that the device cannot go on.
    fn fail(&mut self, reason: &str) {
        if let (false, Some(driver)) = (self.broken, &self.driver) {
            self.broken = true;
            driver.interrupt.failed(&DeviceError::Server { reason: reason.into() });
        }
    }

    /// What to do about a server that is gone the thread that waits for it decides, which looks for another. One that refuses what
    /// the device needs would do so again.
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
