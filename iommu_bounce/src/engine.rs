// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The engine, which decodes requests, keeps the device's state, and answers requests.
//!
//! Requests are served one at a time, so the engine needs no locks. A failed request changes nothing, unless the host also fails
//! to undo a step. [`crate::space`] describes that case.

mod attach;
mod batch;
mod bypass;
mod device;
mod map_list;
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
use crate::interrupt::{Interrupt, Steps};
use crate::latency::RequestLatency;
use crate::probe;
use crate::report::{DomainReport, EndpointReport, Report};
use crate::space::{Space, Spaces};
use crate::spec::{MAP_F_READ, MAP_F_WRITE, Status, config, feature, property};
use crate::windows::Windows;
use crate::wire::{self, Kind, Request, WindowVersion};
use crate::{DomainId, EndpointId};

pub use batch::UnmapRequest;
use map_unmap::unmap_run;
pub use report::DomainWindow;

/// Maximum duration of a batch. After this time, the engine rejects further requests of the batch that take host resources.
const MOST_OF_BATCH: Duration = Duration::from_secs(1);

/// Times when the requests of a batch were served. The end of the last request is calculated only on demand. A request takes less than
/// a microsecond, so a calculation for each request would be a noticeable cost.
#[derive(Clone, Copy)]
struct Served {
    /// Start of the first request.
    first: Instant,
    /// Start of the last request.
    last: Instant,
    /// Duration of the last request.
    took: Duration,
}

/// State of one virtio-iommu device.
pub struct Engine {
    config: EngineConfig,
    ram: Arc<dyn GuestRam>,
    windows: Option<Windows>,
    /// Features that the driver accepted.
    accepted: u64,
    /// True if unattached endpoints are in bypass mode.
    bypass: bool,
    /// End of the cooldown after a slow mapping of all RAM. Until then, the driver cannot turn bypass on again.
    bypass_rests: Option<Instant>,
    /// True if the engine has postponed the mapping of RAM for unattached endpoints. Until the engine maps the RAM, they have no access.
    bypass_put_off: bool,
    /// Duration of the current batch so far. `None` outside of a batch.
    batch: Option<Duration>,
    /// Times of the last batch. `None` until a request of the batch was served.
    served: Option<Served>,
    /// Mappings of unattached endpoints in bypass mode.
    identity: Domain,
    endpoints: BTreeMap<EndpointId, Endpoint>,
    spaces: Spaces,
    domains: BTreeMap<DomainId, Domain>,
    counters: Counters,
    latency: RequestLatency,
    faults: FaultQueue,
    steps: Steps,
    /// Mappings of device memory from a restored state, until [`restore_device_memory`](Self::restore_device_memory) maps them.
    restored_devices: Vec<wire::Map>,
}

impl Engine {
    /// Creates an engine. `chunks` and `config.window` must both be given, or neither.
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
            steps: Steps::new(config.limits.max_step),
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

    /// Adds an endpoint that is attached to no domain. `mapper` is an empty host address space that the endpoint is attached to.
    /// If `mapper` has a [`group`](DmaMapper::group), the engine may move the endpoint to another address space of that group.
    ///
    /// # Errors
    /// A [`ConfigError`] if the ID is in use, or if the host cannot provide the page size, the IOVAs or the bypass that the configuration
    /// promises.
    pub fn add_endpoint(&mut self, id: EndpointId, mapper: Box<dyn DmaMapper>) -> Result<(), ConfigError> {
        if self.endpoints.contains_key(&id) {
            return Err(ConfigError::EndpointExists(id));
        }
        let limits = mapper.limits();
        let usable = usable(&limits, &self.config.input_range, &self.config.msi_window);
        let aperture = self.windows.as_ref().map(|windows| &windows.config.aperture);
        self.config.check_endpoint(id, &limits, &usable, aperture)?;
        let space = Space::new(id, mapper, &limits, &self.config.limits, self.steps.clone());
        let space = self.spaces.insert(space);
        self.endpoints.insert(id, Endpoint::new(usable, space));
        if self.settle(space).is_err() {
            self.endpoints.remove(&id);
            self.spaces.remove(space);
            return Err(ConfigError::EndpointBypass(id));
        }
        Ok(())
    }

    /// Removes an endpoint: detaches it, unmaps everything, and returns a mapper that is no longer needed. Usually, this is the mapper of
    /// the endpoint's address space. If other endpoints still use that address space, a spare mapper of the group is returned instead. The
    /// VMM must make sure that the endpoint does no DMA.
    ///
    /// Ranges that the host failed to unmap may stay mapped until the VMM drops the mapper. Chunks in these ranges are lost, because the
    /// engine cannot know when they become free.
    ///
    /// # Errors
    /// [`ConfigError::NoEndpoint`] if no endpoint has this ID.
    pub fn remove_endpoint(&mut self, id: EndpointId) -> Result<Box<dyn DmaMapper>, ConfigError> {
        self.retry_stuck();
        self.release_endpoint(id);
        let endpoint = self.endpoints.remove(&id);
        let own = endpoint.ok_or(ConfigError::NoEndpoint(id))?.space;
        // Drop the endpoint's pending faults. Otherwise the driver would get faults of an endpoint that does not exist, and a saved state
        // with such faults could not be restored.
        self.counters.faults_dropped += self.faults.forget(id);
        self.spaces.get_mut(own).endpoints.retain(|other| *other != id);
        let group = self.spaces.get(own).group();
        let shared = !self.spaces.get(own).endpoints.is_empty();
        let spare = if shared { self.spaces.spare(group) } else { None };
        let going = spare.unwrap_or(own);
        self.evict_from(going);
        // No endpoint is in this address space any more, so this call unmaps the RAM that bypass mapped.
        let ended = self.settle(going);
        debug_assert!(ended.is_ok(), "an unmap does not fail: the range becomes stuck");
        let space = self.spaces.remove(going).expect("an endpoint has an address space");
        if let Some(windows) = &mut self.windows {
            space.stuck_chunks().for_each(|index| windows.doom(index));
        }
        self.give_back_held();
        Ok(space.into_mapper(&mut self.counters))
    }

    /// Returns the device-specific feature bits to offer.
    ///
    /// `BYPASS` is not offered, because `BYPASS_CONFIG` replaces it.
    pub fn features(&self) -> u64 {
        let mut features = feature::INPUT_RANGE
            | feature::DOMAIN_RANGE
            | feature::MAP_UNMAP
            | feature::BYPASS_CONFIG
            | feature::MAP_LIST;
        if self.config.probe_size != 0 {
            features |= feature::PROBE;
        }
        if self.ram.offers_mmio() {
            features |= feature::MMIO;
        }
        if let Some(windows) = &self.windows {
            let high = windows.config.is_high();
            features |= feature::BOUNCE_WINDOW;
            features |= if high { feature::BOUNCE_WINDOW_V2_HIGH } else { feature::BOUNCE_WINDOW_V2 };
        }
        features
    }

    /// Sets the features that the driver accepted. Call this function when the driver sets `FEATURES_OK`. Bits that were not offered are
    /// ignored. If the driver accepts two versions of the bounce window extension, the later version applies. While a domain exists, the
    /// features cannot change and the call does nothing.
    pub fn accept_features(&mut self, features: u64) {
        if self.domains.is_empty() {
            self.accepted = features & self.features();
            if self.accepted & feature::BOUNCE_WINDOW != 0 {
                self.accepted &= !(feature::BOUNCE_WINDOW_V2 | feature::BOUNCE_WINDOW_V2_HIGH);
            }
            if self.active_windows().is_none() {
                // A driver without windows may map RAM anywhere in the aperture. So unmap all parked chunks.
                self.evict_all();
            }
        } else {
            warn!("virtio-iommu: ignored the driver's new features, because features can change only after a reset");
        }
    }

    /// Returns the device configuration. [`config_len`](Self::config_len) bytes are valid, and the rest is zero.
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
            put(config::BOUNCE_THRESHOLD_WRITE, &windows.config.threshold_write.to_le_bytes());
        }
        space
    }

    /// Returns the size of the device configuration in bytes: 40, or 80 with bounce windows.
    pub fn config_len(&self) -> usize {
        match self.windows {
            Some(_) => config::WINDOW_SIZE,
            None => config::STANDARD_SIZE,
        }
    }

    /// Serves one request.
    ///
    /// `request` is the complete device-readable part of the request. `reply` is a buffer for the device-writable part. The buffer is as
    /// long as this part, but at most [`MAX_REPLY`](crate::MAX_REPLY) bytes. Returns the number of bytes of `reply` to write to the guest
    /// (the used length). If the type is unknown or the writable part has no room for a status, the request cannot be answered, and the
    /// used length is 0. If the readable or writable part is too short for the type, the request does nothing and gets `INVAL` in the last
    /// four bytes.
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
        let request = wire::decode(kind, request, self.window_version()).filter(|_| room == size);
        let Some(request) = request else {
            self.counters.count_invalid();
            return wire::fail(kind, reply, Status::Inval);
        };
        // Only ATTACH, MAP and MAP_LIST can be interrupted. If such a request fails, nothing has changed, so the VMM can submit it again.
        let interruptible = matches!(request, Request::Attach(_) | Request::Map(_) | Request::MapList(_));
        self.steps.set_allowed(interruptible);
        let outcome = self.serve(request, reply);
        self.steps.set_allowed(false);
        if self.steps.happened() {
            if outcome.is_err() {
                return 0;
            }
            self.steps.take_happened();
        }
        let took = began.elapsed();
        self.mark(began, took);
        self.note(kind, &request, outcome.is_ok(), took);
        self.catch_up();
        outcome.unwrap_or_else(|status| wire::fail(kind, reply, status))
    }

    /// Returns a handle to interrupt long requests.
    pub fn interrupt(&self) -> Interrupt {
        self.steps.interrupt()
    }

    /// True if the last request was [interrupted](Interrupt). An interrupted request has had no effect and was not answered. The VMM must
    /// submit the request again as soon as no thread waits for the engine any longer.
    pub fn take_interrupted(&mut self) -> bool {
        self.steps.take_happened()
    }

    /// Starts a batch, which lasts until [`end_batch`](Self::end_batch). The driver and all other threads wait while the batch is served.
    /// Once a batch has taken a second, further requests that take host resources get `NOMEM`. Requests that free resources are still
    /// served. If such a request leaves an endpoint in bypass mode, the engine maps RAM for the endpoint later.
    pub fn begin_batch(&mut self) {
        self.batch = Some(Duration::ZERO);
        self.served = None;
    }

    /// Returns the start of the first request since [`begin_batch`](Self::begin_batch), and the end of the last request. Returns `None` if
    /// no request of a known kind was served. This call does not read the clock.
    pub fn served_between(&self) -> Option<(Instant, Instant)> {
        self.served.map(|Served { first, last, took }| (first, last + took))
    }

    /// Records the time of one request of a batch, or of several requests that were served together.
    fn mark(&mut self, began: Instant, took: Duration) {
        if self.batch.is_none() {
            return;
        }
        match &mut self.served {
            Some(served) => (served.last, served.took) = (began, took),
            None => self.served = Some(Served { first: began, last: began, took }),
        }
    }

    /// Ends the batch.
    pub fn end_batch(&mut self) {
        self.batch = None;
    }

    /// Counts a request.
    fn note(&mut self, kind: Kind, request: &Request<'_>, ok: bool, took: Duration) {
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

    /// Returns the version of the bounce window extension that the driver accepted. Without the extension, the version has no meaning.
    pub fn window_version(&self) -> WindowVersion {
        if self.accepted & feature::BOUNCE_WINDOW != 0 { WindowVersion::V3 } else { WindowVersion::V2 }
    }

    /// True if the driver may send requests of this kind. The driver may send requests for windows and MAP_LIST only if it accepted their
    /// feature.
    fn offers(&self, kind: Kind) -> bool {
        match kind {
            Kind::Probe => self.config.probe_size != 0,
            Kind::WindowAdd | Kind::WindowDel => self.active_windows().is_some(),
            Kind::MapList => self.accepted & feature::MAP_LIST != 0,
            _ => true,
        }
    }

    fn serve(&mut self, request: Request<'_>, reply: &mut [u8]) -> Result<usize, Status> {
        let takes =
            matches!(request, Request::Attach(_) | Request::Map(_) | Request::MapList(_) | Request::WindowAdd(_));
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
            Request::MapList(request) => self.map_list(request)?,
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

    /// Resets the virtio device: unmaps everything, and clears all state including the accepted features. If the host fails to
    /// unmap a range, the engine retries later. If bypass is on, RAM is mapped for all endpoints. If the VMM
    /// [interrupts](crate::Interrupt) the reset, this mapping is done [later](Self::catch_up).
    pub fn reset(&mut self) {
        self.retry_stuck();
        self.end_domains(false);
        self.counters.faults_dropped += self.faults.clear();
        // If `accepted` is 0, no driver has used the device since the last reset. So the parked chunks may stay.
        if self.accepted != 0 {
            self.evict_all();
        }
        if let Some(windows) = &mut self.windows {
            while windows.recover(&mut self.counters) {}
        }
        self.accepted = 0;
        if let Err(status) = self.settle_in_time(&self.spaces.ids(), false) {
            warn!(
                "virtio-iommu: cannot map RAM for all endpoints in bypass mode (status {status:?}); check the limits on locked memory (ulimit -l) and on mapped RAM"
            );
        }
    }

    /// Returns a copy of the counters.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns a report on the engine, each domain and each endpoint. The counts of a domain start when the domain is created, and are lost
    /// when the domain ends.
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

    /// Changes the budget: the maximum bytes of window memory over all domains. If the backed memory exceeds the new budget, parked chunks
    /// are released. Chunks of domains stay, but no further chunks are backed. Returns `Ok(true)` if the VMM must notify the driver of a
    /// configuration change.
    ///
    /// # Errors
    /// [`ConfigError::NoWindows`] without bounce windows, or [`ConfigError::Budget`] if the budget is larger than the region.
    pub fn set_budget(&mut self, bytes: u64) -> Result<bool, ConfigError> {
        let windows = self.windows.as_mut().ok_or(ConfigError::NoWindows)?;
        windows.config.check_budget(bytes, windows.region_size())?;
        let before = std::mem::replace(&mut windows.config.budget, bytes);
        self.evict_over_budget();
        Ok(before != bytes && self.active_windows().is_some())
    }

    /// Changes the threshold: the maximum size of a DMA that a driver should copy. Returns `Ok(true)` if the VMM must notify the
    /// driver of a configuration change.
    ///
    /// # Errors
    /// [`ConfigError::NoWindows`] without bounce windows.
    pub fn set_threshold(&mut self, bytes: u32) -> Result<bool, ConfigError> {
        let windows = self.windows.as_mut().ok_or(ConfigError::NoWindows)?;
        let before = std::mem::replace(&mut windows.config.threshold, bytes);
        Ok(before != bytes && self.active_windows().is_some())
    }

    /// Changes the threshold for DMA that devices write. 0 stands for the threshold of [`set_threshold`](Self::set_threshold). Returns
    /// `Ok(true)` if the VMM must notify the driver of a configuration change.
    ///
    /// # Errors
    /// [`ConfigError::NoWindows`] without bounce windows.
    pub fn set_threshold_write(&mut self, bytes: u32) -> Result<bool, ConfigError> {
        let windows = self.windows.as_mut().ok_or(ConfigError::NoWindows)?;
        let before = std::mem::replace(&mut windows.config.threshold_write, bytes);
        Ok(before != bytes && self.active_windows().is_some())
    }

    /// Returns the bounce windows, if the driver accepted their feature.
    fn active_windows(&self) -> Option<&Windows> {
        let active = self.accepted & feature::ANY_BOUNCE_WINDOW != 0;
        self.windows.as_ref().filter(|_| active)
    }

    /// Retries the unmap of stuck ranges, and releases the chunks that become free. If no stuck range is left, maps RAM for endpoints in
    /// bypass mode that have no access yet.
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
                log::debug!("virtio-iommu: cannot map RAM for all endpoints in bypass mode yet (status {status:?})");
            }
        }
    }

    /// Releases held chunks that no address space maps any more.
    fn give_back_held(&mut self) {
        let held = self.windows.as_mut().map(Windows::take_held);
        for index in held.unwrap_or_default() {
            self.give_back(index);
        }
    }

    /// Releases a chunk that no domain owns any more. If an address space still maps the chunk, holds the chunk until its last host mapping
    /// is removed.
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

    /// True if a range is stuck in an address space of the domain. The engine rejects further mappings of such a domain.
    fn is_stuck(&self, domain: &Domain) -> bool {
        self.counters.stuck_ranges != 0 && domain.spaces.iter().any(|space| self.spaces.get(*space).is_stuck())
    }
}

/// Converts the flags of MAP or WINDOW_ADD to permissions. Returns `INVAL` if a flag is unknown, or if no flag is set, because a
/// mapping must allow some access.
fn permissions(flags: u32) -> Result<Permissions, Status> {
    const { assert!(MAP_F_READ == Permissions::READ.bits() && MAP_F_WRITE == Permissions::WRITE.bits()) };
    Permissions::from_bits(flags).filter(|permissions| !permissions.is_empty()).ok_or(Status::Inval)
}

/// Returns an endpoint that must exist.
fn endpoint_mut(endpoints: &mut BTreeMap<EndpointId, Endpoint>, id: EndpointId) -> &mut Endpoint {
    endpoints.get_mut(&id).expect("an endpoint leaves its domain before it is removed")
}
