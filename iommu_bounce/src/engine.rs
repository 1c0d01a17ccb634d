// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The engine: takes requests, keeps the state, and answers.
//!
//! Requests are served one at a time, so nothing here locks. A request that fails changes nothing, unless the host
//! fails to undo a step. [`crate::space`] says what happens then.

mod attach;
mod batch;
mod bypass;
mod device;
mod map_unmap;
mod mapped;
mod parking;
mod put_off;
mod report;
mod state;
mod translate;
mod unmap_time;
mod window;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::warn;

pub use translate::{Target, Translation};

use crate::backend::{ChunkStore, DmaMapper, GuestRam, Permissions};
use crate::config::{ConfigError, EngineConfig};
use crate::counters::Counters;
use crate::domain::Domain;
use crate::endpoint::{Endpoint, usable};
use crate::fault::FaultQueue;
use crate::histogram::nanoseconds;
use crate::interrupt::{Interrupt, Pieces};
use crate::latency::RequestLatency;
use crate::probe;
use crate::report::{DomainReport, EndpointReport, Report};
use crate::space::{Space, Spaces};
use crate::spec::{MAP_F_READ, MAP_F_WRITE, Status, config, feature, property};
use crate::windows::Windows;
use crate::wire::{self, Kind, Request};
use crate::{DomainId, EndpointId};

pub use batch::UnmapRequest;
use map_unmap::unmap_run;
pub use report::DomainWindow;

/// How long requests of one batch may take until no more is taken of the host for it.
const MOST_OF_BATCH: Duration = Duration::from_secs(1);

/// When the requests of a batch were served. The end is added up where it is asked for: a request is served in less than a microsecond.
#[derive(Clone, Copy)]
struct Served {
    /// Begin of the first one.
    first: Instant,
    /// Begin of the last one.
    last: Instant,
    /// Duration of the last one.
    took: Duration,
}

/// The state of one virtio-iommu device.
pub struct Engine {
    config: EngineConfig,
    ram: Arc<dyn GuestRam>,
    windows: Option<Windows>,
    /// Features that the driver accepted.
    accepted: u64,
    /// Whether endpoints that are attached to nothing are in bypass mode.
    bypass: bool,
    /// Until when the driver cannot turn that on again.
    bypass_rests: Option<Instant>,
    /// Whether endpoints in bypass mode reach nothing until it is time to map RAM for them.
    bypass_put_off: bool,
    /// What the requests of a batch took so far, while one is served.
    batch: Option<Duration>,
    /// Times of the last batch, once a request of it was served.
    served: Option<Served>,
    /// What these endpoints have mapped then.
    identity: Domain,
    endpoints: BTreeMap<EndpointId, Endpoint>,
    spaces: Spaces,
    domains: BTreeMap<DomainId, Domain>,
    counters: Counters,
    latency: RequestLatency,
    faults: FaultQueue,
    pieces: Pieces,
    /// Mappings of devices' memory in a state that was restored, until [`restore_device_memory`](Self::restore_device_memory).
    restored_devices: Vec<wire::Map>,
}

impl Engine {
    /// Sets an engine up. `chunks` goes with `config.window`: both or neither.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the field and its rule.
    pub fn new(
        mut config: EngineConfig,
        ram: Arc<dyn GuestRam>,
        chunks: Option<Box<dyn ChunkStore>>,
    ) -> Result<Self, ConfigError> {
        config.validate(&*ram, chunks.as_deref())?;
        let windows = config.window.take().zip(chunks);
        let identity = bypass::identity(&*ram, config.granule());
        Ok(Self {
            bypass: config.bypass,
            bypass_rests: None,
            bypass_put_off: false,
            batch: None,
            served: None,
            identity,
            pieces: Pieces::new(config.limits.max_piece),
            config,
            ram,
            windows: windows.map(|(config, store)| Windows::new(config, store)),
            accepted: 0,
            endpoints: BTreeMap::new(),
            spaces: Spaces::default(),
            domains: BTreeMap::new(),
            counters: Counters::default(),
            latency: RequestLatency::default(),
            faults: FaultQueue::new(Instant::now()),
            restored_devices: Vec::new(),
        })
    }

    /// Adds an endpoint, attached to no domain. `mapper` is an empty address space to which the endpoint is attached
    /// on the host. If it has a [`group`](DmaMapper::group), the engine may attach the endpoint to another address
    /// space of that group.
    ///
    /// # Errors
    /// A [`ConfigError`] if the ID is in use, or the host cannot translate what the configuration promises.
    pub fn add_endpoint(&mut self, id: EndpointId, mapper: Box<dyn DmaMapper>) -> Result<(), ConfigError> {
        if self.endpoints.contains_key(&id) {
            return Err(ConfigError::EndpointExists(id));
        }
        let limits = mapper.limits();
        let usable = usable(&limits, &self.config.input_range, &self.config.msi_window);
        let aperture = self.windows.as_ref().map(|windows| &windows.config.aperture);
        self.config.check_endpoint(id, &limits, &usable, aperture)?;
        let space = Space::new(id, mapper, &limits, &self.config.limits, self.pieces.clone());
        let space = self.spaces.insert(space);
        self.endpoints.insert(id, Endpoint::new(usable, space));
        if self.settle(space).is_err() {
            self.endpoints.remove(&id);
            self.spaces.remove(space);
            return Err(ConfigError::EndpointBypass(id));
        }
        Ok(())
    }

    /// Removes an endpoint: detaches it, unmaps everything, and returns a mapper that is no longer needed. That is
    /// its own, or another of its group if its own serves other endpoints. The VMM must make sure that the endpoint
    /// does no DMA.
    ///
    /// What the host would not unmap goes with the mapper. A chunk among it is lost, since nobody knows when it
    /// becomes free.
    ///
    /// # Errors
    /// [`ConfigError::NoEndpoint`] if there is none of that ID.
    pub fn remove_endpoint(&mut self, id: EndpointId) -> Result<Box<dyn DmaMapper>, ConfigError> {
        self.retry_stuck();
        self.release_endpoint(id);
        let endpoint = self.endpoints.remove(&id);
        let own = endpoint.ok_or(ConfigError::NoEndpoint(id))?.space;
        // The driver would be told of an endpoint that is not there, and so would whoever restores a state with them.
        self.counters.faults_dropped += self.faults.forget(id);
        self.spaces.get_mut(own).endpoints.retain(|other| *other != id);
        let group = self.spaces.get(own).group();
        let shared = !self.spaces.get(own).endpoints.is_empty();
        let spare = if shared { self.spaces.spare(group) } else { None };
        let going = spare.unwrap_or(own);
        self.evict_from(going);
        // No endpoint is in it any more, so this unmaps what bypass has mapped.
        let ended = self.settle(going);
        debug_assert!(ended.is_ok(), "unmapping does not fail, it gets stuck");
        let space = self.spaces.remove(going).expect("an endpoint has an address space");
        if let Some(windows) = &mut self.windows {
            space.stuck_chunks().for_each(|index| windows.doom(index));
        }
        self.give_back_held();
        Ok(space.into_mapper(&mut self.counters))
    }

    /// The device-specific feature bits to offer.
    ///
    /// Not among them: `BYPASS`, which `BYPASS_CONFIG` replaces.
    pub fn features(&self) -> u64 {
        let mut features = feature::INPUT_RANGE | feature::DOMAIN_RANGE | feature::MAP_UNMAP | feature::BYPASS_CONFIG;
        if self.config.probe_size != 0 {
            features |= feature::PROBE;
        }
        if self.ram.offers_mmio() {
            features |= feature::MMIO;
        }
        if let Some(windows) = &self.windows {
            features |= if windows.config.is_high() { feature::BOUNCE_WINDOW_HIGH } else { feature::BOUNCE_WINDOW };
        }
        features
    }

    /// Sets the features that the driver accepted, when it sets `FEATURES_OK`. Bits that were not offered are
    /// ignored. While a domain exists the features cannot change, and the call does nothing.
    pub fn accept_features(&mut self, features: u64) {
        if self.domains.is_empty() {
            self.accepted = features & self.features();
            if self.active_windows().is_none() {
                // A driver without windows may map what it likes in the aperture.
                self.evict_all();
            }
        } else {
            warn!("the driver changes features without a reset: ignored");
        }
    }

    /// The device configuration. [`config_len`](Self::config_len) says how many bytes are valid; the rest is zero.
    pub fn config_space(&self) -> [u8; config::WINDOW_SIZE] {
        let mut space = [0; config::WINDOW_SIZE];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        let own = &self.config;
        put(config::PAGE_SIZE_MASK, &own.page_size_mask.to_le_bytes());
        put(config::INPUT_RANGE, &own.input_range.start().to_le_bytes());
        put(config::INPUT_RANGE + 8, &own.input_range.end().to_le_bytes());
        put(config::DOMAIN_RANGE, &own.domain_range.start().to_le_bytes());
        put(config::DOMAIN_RANGE + 4, &own.domain_range.end().to_le_bytes());
        put(config::PROBE_SIZE, &own.probe_size.to_le_bytes());
        put(config::BYPASS, &[u8::from(self.bypass)]);
        if let Some(windows) = &self.windows {
            let (aperture, chunk) = (&windows.config.aperture, windows.chunk_size());
            put(config::WINDOW_IOVA_START, &aperture.start().to_le_bytes());
            put(config::WINDOW_IOVA_END, &aperture.end().to_le_bytes());
            put(config::WINDOW_CHUNK_SIZE, &chunk.to_le_bytes());
            put(config::WINDOW_BUDGET, &windows.config.budget.to_le_bytes());
            put(config::BOUNCE_THRESHOLD, &windows.config.threshold.to_le_bytes());
        }
        space
    }

    /// Bytes of the device configuration: 40, or 80 with bounce windows.
    pub fn config_len(&self) -> usize {
        match self.windows {
            Some(_) => config::WINDOW_SIZE,
            None => config::STANDARD_SIZE,
        }
    }

    /// Serves one request.
    ///
    /// `request` is the whole device-readable part. `reply` takes the device-writable part: it is as long as that
    /// part, or [`MAX_REPLY`](crate::MAX_REPLY) bytes if that is shorter. Returns the used length: how many bytes of
    /// `reply` to write to the guest. It is 0 when the request cannot be answered: its type is unknown, or there is
    /// no room for a status. A request that is too short for its type, or whose writable part is, does nothing and
    /// gets `INVAL` in the last four bytes.
    pub fn handle(&mut self, request: &[u8], reply: &mut [u8]) -> usize {
        let began = Instant::now();
        self.retry_stuck();
        let Some(kind) = Kind::of(request).filter(|kind| self.offers(*kind)) else {
            self.counters.count_invalid();
            return 0;
        };
        let size = kind.writable_size(self.config.probe_size);
        let room = reply.len().min(size);
        let reply = &mut reply[..room];
        let request = wire::decode(kind, request).filter(|_| room == size);
        let Some(request) = request else {
            self.counters.count_invalid();
            return wire::fail(kind, reply, Status::Inval);
        };
        // One of these that fails has changed nothing, and can be handled again.
        let interruptible = matches!(request, Request::Attach(_) | Request::Map(_));
        self.pieces.set_allowed(interruptible);
        let outcome = self.serve(request, reply);
        self.pieces.set_allowed(false);
        if self.pieces.happened() {
            if outcome.is_err() {
                return 0;
            }
            self.pieces.take_happened();
        }
        let took = began.elapsed();
        self.mark(began, took);
        self.note(kind, &request, outcome.is_ok(), took);
        self.catch_up();
        outcome.unwrap_or_else(|status| wire::fail(kind, reply, status))
    }

    /// What has requests that take long be left undone.
    pub fn interrupt(&self) -> Interrupt {
        self.pieces.interrupt()
    }

    /// Whether the last request was [interrupted](Interrupt): then nothing of it is done, and it is not answered. It is to be handled
    /// once more, from its start, when nobody waits any longer.
    pub fn take_interrupted(&mut self) -> bool {
        self.pieces.take_happened()
    }

    /// The requests that follow, up to [`end_batch`](Self::end_batch), are served while their driver and all others wait. Once they
    /// took a second, those among them that take something more of the host get `NOMEM`; what gives back is served,
    /// but where that leaves an endpoint in bypass mode, RAM is mapped for it later.
    pub fn begin_batch(&mut self) {
        self.batch = Some(Duration::ZERO);
        self.served = None;
    }

    /// When the first request since [`begin_batch`](Self::begin_batch) was begun, and when the last one was answered. `None` if none was that
    /// is of a known kind. The clock is not read for it.
    pub fn served_between(&self) -> Option<(Instant, Instant)> {
        self.served.map(|Served { first, last, took }| (first, last + took))
    }

    /// Notes when a request of a batch was served, or several together.
    fn mark(&mut self, began: Instant, took: Duration) {
        if self.batch.is_none() {
            return;
        }
        match &mut self.served {
            Some(served) => (served.last, served.took) = (began, took),
            None => self.served = Some(Served { first: began, last: began, took }),
        }
    }

    /// The batch is served.
    pub fn end_batch(&mut self) {
        self.batch = None;
    }

    /// Counts a request.
    fn note(&mut self, kind: Kind, request: &Request, ok: bool, took: Duration) {
        let ns = nanoseconds(took);
        self.counters.count(kind, ok);
        self.latency.of(kind).record_ns(ns);
        if let Some(spent) = &mut self.batch {
            *spent += took;
        }
        if let Some(domain) = request.domain().and_then(|id| self.domains.get_mut(&id)) {
            domain.activity.note(kind, ok, ns);
        }
        if let Some(endpoint) = request.endpoint().and_then(|id| self.endpoints.get_mut(&id)) {
            endpoint.activity.note(kind, ok, ns);
        }
    }

    /// Whether the device knows requests of this kind.
    fn offers(&self, kind: Kind) -> bool {
        match kind {
            Kind::Probe => self.config.probe_size != 0,
            Kind::WindowAdd | Kind::WindowDel => self.windows.is_some(),
            _ => true,
        }
    }

    fn serve(&mut self, request: Request, reply: &mut [u8]) -> Result<usize, Status> {
        let takes = matches!(request, Request::Attach(_) | Request::Map(_) | Request::WindowAdd(_));
        if takes && self.is_batch_spent(Duration::ZERO) {
            return Err(Status::NoMem);
        }
        match request {
            Request::Attach(request) => self.attach(request)?,
            Request::Detach(request) => self.detach(request)?,
            Request::Map(request) => self.map(request)?,
            Request::Unmap(request) => self.unmap(request)?,
            Request::Probe(request) => return self.probe(request, reply),
            Request::WindowAdd(request) => {
                let shm_offset = self.window_add(request)?;
                return Ok(wire::window_added(reply, shm_offset));
            }
            Request::WindowDel(request) => self.window_del(request)?,
        }
        Ok(wire::done(reply))
    }

    fn probe(&self, request: wire::Probe, reply: &mut [u8]) -> Result<usize, Status> {
        let endpoint = self.endpoints.get(&request.endpoint);
        let endpoint = endpoint.ok_or(Status::NoEnt)?;
        let properties = probe::reserved(
            &self.config.input_range,
            endpoint.usable(),
            &self.config.msi_window,
            self.active_windows().map(|windows| &windows.config.aperture),
            self.config.probe_size as usize / property::RESV_MEM_SIZE,
        );
        Ok(wire::probed(reply, &properties))
    }

    /// Resets the virtio device: unmaps and forgets everything, the accepted features too. What the host would not
    /// unmap is tried again later. Where bypass is on, RAM is mapped for all endpoints, or
    /// [later](Self::catch_up) if the VMM [interrupts](crate::Interrupt) it.
    pub fn reset(&mut self) {
        self.retry_stuck();
        self.end_domains(false);
        self.counters.faults_dropped += self.faults.clear();
        // Without a driver nothing has changed since the last reset, so parked chunks may stay.
        if self.accepted != 0 {
            self.evict_all();
        }
        if let Some(windows) = &mut self.windows {
            while windows.recover(&mut self.counters) {}
        }
        self.accepted = 0;
        if let Err(status) = self.settle_in_time(&self.spaces.ids(), false) {
            warn!("the host does not map RAM for all endpoints in bypass mode ({status:?})");
        }
    }

    /// A copy of the totals.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// All figures, also of each domain and endpoint. Those of a domain begin and end with it.
    pub fn report(&self) -> Report {
        let chunk_size = self.windows.as_ref().map_or(0, Windows::chunk_size);
        let domains = self.domains.iter().map(|(&id, domain)| DomainReport {
            domain: id,
            bypass: domain.bypass,
            endpoints: domain.endpoints.clone(),
            address_spaces: domain.spaces.len(),
            mappings: domain.count(),
            mapped_bytes: domain.mapped_bytes,
            window_bytes: domain.chunks.len() as u64 * chunk_size,
            activity: domain.activity,
        });
        let endpoints = self.endpoints.iter().map(|(&id, endpoint)| {
            let space = self.spaces.get(endpoint.space);
            let attached = endpoint.domain.and_then(|domain| self.domains.get(&domain));
            let domain = attached.or(space.identity.then_some(&self.identity));
            let parked_bytes = space.parked.len() as u64 * chunk_size;
            let mapped_bytes = domain.map_or(0, |domain| domain.mapped_bytes);
            let window_bytes = domain.map_or(0, |domain| domain.chunks.len()) as u64 * chunk_size + parked_bytes;
            EndpointReport {
                endpoint: id,
                domain: endpoint.domain,
                bypass: domain.is_some_and(|domain| domain.bypass),
                mapped_bytes,
                window_bytes,
                parked_bytes,
                pinned_bytes: if space.pins() { mapped_bytes + window_bytes } else { 0 },
                activity: endpoint.activity,
            }
        });
        Report {
            counters: self.counters,
            latency: self.latency,
            host: self.counters.host,
            domains: domains.collect(),
            endpoints: endpoints.collect(),
        }
    }

    /// Changes the budget: the bytes of window memory that all domains may use. If more is backed, parked chunks are
    /// given back. Chunks of domains stay, but no more are backed. `Ok(true)`: the driver must be told that the
    /// configuration has changed.
    ///
    /// # Errors
    /// [`ConfigError::NoWindows`], or [`ConfigError::Budget`] if the region is smaller.
    pub fn set_budget(&mut self, bytes: u64) -> Result<bool, ConfigError> {
        let windows = self.windows.as_mut().ok_or(ConfigError::NoWindows)?;
        windows.config.check_budget(bytes, windows.region_size())?;
        let before = std::mem::replace(&mut windows.config.budget, bytes);
        self.evict_over_budget();
        Ok(before != bytes && self.active_windows().is_some())
    }

    /// Changes the threshold: the size at or below which a driver should copy. `Ok(true)`: the driver must be told
    /// that the configuration has changed.
    ///
    /// # Errors
    /// [`ConfigError::NoWindows`].
    pub fn set_threshold(&mut self, bytes: u32) -> Result<bool, ConfigError> {
        let windows = self.windows.as_mut().ok_or(ConfigError::NoWindows)?;
        let before = std::mem::replace(&mut windows.config.threshold, bytes);
        Ok(before != bytes && self.active_windows().is_some())
    }

    /// The windows, if the driver accepted them.
    fn active_windows(&self) -> Option<&Windows> {
        let active = self.accepted & feature::ANY_BOUNCE_WINDOW != 0;
        self.windows.as_ref().filter(|_| active)
    }

    /// Tries again to unmap stuck ranges, and gives back the chunks that become free.
    fn retry_stuck(&mut self) {
        if self.counters.stuck_ranges == 0 {
            return;
        }
        for space in self.spaces.iter_mut() {
            space.retry_stuck(&mut self.counters);
        }
        self.give_back_held();
        if self.bypass && self.counters.stuck_ranges == 0 {
            let outcome = self.settle_in_time(&self.spaces.ids(), true);
            if let Err(status) = outcome {
                log::debug!("bypass is not complete yet ({status:?})");
            }
        }
    }

    /// Gives back held chunks that no address space maps any more.
    fn give_back_held(&mut self) {
        let held = self.windows.as_mut().map(Windows::take_held);
        for index in held.unwrap_or_default() {
            self.give_back(index);
        }
    }

    /// Gives back a chunk that no domain has any more: at once, or when the last host mapping of it is gone.
    fn give_back(&mut self, index: u32) {
        let Some(windows) = &mut self.windows else {
            return;
        };
        if self.spaces.iter().any(|space| space.holds_chunk(index)) {
            windows.hold(index);
        } else {
            windows.release(index, &mut self.counters);
        }
    }

    /// Whether a range is stuck in an address space of the domain. Such a domain gets no more mappings.
    fn is_stuck(&self, domain: &Domain) -> bool {
        self.counters.stuck_ranges != 0 && domain.spaces.iter().any(|space| self.spaces.get(*space).is_stuck())
    }
}

/// The permissions that flags of MAP or WINDOW_ADD ask for; `INVAL` if a flag is unknown, or if none is set: a
/// mapping must allow something.
fn permissions(flags: u32) -> Result<Permissions, Status> {
    const { assert!(MAP_F_READ == Permissions::READ.bits() && MAP_F_WRITE == Permissions::WRITE.bits()) };
    Permissions::from_bits(flags).filter(|permissions| !permissions.is_empty()).ok_or(Status::Inval)
}

/// An endpoint that is known to exist.
fn endpoint_mut(endpoints: &mut BTreeMap<EndpointId, Endpoint>, id: EndpointId) -> &mut Endpoint {
    endpoints.get_mut(&id).expect("an endpoint leaves its domain before it is removed")
}
