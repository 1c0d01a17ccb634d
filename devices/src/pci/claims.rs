// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Addresses of BARs. The VMM assigns the first addresses, and the guest may then move the BARs.
//!
//! A BAR keeps its place in the guest's address space while its decoding is off. To learn the size of a BAR, an operating system turns
//! decoding off, writes ones, reads the BAR, restores the address, and turns decoding on. These steps leave the address space unchanged,
//! because the BAR keeps its place. A BAR loses its place only when it is decoded at another address, or when another BAR is decoded at
//! this place.
//!
//! If the guest moves a BAR to a forbidden address, the BAR stays at its old place. The BAR moves once the new address is allowed. If
//! another BAR takes the old place before this move, the first BAR has no place until it can move.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use log::{error, warn};
use vm_allocator::{AddressAllocator, AllocPolicy};

use super::{Bar, BarKind, PciDevice, PciError};
use crate::platform::{AddressSpace, BusDevice, Space};
use crate::state::StateError;

/// Addresses that BARs may have. The guest may move BARs within these windows, so nothing else may be in the windows.
#[derive(Clone, Debug)]
pub struct BarWindows {
    /// I/O ports.
    pub io: RangeInclusive<u64>,
    /// Memory below 4 GiB.
    pub mem32: RangeInclusive<u64>,
    /// Memory above 4 GiB.
    pub mem64: RangeInclusive<u64>,
}

impl BarWindows {
    fn allow(&self, bar: &Bar, address: u64) -> bool {
        let Some(last) = address.checked_add(bar.size - 1) else { return false };
        let holds = |window: &RangeInclusive<u64>| window.contains(&address) && window.contains(&last);
        match bar.kind {
            BarKind::Io => holds(&self.io),
            BarKind::Memory32 { .. } => holds(&self.mem32),
            BarKind::Memory64 { .. } => holds(&self.mem32) || holds(&self.mem64),
        }
    }
}

/// Handler of accesses to one BAR. The handler forwards accesses to the function while the function decodes the BAR.
struct BarAccess {
    device: Arc<dyn PciDevice>,
    bar: Bar,
    decoded: AtomicBool,
}

impl BarAccess {
    fn answers(&self, offset: u64, len: usize) -> bool {
        self.decoded.load(Ordering::Acquire) && offset.checked_add(len as u64).is_some_and(|end| end <= self.bar.size)
    }
}

impl BusDevice for BarAccess {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if self.answers(offset, data.len()) {
            self.device.read_bar(self.bar.index, offset, data);
        }
    }
    fn write(&self, offset: u64, data: &[u8]) {
        if self.answers(offset, data.len()) {
            self.device.write_bar(self.bar.index, offset, data);
        }
    }
    fn is_memory(&self) -> bool {
        self.device.is_memory(self.bar.index)
    }
}

/// One BAR of one function.
struct Claim {
    /// Device number of the function on the root bus of the segment.
    owner: u8,
    /// Address that the VMM assigned.
    home: u64,
    /// Address that the BAR claims in the guest's address space.
    place: Option<u64>,
    access: Arc<BarAccess>,
    /// Address that the function requests for the BAR, and that was refused. The address is outside the windows, or belongs to another BAR.
    refused: Option<u64>,
    /// True if a forbidden move was logged. Further forbidden moves are not logged, so that the guest cannot fill the log.
    complained: bool,
}

impl Claim {
    fn bar(&self) -> &Bar {
        &self.access.bar
    }

    fn space(&self) -> Space {
        if self.bar().kind == BarKind::Io { Space::Port } else { Space::Memory }
    }

    fn is_decoded(&self) -> bool {
        self.access.decoded.load(Ordering::Acquire)
    }

    fn set_decoded(&self, decoded: bool) {
        self.access.decoded.store(decoded, Ordering::Release);
    }

    /// True if the BAR is decoded at the address that its function requests.
    fn belongs_there(&self) -> bool {
        self.is_decoded() && self.refused.is_none()
    }

    fn lies_in(&self, space: Space, base: u64, size: u64) -> bool {
        // These sums cannot wrap, because a size is a power of two, and an address is aligned to the size.
        self.space() == space
            && self.place.is_some_and(|place| place <= base + (size - 1) && base <= place + (self.bar().size - 1))
    }

    /// Notifies the function of the guest address of its BAR. A failure only makes accesses to the BAR slow, because the accesses then exit
    /// to the VMM.
    fn announce(&self, address: u64) {
        let (id, index) = (self.access.device.id(), self.bar().index);
        if let Err(error) = self.access.device.bar_moved(index, address) {
            warn!(
                "{id}: BAR {index} at {address:#x} cannot be mapped into the guest, so accesses to the BAR are slow: {error}"
            );
        }
    }
}

/// BARs of all functions on a root bus.
pub(super) struct Claims {
    /// A weak reference, because the address space refers back to these claims through the configuration space.
    space: Weak<dyn AddressSpace>,
    windows: BarWindows,
    io: AddressAllocator,
    mem32: AddressAllocator,
    mem64: AddressAllocator,
    list: Vec<Claim>,
}

fn allocator(what: &'static str, window: &RangeInclusive<u64>) -> Result<AddressAllocator, PciError> {
    let error = || PciError::Window { what, window: window.clone() };
    let size = window.end().checked_sub(*window.start()).and_then(|size| size.checked_add(1)).ok_or_else(error)?;
    AddressAllocator::new(*window.start(), size).map_err(|_| error())
}

impl Claims {
    pub(super) fn new(space: &Arc<dyn AddressSpace>, windows: BarWindows) -> Result<Self, PciError> {
        let io = allocator("I/O port", &windows.io)?;
        let mem32 = allocator("32-bit memory", &windows.mem32)?;
        let mem64 = allocator("64-bit memory", &windows.mem64)?;
        Ok(Self { space: Arc::downgrade(space), windows, io, mem32, mem64, list: Vec::new() })
    }

    /// Allocates and assigns an address for each BAR of `device`. On failure, no address stays allocated.
    pub(super) fn assign(&mut self, owner: u8, device: &Arc<dyn PciDevice>) -> Result<(), PciError> {
        let mut bars = device.bars();
        // Allocate the largest BARs first, so that naturally aligned BARs leave no gaps.
        bars.sort_by_key(|bar| std::cmp::Reverse(bar.size));
        for bar in bars {
            let Some(home) = self.allocate(&bar) else {
                self.release(owner);
                return Err(PciError::NoSpace { device: device.id().to_string(), bar });
            };
            device.assign_bar(bar.index, home);
            let access = BarAccess { device: device.clone(), bar, decoded: AtomicBool::new(false) };
            self.list.push(Claim {
                owner,
                home,
                place: None,
                access: Arc::new(access),
                refused: None,
                complained: false,
            });
        }
        Ok(())
    }

    fn allocate(&mut self, bar: &Bar) -> Option<u64> {
        let from = |allocator: &mut AddressAllocator| {
            allocator.allocate(bar.size, bar.size, AllocPolicy::FirstMatch).ok().map(|range| range.start())
        };
        match bar.kind {
            BarKind::Io => from(&mut self.io),
            BarKind::Memory32 { .. } => from(&mut self.mem32),
            BarKind::Memory64 { .. } => from(&mut self.mem64).or_else(|| from(&mut self.mem32)),
        }
    }

    /// Removes the BARs of `owner` from the guest's address spaces, and frees the addresses of the BARs.
    pub(super) fn release(&mut self, owner: u8) {
        let (going, staying) = std::mem::take(&mut self.list).into_iter().partition(|claim| claim.owner == owner);
        self.list = staying;
        let going: Vec<Claim> = going;
        for claim in going {
            claim.set_decoded(false);
            if let Some(place) = claim.place {
                let (device, bar) = (&claim.access.device, claim.bar().index);
                if let Err(error) = device.bar_released(bar) {
                    error!(
                        "{}: BAR {bar} stays visible to the guest until the device is closed, because it cannot be unmapped: {error}",
                        device.id()
                    );
                }
                if let Some(map) = self.space.upgrade() {
                    map.remove(claim.space(), place);
                }
            }
            self.free(claim.bar().kind, claim.home, claim.bar().size);
        }
        self.settle();
    }

    fn free(&mut self, kind: BarKind, home: u64, size: u64) {
        let allocator = match kind {
            BarKind::Io => &mut self.io,
            BarKind::Memory64 { .. } if self.windows.mem64.contains(&home) => &mut self.mem64,
            _ => &mut self.mem32,
        };
        let freed = vm_allocator::RangeInclusive::new(home, home + (size - 1)).and_then(|range| allocator.free(&range));
        debug_assert!(freed.is_ok(), "the BAR's address was allocated as one range");
    }

    /// Moves the BARs of `owner` back to the addresses that the VMM assigned.
    pub(super) fn send_home(&self, owner: u8) {
        for claim in self.list.iter().filter(|claim| claim.owner == owner) {
            claim.access.device.assign_bar(claim.bar().index, claim.home);
        }
    }

    /// Updates the claims of `owner` to the addresses that its function decodes. Then moves BARs whose requested addresses were refused
    /// before and are free now.
    pub(super) fn follow(&mut self, owner: u8) {
        for index in 0..self.list.len() {
            let claim = &mut self.list[index];
            if claim.owner != owner {
                continue;
            }
            match claim.access.device.bar_address(claim.bar().index) {
                None => {
                    claim.refused = None;
                    claim.set_decoded(false);
                }
                Some(address) if claim.place == Some(address) => {
                    claim.refused = None;
                    if !claim.is_decoded() {
                        claim.announce(address);
                        claim.set_decoded(true);
                    }
                }
                Some(address) => self.relocate(index, address),
            }
        }
        self.settle();
    }

    /// Moves BARs whose moves were refused, if their addresses are allowed now. Each move may free the address for another BAR.
    fn settle(&mut self) {
        let moves = |claims: &mut Self, index: usize| {
            claims.list[index].refused.is_some_and(|address| claims.try_relocate(index, address).is_ok())
        };
        while (0..self.list.len()).any(|index| moves(self, index)) {}
    }

    /// Checks that the decoded BARs of `owner` have the addresses that its function requests.
    ///
    /// # Errors
    /// A BAR has another address, because the guest has tried to move it to a forbidden address. Such a state could not be restored.
    pub(super) fn check(&self, owner: u8) -> Result<(), StateError> {
        for claim in self.list.iter().filter(|claim| claim.owner == owner) {
            let bar = claim.bar().index;
            if let Some(address) = claim.access.device.bar_address(bar).filter(|address| claim.place != Some(*address))
            {
                let rule = format!(
                    "the VM cannot be saved, because the guest has requested the forbidden address {address:#x} for this BAR; reset the VM first"
                );
                return Err(StateError::rule(format!("BAR {bar}"), rule));
            }
        }
        Ok(())
    }

    /// Like [`Self::follow`], but for a restored function. An address that cannot be claimed is an error.
    pub(super) fn restore(&mut self, owner: u8) -> Result<(), StateError> {
        for index in 0..self.list.len() {
            let claim = &self.list[index];
            if claim.owner != owner {
                continue;
            }
            let bar = claim.bar().index;
            if let Some(address) = claim.access.device.bar_address(bar) {
                self.try_relocate(index, address).map_err(|why| {
                    StateError::rule(format!("BAR {bar}"), format!("cannot be at {address:#x}: {why}"))
                })?;
            }
        }
        Ok(())
    }

    fn relocate(&mut self, index: usize, address: u64) {
        if let Err(why) = self.try_relocate(index, address) {
            let claim = &mut self.list[index];
            claim.refused = Some(address);
            claim.set_decoded(claim.place.is_some());
            if !claim.complained {
                claim.complained = true;
                let (id, bar) = (claim.access.device.id(), claim.bar().index);
                warn!("{id}: ignored the guest's move of BAR {bar} to {address:#x} (logged once): {why}");
            }
        }
    }

    fn try_relocate(&mut self, index: usize, address: u64) -> Result<(), String> {
        let (space, size) = (self.list[index].space(), self.list[index].bar().size);
        if !self.windows.allow(self.list[index].bar(), address) {
            return Err("the BAR would lie outside of the address windows for BARs".to_string());
        }
        let in_the_way = |(at, other): &(usize, &Claim)| *at != index && other.lies_in(space, address, size);
        let others: Vec<usize> = self.list.iter().enumerate().filter(in_the_way).map(|(at, _)| at).collect();
        if let Some(other) = others.iter().map(|at| &self.list[*at]).find(|other| other.belongs_there()) {
            return Err(format!(
                "BAR {} of {} overlaps the requested range",
                other.bar().index,
                other.access.device.id()
            ));
        }
        for at in others {
            self.evict(at)?;
        }
        let map = self.space.upgrade().ok_or("the address space no longer exists")?;
        let claim = &self.list[index];
        map.insert(space, address, size, claim.access.clone()).map_err(|error| error.to_string())?;
        if let Some(old) = claim.place {
            map.remove(space, old);
        }
        let claim = &mut self.list[index];
        (claim.place, claim.refused) = (Some(address), None);
        claim.announce(address);
        claim.set_decoded(true);
        Ok(())
    }

    /// Removes a BAR from its place, so that another BAR can take the place. The removed BAR is not decoded, or its function requests
    /// another address.
    fn evict(&mut self, index: usize) -> Result<(), String> {
        let claim = &mut self.list[index];
        let (id, bar) = (claim.access.device.id(), claim.bar().index);
        claim.access.device.bar_released(bar).map_err(|error| {
            format!("BAR {bar} of {id} overlaps the requested range, and cannot be removed from there: {error}")
        })?;
        claim.set_decoded(false);
        let space = claim.space();
        if let (Some(place), Some(map)) = (claim.place.take(), self.space.upgrade()) {
            map.remove(space, place);
        }
        Ok(())
    }
}
