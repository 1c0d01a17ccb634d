// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Types of guest RAM. All code that handles RAM uses these types, so only [`RamBitmap`] determines which data is kept per page.

use std::iter;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

use crate::host_memory::Registration;
use crate::sync::lock;

/// Data that each region keeps per page. Today a region keeps no such data. Live migration and incremental snapshots would need a bitmap of
/// written pages here (`vm_memory::bitmap::AtomicBitmap`).
pub type RamBitmap = ();

/// A contiguous part of RAM.
pub type RamRegion = GuestRegionMmap<RamBitmap>;

/// Reason why regions cannot form RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RamError {
    /// There is no region.
    #[error("the guest has no RAM region")]
    Empty,
    /// The regions are out of order or overlap.
    #[error("the RAM region at {0:#x} must begin after the end of the preceding region")]
    Order(u64),
    /// RAM has no place for another region.
    #[error("the guest already has {0} RAM regions, which is the maximum")]
    Full(usize),
    /// The memory cannot be allocated.
    #[error("cannot map the RAM region at {0:#x}")]
    Map(u64),
}

/// All RAM of a guest, by guest-physical address.
///
/// While other threads use the RAM, new regions can be added after the existing regions, and the last region can be withdrawn. All regions,
/// even withdrawn ones, stay mapped as long as the RAM exists. So a thread may continue to access a region that it has found. A look-up
/// takes O(log n) time and no lock.
#[derive(Debug)]
pub struct Ram {
    /// Registered names of the regions, for messages about lost memory. The registrations are dropped before the regions are unmapped.
    names: Mutex<Vec<Registration>>,
    /// Places for regions. Places with a current region come first, in the order of the regions' addresses.
    places: Vec<Place>,
    /// Held while regions are added or withdrawn.
    changing: Mutex<()>,
}

/// All regions that have occupied one place, one after the other. At most one of these regions is not withdrawn.
type Place = OnceLock<Tenant>;

/// A region. After it is withdrawn, another region (`next`) can follow in the same place.
#[derive(Debug)]
struct Tenant {
    region: RamRegion,
    withdrawn: AtomicBool,
    next: OnceLock<Box<Tenant>>,
}

fn tenants(place: &Place) -> impl Iterator<Item = &Tenant> {
    iter::successors(place.get(), |tenant| tenant.next.get().map(Box::as_ref))
}

/// Returns the current region of a place, if it has one.
fn current(place: &Place) -> Option<&RamRegion> {
    tenants(place).find(|tenant| !tenant.withdrawn.load(Ordering::Acquire)).map(|tenant| &tenant.region)
}

impl Ram {
    /// Creates RAM from `regions`, which must be in ascending order of their addresses. Up to `more` regions can be added later.
    ///
    /// # Errors
    /// There is no region, or the regions are out of order or overlap.
    pub fn new(regions: Vec<RamRegion>, more: usize) -> Result<Self, RamError> {
        if regions.is_empty() {
            return Err(RamError::Empty);
        }
        let ram = Self {
            names: Mutex::default(),
            places: (0..regions.len() + more).map(|_| Place::new()).collect(),
            changing: Mutex::default(),
        };
        regions.into_iter().try_for_each(|region| ram.add(region))?;
        Ok(ram)
    }

    /// Creates RAM at these addresses, with these lengths in bytes, from anonymous memory.
    ///
    /// # Errors
    /// The ranges are out of order, or the memory cannot be allocated.
    pub fn from_ranges(ranges: &[(GuestAddress, usize)]) -> Result<Self, RamError> {
        Self::from_ranges_with_files(ranges.iter().map(|(gpa, len)| (*gpa, *len, None)))
    }

    /// Like [`from_ranges`](Self::from_ranges), but a range may be backed by a file.
    ///
    /// # Errors
    /// The ranges are out of order, or the memory cannot be mapped.
    pub fn from_ranges_with_files(
        ranges: impl IntoIterator<Item = (GuestAddress, usize, Option<FileOffset>)>,
    ) -> Result<Self, RamError> {
        let region = |(gpa, len, file): (GuestAddress, usize, _)| {
            RamRegion::from_range(gpa, len, file).map_err(|_| RamError::Map(gpa.0))
        };
        Self::new(ranges.into_iter().map(region).collect::<Result<_, _>>()?, 0)
    }

    /// Keeps the registration of a region's name as long as the RAM exists.
    pub fn keep_name(&self, name: Registration) {
        lock(&self.names).push(name);
    }

    /// Adds a region after the existing regions.
    ///
    /// # Errors
    /// The region does not begin after the existing regions, or the RAM already has its maximum number of regions. In this case nothing has
    /// changed.
    pub fn add(&self, region: RamRegion) -> Result<(), RamError> {
        let _changing = lock(&self.changing);
        let place = self.free_place(region.start_addr())?;
        let tenant = Tenant { region, withdrawn: AtomicBool::new(false), next: OnceLock::new() };
        let is_set = match tenants(place).last() {
            Some(last) => last.next.set(Box::new(tenant)).is_ok(),
            None => place.set(tenant).is_ok(),
        };
        debug_assert!(is_set, "the lock excludes other additions");
        Ok(())
    }

    /// Withdraws the last region, if it begins at `gpa` and is not the only region. Returns true if the region was withdrawn. The region
    /// stays mapped, because a thread that has found the region may still access it. The guest must not know that the region exists.
    pub fn withdraw(&self, gpa: GuestAddress) -> bool {
        let _changing = lock(&self.changing);
        let last = self.num_regions().checked_sub(1).filter(|last| *last > 0);
        let there = last.and_then(|last| self.places.get(last)).into_iter().flat_map(tenants);
        let is_it = |tenant: &&Tenant| !tenant.withdrawn.load(Ordering::Acquire) && tenant.region.start_addr() == gpa;
        let tenant = there.into_iter().find(is_it);
        tenant.iter().for_each(|tenant| tenant.withdrawn.store(true, Ordering::Release));
        tenant.is_some()
    }

    /// Returns the withdrawn region with these addresses that [`add_again`](Self::add_again) would add.
    pub fn withdrawn(&self, gpa: GuestAddress, len: u64) -> Option<&RamRegion> {
        self.withdrawn_tenant(gpa, len).map(|tenant| &tenant.region)
    }

    /// Adds the withdrawn region with these addresses again, instead of mapping new memory. Returns `false` if no such region exists.
    ///
    /// # Errors
    /// The errors of [`add`](Self::add).
    pub fn add_again(&self, gpa: GuestAddress, len: u64) -> Result<bool, RamError> {
        let _changing = lock(&self.changing);
        self.free_place(gpa)?;
        let tenant = self.withdrawn_tenant(gpa, len);
        tenant.iter().for_each(|tenant| tenant.withdrawn.store(false, Ordering::Release));
        Ok(tenant.is_some())
    }

    /// Returns the place for the next region, which begins at `start`.
    fn free_place(&self, start: GuestAddress) -> Result<&Place, RamError> {
        let count = self.num_regions();
        if self.get(count.wrapping_sub(1)).is_some_and(|before| before.last_addr() >= start) {
            return Err(RamError::Order(start.0));
        }
        self.places.get(count).ok_or(RamError::Full(count))
    }

    fn withdrawn_tenant(&self, gpa: GuestAddress, len: u64) -> Option<&Tenant> {
        let is_it = |tenant: &&Tenant| tenant.region.start_addr() == gpa && tenant.region.len() == len;
        tenants(self.places.get(self.num_regions())?).find(is_it)
    }

    fn get(&self, index: usize) -> Option<&RamRegion> {
        current(self.places.get(index)?)
    }
}

impl GuestMemoryBackend for Ram {
    type R = RamRegion;

    fn num_regions(&self) -> usize {
        self.places.partition_point(|place| current(place).is_some())
    }

    fn find_region(&self, addr: GuestAddress) -> Option<&RamRegion> {
        let begins = |place: &Place| current(place).is_some_and(|region| region.start_addr() <= addr);
        let found = self.get(self.places.partition_point(begins).checked_sub(1)?)?;
        // Another thread may have changed the region in this place during the search.
        (found.start_addr() <= addr && addr <= found.last_addr()).then_some(found)
    }

    fn iter(&self) -> impl Iterator<Item = &RamRegion> {
        self.places.iter().map_while(current)
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;

    fn region(gpa: u64) -> RamRegion {
        region_of(gpa, 0x1000)
    }

    fn region_of(gpa: u64, len: usize) -> RamRegion {
        RamRegion::from_range(GuestAddress(gpa), len, None).unwrap()
    }

    fn starts(ram: &Ram) -> Vec<u64> {
        ram.iter().map(|region| region.start_addr().0).collect()
    }

    #[test]
    fn address_is_found_in_its_region_and_nowhere_between() {
        let ram = Ram::new(vec![region(0), region(0x1000), region(0x4000)], 1).unwrap();
        let found = |gpa| ram.find_region(GuestAddress(gpa)).map(|region| region.start_addr().0);
        let wanted = [(0, Some(0)), (0xfff, Some(0)), (0x1000, Some(0x1000)), (0x2000, None), (0x3fff, None)];
        for (gpa, start) in wanted.into_iter().chain([(0x4fff, Some(0x4000)), (0x5000, None), (u64::MAX, None)]) {
            assert_eq!(found(gpa), start, "{gpa:#x}");
        }
        assert_eq!((ram.num_regions(), ram.last_addr()), (3, GuestAddress(0x4fff)));
    }

    #[test]
    fn added_region_is_visible_to_existing_users() {
        let ram = std::sync::Arc::new(Ram::new(vec![region(0)], 2).unwrap());
        let (reader, first) = (ram.clone(), ram.find_region(GuestAddress(0)).unwrap());
        ram.add(region(0x8000)).unwrap();
        reader.write_obj(7u8, GuestAddress(0x8fff)).unwrap();
        assert_eq!((starts(&reader), first.start_addr().0), (vec![0, 0x8000], 0));
        assert!(reader.write_obj(7u8, GuestAddress(0x9000)).is_err());
    }

    #[test]
    fn withdrawn_region_is_not_found_but_stays_mapped() {
        let ram = Ram::new(vec![region(0)], 1).unwrap();
        ram.add(region_of(0x8000, 0x4000)).unwrap();
        let kept = ram.find_region(GuestAddress(0x8000)).unwrap();
        assert!(ram.withdraw(GuestAddress(0x8000)));
        assert_eq!((starts(&ram), ram.last_addr()), (vec![0], GuestAddress(0xfff)));
        assert!(ram.find_region(GuestAddress(0x8000)).is_none());
        // A missing region and the only region cannot be withdrawn.
        assert_eq!([0x8000, 0].map(|gpa| ram.withdraw(GuestAddress(gpa))), [false; 2]);

        ram.add(region(0x8000)).unwrap();
        assert_eq!((starts(&ram), ram.last_addr()), (vec![0, 0x8000], GuestAddress(0x8fff)));
        ram.write_obj(7u8, GuestAddress(0x8000)).unwrap();
        assert_eq!(
            kept.read_obj::<u8>(vm_memory::MemoryRegionAddress(0)).unwrap(),
            0,
            "the new region has its own memory"
        );
        assert!(ram.find_region(GuestAddress(0x9000)).is_none());
        assert_eq!(ram.add(region(0x9000)), Err(RamError::Full(2)), "the withdrawn region's place is used again");
    }

    #[test]
    fn withdrawn_region_is_reused_for_the_same_addresses() {
        let ram = Ram::new(vec![region(0)], 2).unwrap();
        let gpa = GuestAddress(0x8000);
        assert_eq!(ram.add_again(gpa, 0x4000), Ok(false));
        ram.add(region_of(gpa.0, 0x4000)).unwrap();
        let first = ram.find_region(gpa).unwrap().as_ptr();
        assert!(ram.withdraw(gpa));
        ram.add(region(gpa.0)).unwrap();
        assert_eq!(ram.add_again(gpa, 0x4000), Err(RamError::Order(gpa.0)), "the place is taken");
        assert!(ram.withdrawn(gpa, 0x4000).is_none() && ram.withdraw(gpa));
        assert_eq!(ram.withdrawn(gpa, 0x4000).map(|region| region.as_ptr()), Some(first));
        assert!(ram.withdrawn(gpa, 0x2000).is_none());
        assert_eq!(ram.add_again(gpa, 0x4000), Ok(true));
        let found = ram.find_region(GuestAddress(0xbfff)).unwrap();
        assert_eq!((found.as_ptr(), starts(&ram)), (first, vec![0, 0x8000]));
        ram.add(region(0xc000)).unwrap();
        assert!(!ram.withdraw(gpa), "the region is not the last");
    }

    #[test]
    fn misordered_or_excess_region_is_refused_without_change() {
        let ram = Ram::new(vec![region(0), region(0x4000)], 1).unwrap();
        for gpa in [0x1000, 0x4000] {
            assert_eq!(ram.add(region(gpa)), Err(RamError::Order(gpa)));
        }
        ram.add(region(0x5000)).unwrap();
        assert_eq!(ram.add(region(0x8000)), Err(RamError::Full(3)));
        assert_eq!(starts(&ram), [0, 0x4000, 0x5000]);
        assert_eq!(Ram::new(Vec::new(), 1).err(), Some(RamError::Empty));
        assert_eq!(Ram::new(vec![region(0x1000), region(0)], 0).err(), Some(RamError::Order(0)));
    }
}
