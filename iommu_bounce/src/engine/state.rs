// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saves and restores the engine's state. A state comes from a file or a network, so it is checked like requests.

use super::{Engine, permissions};
use crate::Fault;
use crate::mapping::Chunk;
use crate::spec::{ATTACH_F_BYPASS, MAP_F_MMIO, Status};
use crate::state::{ChunkState, DomainState, EngineState, MappingState, RestoreError, STATE_VERSION, WindowState};
use crate::windows::Windows;
use crate::{DomainId, wire};

impl Engine {
    /// Returns the state that results from the guest's requests. No vCPU may run until the VMM has also saved the contents of the chunks.
    pub fn state(&self) -> EngineState {
        let window = self.windows.as_ref().map(|Windows { config, .. }| WindowState {
            budget: config.budget,
            threshold: config.threshold,
            threshold_write: config.threshold_write,
            aperture: Some(config.aperture.clone().into_inner()),
        });
        let domains = self.domains.iter().map(|(&id, domain)| {
            let mappings = domain.mappings.iter().filter(|_| !domain.bypass);
            let chunks = domain.chunks.iter();
            // Dead mappings are not saved.
            let devices = domain.devices.iter().filter(|(_, mapping)| mapping.live);
            DomainState {
                domain: id,
                bypass: domain.bypass,
                endpoints: domain.endpoints.clone(),
                mappings: mappings
                    .map(|(start, mapping)| MappingState {
                        start,
                        last: mapping.last,
                        gpa: mapping.gpa,
                        flags: mapping.permissions.bits(),
                    })
                    .chain(devices.map(|(&start, mapping)| MappingState {
                        start,
                        last: mapping.last,
                        gpa: mapping.gpa,
                        flags: mapping.permissions.bits() | MAP_F_MMIO,
                    }))
                    .collect(),
                chunks: chunks
                    .map(|(&iova, chunk)| ChunkState { iova, index: chunk.index, flags: chunk.permissions.bits() })
                    .collect(),
            }
        });
        EngineState {
            version: STATE_VERSION,
            accepted: self.accepted,
            bypass: self.bypass,
            window,
            max_mapped_bytes: self.max_mapped_bytes(),
            domains: domains.collect(),
            faults: self.faults.waiting(),
        }
    }

    /// Restores this state in a new engine, including the host mappings. Chunks are backed with zeros at their previous places. The VMM
    /// must write the contents of the chunks before a vCPU runs. [`restore_device_memory`](Self::restore_device_memory) maps device memory,
    /// after the guest sees the memory.
    ///
    /// # Errors
    /// A [`RestoreError`] that names the rejected part. After an error, the engine has the same state as after
    /// [`system_reset`](Self::system_reset).
    pub fn restore(&mut self, state: &EngineState) -> Result<(), RestoreError> {
        if !self.domains.is_empty() {
            return Err(RestoreError::NotFresh);
        }
        if state.version != STATE_VERSION {
            return Err(RestoreError::Version(state.version));
        }
        let max_mapped_bytes = self.max_mapped_bytes();
        let outcome = self.restore_all(state);
        if outcome.is_err() {
            self.config.limits.max_mapped_bytes = max_mapped_bytes.unwrap_or(u64::MAX);
            self.restored_devices.clear();
            self.end_domains(false);
            self.system_reset();
        }
        outcome
    }

    fn restore_all(&mut self, state: &EngineState) -> Result<(), RestoreError> {
        let offered = self.features();
        if state.accepted & !offered != 0 {
            return Err(RestoreError::Features(state.accepted, offered));
        }
        self.evict_all();
        self.accept_features(state.accepted);
        match (state.window.is_some(), self.windows.is_some()) {
            (true, false) => {
                return Err(RestoreError::Window(
                    "the saved VM has bounce windows, but this VM has none: restore with the configuration that was saved"
                        .into(),
                ));
            }
            (false, true) => {
                return Err(RestoreError::Window(
                    "this VM has bounce windows, but the saved VM has none: restore with the configuration that was saved"
                        .into(),
                ));
            }
            _ => {}
        }
        let own = self.windows.as_ref().map(|windows| windows.config.aperture.clone().into_inner());
        if let (Some((start, end)), Some(own)) = (state.window.and_then(|window| window.aperture), own)
            && (start, end) != own
        {
            let rule = format!(
                "the saved aperture is {start:#x} to {end:#x}, but this engine has the aperture {:#x} to {:#x}: restore with the configuration that was saved, on a host that can translate the saved aperture",
                own.0, own.1
            );
            return Err(RestoreError::Window(rule));
        }
        if let Some(window) = state.window {
            let refused = |error: crate::ConfigError| RestoreError::Window(error.to_string());
            self.set_budget(window.budget).map_err(refused)?;
            self.set_threshold(window.threshold).map_err(refused)?;
            self.set_threshold_write(window.threshold_write).map_err(refused)?;
        }
        // Lift the cap for a moment: if the cap was lowered, the saved mappings may exceed it.
        self.config.limits.max_mapped_bytes = u64::MAX;
        self.bypass = state.bypass;
        self.settle_all().map_err(RestoreError::Bypass)?;
        let budget = self.windows.as_mut().map(|windows| {
            // Raise the budget for a moment: if the budget was lowered, the saved chunks may exceed it.
            let needed = state.window_bytes(windows.chunk_size()).min(windows.region_size());
            let budget = windows.config.budget;
            windows.config.budget = budget.max(needed);
            budget
        });
        let restored = state.domains.iter().try_for_each(|domain| self.restore_domain(domain));
        if let (Some(windows), Some(budget)) = (&mut self.windows, budget) {
            windows.config.budget = budget;
        }
        restored?;
        self.set_max_mapped_bytes(state.max_mapped_bytes).map_err(|_| RestoreError::MappedBytes)?;
        self.restore_faults(&state.faults)
    }

    fn restore_faults(&mut self, faults: &[Fault]) -> Result<(), RestoreError> {
        if let Some(fault) = faults.iter().find(|fault| !self.endpoints.contains_key(&fault.endpoint)) {
            return Err(RestoreError::Fault(fault.endpoint));
        }
        if self.faults.restore(faults) { Ok(()) } else { Err(RestoreError::TooManyFaults(faults.len())) }
    }

    fn restore_domain(&mut self, state: &DomainState) -> Result<(), RestoreError> {
        let domain = state.domain;
        let refused = |what: String| move |status| RestoreError::Domain { domain, what, status };
        if state.endpoints.is_empty() {
            return Err(refused("this domain, which has no endpoint".into())(Status::Inval));
        }
        if self.domains.contains_key(&domain) {
            return Err(refused("this domain, which occurs twice".into())(Status::Inval));
        }
        for &endpoint in &state.endpoints {
            let flags = if state.bypass { ATTACH_F_BYPASS } else { 0 };
            let request = wire::Attach { domain, endpoint, flags, reserved: 0 };
            self.attach(request).map_err(refused(format!("endpoint {endpoint:#x}")))?;
        }
        for mapping in &state.mappings {
            let MappingState { start, last, gpa, flags } = *mapping;
            let request = wire::Map { domain, start, last, gpa, flags };
            if flags & MAP_F_MMIO != 0 {
                self.restored_devices.push(request);
                continue;
            }
            self.map(request).map_err(refused(format!("mapping at {start:#x}")))?;
        }
        for chunk in &state.chunks {
            self.restore_chunk(domain, chunk).map_err(refused(format!("chunk at {:#x}", chunk.iova)))?;
        }
        Ok(())
    }

    fn restore_chunk(&mut self, domain: DomainId, state: &ChunkState) -> Result<(), Status> {
        let iova = state.iova;
        let permissions = permissions(state.flags)?;
        let windows = self.active_windows().ok_or(Status::Unsupp)?;
        if !windows.is_place(iova) {
            return Err(Status::Range);
        }
        let known = self.domains.get(&domain).ok_or(Status::NoEnt)?;
        if known.bypass || known.chunks.contains_key(&iova) {
            return Err(Status::Inval);
        }
        let windows = self.windows.as_mut().ok_or(Status::Unsupp)?;
        windows.back_at(state.index, &mut self.counters)?;
        let chunk = Chunk { index: state.index, permissions };
        if let Err(status) = self.map_chunk(domain, iova, chunk) {
            self.give_back(chunk.index);
            return Err(status);
        }
        let domain = self.domains.get_mut(&domain).ok_or(Status::NoEnt)?;
        domain.chunks.insert(iova, chunk);
        Ok(())
    }
}
