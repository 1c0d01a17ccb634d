// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! ATTACH and DETACH (virtio 1.3, sections 5.13.6.2 and 5.13.6.3).

use super::{Engine, endpoint_mut};
use crate::domain::Domain;
use crate::endpoint::Endpoint;
use crate::spec::Status;
use crate::wire;
use crate::{DomainId, EndpointId};

impl Engine {
    /// Attaches an endpoint. If it is attached elsewhere it leaves there, but only once it has all of the new domain.
    ///
    /// No flag is known: the only one of the specification, bypass, comes with a feature that is not offered.
    pub(super) fn attach(&mut self, request: wire::Attach) -> Result<(), Status> {
        let (id, new) = (request.endpoint, request.domain);
        if request.flags != 0 || request.reserved != 0 {
            return Err(Status::Inval);
        }
        let endpoint = self.endpoints.get(&id).ok_or(Status::NoEnt)?;
        if !self.config.domain_range.contains(&new) {
            return Err(Status::Range);
        }
        let old = endpoint.domain;
        if old == Some(new) {
            return Ok(());
        }
        self.check_attach(endpoint, new)?;
        self.switch(id, old, new)?;
        if let Some(old) = old {
            self.leave(id, old);
        }
        self.domains.entry(new).or_default().endpoints.push(id);
        endpoint_mut(&mut self.endpoints, id).domain = Some(new);
        Ok(())
    }

    /// Whether the endpoint could be attached, as far as this can be known before the host is asked.
    fn check_attach(&self, endpoint: &Endpoint, new: DomainId) -> Result<(), Status> {
        if endpoint.is_stuck() {
            return Err(Status::DevErr);
        }
        let Some(domain) = self.domains.get(&new) else {
            let old = endpoint.domain.and_then(|old| self.domains.get(&old));
            let ends = old.is_some_and(|old| old.endpoints.len() == 1);
            let others = self.domains.len() - usize::from(ends);
            let full = others >= self.config.limits.max_domains;
            return if full { Err(Status::NoMem) } else { Ok(()) };
        };
        let mut mappings = domain.mappings.iter();
        if !mappings.all(|(&start, mapping)| endpoint.can_map(start, mapping.last)) {
            return Err(Status::Unsupp);
        }
        if !endpoint.has_room_for(domain) {
            return Err(Status::NoMem);
        }
        Ok(())
    }

    /// Has the endpoint's mapper hold the new domain in place of the old one. On error it holds the old one again; if
    /// even that fails, the endpoint is attached to nothing.
    fn switch(&mut self, id: EndpointId, old: Option<DomainId>, new: DomainId) -> Result<(), Status> {
        let (ram, windows) = (&*self.ram, self.windows.as_ref());
        let endpoint = endpoint_mut(&mut self.endpoints, id);
        let old_domain = old.and_then(|old| self.domains.get(&old));
        let mut outcome = Ok(());
        if let Some(domain) = old_domain {
            endpoint.withdraw(domain, windows, &mut self.counters);
        }
        // What is stuck now is the old domain's, and counts as mapped when that is restored.
        let mut restorable = true;
        if endpoint.is_stuck() {
            outcome = Err(Status::DevErr);
        } else if let Some(domain) = self.domains.get(&new) {
            outcome = endpoint.install(domain, ram, windows, &mut self.counters);
            restorable = !endpoint.is_stuck();
        }
        let Err(status) = outcome else {
            return Ok(());
        };
        if let (Some(old), Some(domain)) = (old, old_domain) {
            let restored = restorable && endpoint.restore(domain, ram, windows, &mut self.counters).is_ok();
            if !restored {
                log::error!("endpoint {id:#x} lost domain {old}: the host did not undo a failed ATTACH");
                self.leave(id, old);
            }
        }
        Err(status)
    }

    /// Detaches an endpoint. If the host does not unmap everything the endpoint is detached all the same, for the guest
    /// will use the memory otherwise; the rest is tried again before every request.
    pub(super) fn detach(&mut self, request: wire::Detach) -> Result<(), Status> {
        let id = request.endpoint;
        let endpoint = self.endpoints.get(&id).ok_or(Status::NoEnt)?;
        if endpoint.domain != Some(request.domain) {
            return Err(Status::Inval);
        }
        self.release_endpoint(id);
        if endpoint_mut(&mut self.endpoints, id).is_stuck() {
            return Err(Status::DevErr);
        }
        Ok(())
    }

    /// Unmaps all that an endpoint has and takes it out of its domain, if it is in one.
    pub(super) fn release_endpoint(&mut self, id: EndpointId) {
        let Some(endpoint) = self.endpoints.get_mut(&id) else {
            return;
        };
        let Some(domain) = endpoint.domain else {
            return;
        };
        if let Some(domain) = self.domains.get(&domain) {
            endpoint.withdraw(domain, self.windows.as_ref(), &mut self.counters);
        }
        self.leave(id, domain);
    }

    /// Takes an endpoint, which has nothing of the domain mapped any more, out of it. The domain ends with its last one.
    fn leave(&mut self, id: EndpointId, domain: DomainId) {
        endpoint_mut(&mut self.endpoints, id).domain = None;
        let std::collections::btree_map::Entry::Occupied(mut entry) = self.domains.entry(domain) else {
            return;
        };
        entry.get_mut().endpoints.retain(|other| *other != id);
        if !entry.get().endpoints.is_empty() {
            return;
        }
        let Domain { mappings, chunks, .. } = entry.remove();
        self.counters.mappings -= mappings.len() as u64;
        for chunk in chunks.values() {
            self.give_back(chunk.index);
        }
    }
}
