// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! ATTACH and DETACH (virtio 1.3, sections 5.13.6.2 and 5.13.6.3), and the assignment of endpoints to host address spaces.
//!
//! An endpoint starts in its own address space. If the host can move endpoints between address spaces, the endpoints of a domain
//! share an address space. An address space without endpoints is *spare*. An endpoint that leaves a shared address space moves to a
//! spare address space.

use super::{Engine, endpoint_mut};
use crate::backend::Permissions;
use crate::domain::Domain;
use crate::endpoint::Endpoint;
use crate::fault::{Fault, FaultReason};
use crate::space::ExchangeError;
use crate::spec::{ATTACH_F_BYPASS, Status, feature};
use crate::wire;
use crate::{DomainId, EndpointId, SpaceId};

impl Engine {
    /// Attaches an endpoint. If the endpoint is attached to another domain, it leaves the old domain only after the whole new domain is
    /// mapped for the endpoint.
    pub(super) fn attach(&mut self, request: wire::Attach) -> Result<(), Status> {
        let (id, new) = (request.endpoint, request.domain);
        let known = if self.accepted & feature::BYPASS_CONFIG == 0 { 0 } else { ATTACH_F_BYPASS };
        if request.flags & !known != 0 || request.reserved != 0 {
            return Err(Status::Inval);
        }
        let bypass = request.flags & ATTACH_F_BYPASS != 0;
        let endpoint = self.endpoints.get(&id).ok_or(Status::NoEnt)?;
        if !self.config.domain_range.contains(&new) {
            return Err(Status::Range);
        }
        let (old, from) = (endpoint.domain, endpoint.space);
        if self.domains.get(&new).is_some_and(|domain| domain.bypass != bypass) {
            return Err(Status::Inval);
        }
        if old == Some(new) {
            return Ok(());
        }
        self.check_attach(endpoint, new, bypass)?;
        let fresh = || if bypass { self.identity.clone() } else { Domain::default() };
        self.domains.entry(new).or_insert_with(fresh);
        let mut placed = self.place(id, from, old, new);
        // If memory is short, release parked chunks one by one before rejecting the request.
        while placed == Err(Status::NoMem) && self.evict_one() {
            let still = endpoint_mut(&mut self.endpoints, id).domain == old;
            placed = if still { self.place(id, from, old, new) } else { break };
        }
        if let (Ok(to), Some(domain)) = (placed, self.domains.get_mut(&new)) {
            domain.endpoints.push(id);
            if !domain.spaces.contains(&to) {
                domain.spaces.push(to);
            }
            endpoint_mut(&mut self.endpoints, id).domain = Some(new);
            self.vacate(from);
        } else if self.domains.get(&new).is_some_and(|domain| domain.endpoints.is_empty()) {
            self.domains.remove(&new);
        }
        placed.map(|_| ())
    }

    /// Maps the whole new domain for the endpoint, and removes the endpoint from the old domain. Returns the address space that the
    /// endpoint is in afterwards.
    fn place(
        &mut self,
        id: EndpointId,
        from: SpaceId,
        old: Option<DomainId>,
        new: DomainId,
    ) -> Result<SpaceId, Status> {
        let to = match self.joinable(from, new) {
            Some(to) => self.join(id, to)?,
            None if self.spaces.get(from).endpoints.len() > 1 => self.move_out(id, Some(new))?,
            None => self.switch(id, old, new)?,
        };
        if let Some(old) = old {
            self.leave(id, from, old);
        }
        Ok(to)
    }

    /// Updates an address space that an endpoint has left. If no endpoint remains in the address space, releases the chunks that are parked
    /// there. Then maps or unmaps RAM as bypass requires.
    fn vacate(&mut self, id: SpaceId) {
        if self.spaces.get(id).endpoints.is_empty() {
            self.evict_from(id);
        }
        if let Err(status) = self.settle_in_time(&[id], true) {
            // The log level is `debug`, because this call takes no access away from these endpoints. They already had no access: an earlier
            // attempt to map the RAM was postponed, or failed, for example because a range is stuck.
            log::debug!("virtio-iommu: endpoints in bypass mode have no access to RAM yet (status {status:?})");
        }
    }

    /// Checks everything that can be checked without calling the host.
    fn check_attach(&self, endpoint: &Endpoint, new: DomainId, bypass: bool) -> Result<(), Status> {
        let domain = self.domains.get(&new);
        if domain.is_none() {
            let old = endpoint.domain.and_then(|old| self.domains.get(&old));
            let ends = old.is_some_and(|old| old.endpoints.len() == 1);
            let others = self.domains.len() - usize::from(ends);
            if others >= self.config.limits.max_domains {
                return Err(Status::NoMem);
            }
        }
        let content = domain.or(bypass.then_some(&self.identity));
        let mut mappings = content.iter().flat_map(|domain| domain.mappings.iter());
        let mut devices = content.iter().flat_map(|domain| domain.devices.iter());
        if !mappings.all(|(start, mapping)| endpoint.can_map(start, mapping.last))
            || !devices.all(|(start, mapping)| endpoint.can_map(*start, mapping.last))
        {
            return Err(Status::Unsupp);
        }
        if self.joinable(endpoint.space, new).is_none() {
            self.check_unmap_time_of(endpoint.space, domain.map_or(0, Domain::count))?;
        }
        self.check_mapped(self.more_mapped(endpoint.space, endpoint.domain, new, content))
    }

    /// Returns an address space of `domain` that an endpoint in `from` could move to.
    pub(super) fn joinable(&self, from: SpaceId, domain: DomainId) -> Option<SpaceId> {
        let group = self.spaces.get(from).group()?;
        let spaces = &self.domains.get(&domain)?.spaces;
        spaces.iter().copied().find(|to| self.spaces.get(*to).group() == Some(group))
    }

    /// Moves the endpoint into an address space that already holds the whole new domain.
    fn join(&mut self, id: EndpointId, to: SpaceId) -> Result<SpaceId, Status> {
        if !self.spaces.get(to).endpoints.contains(&id) {
            // Only the endpoints that used a chunk may access the parked chunk. So release the parked chunks before another endpoint joins.
            self.evict_from(to);
        }
        if self.spaces.get(to).is_stuck() {
            return Err(Status::DevErr);
        }
        self.move_to(id, to)
    }

    /// Moves the endpoint out of a shared address space into a spare address space. If `new` is given, maps the new domain in the spare
    /// address space.
    fn move_out(&mut self, id: EndpointId, new: Option<DomainId>) -> Result<SpaceId, Status> {
        let from = endpoint_mut(&mut self.endpoints, id).space;
        let group = self.spaces.get(from).group();
        let to = self.spaces.spare(group).ok_or(Status::DevErr)?;
        let (ram, windows, counters) = (&*self.ram, self.windows.as_ref(), &mut self.counters);
        let space = self.spaces.get_mut(to);
        if space.is_stuck() {
            return Err(Status::DevErr);
        }
        if let Some(domain) = new.and_then(|new| self.domains.get(&new)) {
            if !space.has_room_for(domain) {
                return Err(Status::NoMem);
            }
            space.install(domain, ram, windows, counters)?;
        }
        let outcome = self.move_to(id, to);
        if let (Err(_), Some(domain)) = (outcome, new.and_then(|new| self.domains.get(&new))) {
            self.spaces.get_mut(to).withdraw(domain, self.windows.as_ref(), &mut self.counters);
        }
        outcome
    }

    fn move_to(&mut self, id: EndpointId, to: SpaceId) -> Result<SpaceId, Status> {
        let endpoint = endpoint_mut(&mut self.endpoints, id);
        if endpoint.space != to {
            self.spaces.adopt(id, endpoint.space, to, &mut self.counters)?;
            endpoint.space = to;
        }
        Ok(to)
    }

    /// Replaces the old domain by the new domain in an address space that the endpoint does not share. On an error, the old domain is
    /// mapped again. If even that fails, the endpoint is attached to no domain.
    fn switch(&mut self, id: EndpointId, old: Option<DomainId>, new: DomainId) -> Result<SpaceId, Status> {
        let place = endpoint_mut(&mut self.endpoints, id).space;
        if self.domains.get(&new).is_some_and(|domain| !domain.chunks.is_empty() || domain.bypass) {
            self.evict_from(place);
        }
        let space = self.spaces.get_mut(place);
        let new_domain = self.domains.get(&new).ok_or(Status::NoEnt)?;
        if space.is_stuck() {
            return Err(Status::DevErr);
        }
        if !space.has_room_for(new_domain) {
            return Err(Status::NoMem);
        }
        let old_domain = match old {
            Some(old) => self.domains.get(&old),
            None => space.identity.then_some(&self.identity),
        };
        match space.exchange(old_domain, new_domain, &*self.ram, self.windows.as_ref(), &mut self.counters) {
            Ok(()) => {
                self.forget_content(place, old);
                Ok(place)
            }
            Err(ExchangeError::Undone(status)) => Err(status),
            Err(ExchangeError::Lost(status)) => {
                log::error!(
                    "virtio-iommu: endpoint {id:#x} lost all access to memory: ATTACH failed, and the host could not restore the previous mappings; reboot the guest"
                );
                self.forget_content(place, old);
                if let Some(old) = old {
                    self.leave(id, place, old);
                }
                // The driver assumes that the endpoint is still in its old domain, so report a fault.
                let nothing = Permissions::empty();
                self.report_fault(Fault { reason: FaultReason::Unknown, endpoint: id, address: None, access: nothing });
                Err(status)
            }
        }
    }

    /// Records that the address space no longer holds its old content: the domain `old`, or all RAM for an endpoint in bypass
    /// mode.
    fn forget_content(&mut self, space: SpaceId, old: Option<DomainId>) {
        self.spaces.get_mut(space).identity = false;
        if let Some(old) = old {
            self.forget_space(space, old);
        }
    }

    /// Detaches an endpoint. The endpoint is detached even if the host fails to unmap a range, because the guest will reuse the memory in
    /// any case. Every later request retries the unmap. If bypass is on and the host cannot map RAM, the endpoint is detached and has no
    /// access. While the mapping of RAM is postponed, the endpoint has no access either. The endpoint stays attached only if it shares an
    /// address space and the host cannot move the endpoint to another address space.
    pub(super) fn detach(&mut self, request: wire::Detach) -> Result<(), Status> {
        let id = request.endpoint;
        let endpoint = self.endpoints.get(&id).ok_or(Status::NoEnt)?;
        if endpoint.domain != Some(request.domain) {
            return Err(Status::Inval);
        }
        let from = endpoint.space;
        if self.is_shared(id, from, request.domain) {
            self.move_out(id, None)?;
        }
        self.leave(id, from, request.domain);
        if self.spaces.get(from).is_stuck() {
            return Err(Status::DevErr);
        }
        let place = endpoint_mut(&mut self.endpoints, id).space;
        self.settle_in_time(&[place], true)
    }

    /// Detaches an endpoint that is about to be removed, if it is in a domain.
    pub(super) fn release_endpoint(&mut self, id: EndpointId) {
        let Some(endpoint) = self.endpoints.get(&id) else {
            return;
        };
        let (from, Some(domain)) = (endpoint.space, endpoint.domain) else {
            return;
        };
        self.leave(id, from, domain);
    }

    /// True if other endpoints of the domain are in the address space.
    fn is_shared(&self, id: EndpointId, space: SpaceId, domain: DomainId) -> bool {
        let attached = |other: &EndpointId| {
            let endpoint = self.endpoints.get(other);
            *other != id && endpoint.is_some_and(|endpoint| endpoint.domain == Some(domain))
        };
        self.spaces.get(space).endpoints.iter().any(attached)
    }

    /// Removes an endpoint, which was in the address space `from`, from a domain. If `from` has no other endpoint of the domain, the domain
    /// is unmapped in `from`. A domain ends when its last endpoint leaves.
    fn leave(&mut self, id: EndpointId, from: SpaceId, old: DomainId) {
        let shared = self.is_shared(id, from, old);
        let endpoint = endpoint_mut(&mut self.endpoints, id);
        endpoint.domain = None;
        let Some(domain) = self.domains.get_mut(&old) else {
            return;
        };
        domain.endpoints.retain(|other| *other != id);
        let ends = domain.endpoints.is_empty();
        if !shared && domain.spaces.contains(&from) {
            self.spaces.get_mut(from).withdraw(domain, self.windows.as_ref(), &mut self.counters);
            self.forget_space(from, old);
        }
        if ends && let Some(domain) = self.domains.remove(&old) {
            self.forget_domain(&domain);
        }
    }

    /// Records that the address space no longer holds anything of the domain.
    fn forget_space(&mut self, space: SpaceId, domain: DomainId) {
        if let Some(domain) = self.domains.get_mut(&domain) {
            domain.spaces.retain(|other| *other != space);
        }
    }

    /// Releases the chunks of a domain that has ended and is unmapped.
    fn forget_domain(&mut self, domain: &Domain) {
        self.counters.mappings -= domain.count();
        for chunk in domain.chunks.values() {
            self.give_back(chunk.index);
        }
    }

    /// Ends all domains. Endpoints stay in their address spaces, which then hold nothing except parked chunks. If `park` is true, the
    /// chunks of some domains are parked instead of released. A domain's chunks are parked if only one address space holds the domain, and
    /// the mapper of this address space returns true from [`maps_hidden_chunks`](crate::DmaMapper::maps_hidden_chunks).
    pub(super) fn end_domains(&mut self, park: bool) {
        let domains = std::mem::take(&mut self.domains);
        for endpoint in self.endpoints.values_mut() {
            endpoint.domain = None;
        }
        for domain in domains.values() {
            if let (true, [space]) = (park, &domain.spaces[..])
                && self.spaces.get(*space).maps_hidden_chunks()
            {
                self.spaces.get_mut(*space).withdraw_ram(domain, &mut self.counters);
                self.counters.mappings -= domain.count();
                self.park(*space, &domain.chunks);
                continue;
            }
            for space in &domain.spaces {
                self.spaces.get_mut(*space).withdraw(domain, self.windows.as_ref(), &mut self.counters);
            }
            self.forget_domain(domain);
        }
    }
}
