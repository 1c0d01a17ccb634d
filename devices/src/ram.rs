// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What guest RAM is made of. All that handles it names these types, so that what RAM keeps of its pages is decided here.

use std::sync::{Mutex, OnceLock};

use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

use crate::sync::lock;

/// What each region keeps of its pages: nothing. A bitmap of pages that were written, as live migration and incremental
/// snapshots need it, takes its place here (`vm_memory::bitmap::AtomicBitmap`).
pub type RamBitmap = ();

/// A contiguous part of RAM.
pub type RamRegion = GuestRegionMmap<RamBitmap>;

/// Why regions do not make RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RamError {
    /// There is none.
    #[error("RAM has no region")]
    Empty,
    /// They are not in order, or overlap.
    #[error("the region at {0:#x} does not begin behind the one before it")]
    Order(u64),
    /// There is no room for more.
    #[error("RAM has all of the {0} regions that it can have")]
    Full(usize),
    /// The memory is not to be had.
    #[error("the region at {0:#x} cannot be mapped")]
    Map(u64),
}

/// All RAM of a guest, by guest-physical address.
///
/// Regions can be added behind those that there are, while others read, and stay for good: whoever has found one may keep it as
/// long as the RAM. A look-up costs O(log n) and takes no lock.
#[derive(Debug)]
pub struct Ram {
    /// Those that there are come first, in order.
    regions: Vec<OnceLock<RamRegion>>,
    growing: Mutex<()>,
}

impl Ram {
    /// RAM of `regions`, in order, to which `more` can be added.
    ///
    /// # Errors
    /// There is none, or they are not in order.
    pub fn new(regions: Vec<RamRegion>, more: usize) -> Result<Self, RamError> {
        if regions.is_empty() {
            return Err(RamError::Empty);
        }
        let ram =
            Self { regions: (0..regions.len() + more).map(|_| OnceLock::new()).collect(), growing: Mutex::default() };
        regions.into_iter().try_for_each(|region| ram.add(region))?;
        Ok(ram)
    }

    /// RAM at these addresses, of so many bytes each, as memory of this process.
    ///
    /// # Errors
    /// They are not in order, or the memory is not to be had.
    pub fn from_ranges(ranges: &[(GuestAddress, usize)]) -> Result<Self, RamError> {
        Self::from_ranges_with_files(ranges.iter().map(|(gpa, len)| (*gpa, *len, None)))
    }

    /// The same, of files where there are any.
    ///
    /// # Errors
    /// They are not in order, or the memory is not to be had.
    pub fn from_ranges_with_files(
        ranges: impl IntoIterator<Item = (GuestAddress, usize, Option<FileOffset>)>,
    ) -> Result<Self, RamError> {
        let region = |(gpa, len, file): (GuestAddress, usize, _)| {
            RamRegion::from_range(gpa, len, file).map_err(|_| RamError::Map(gpa.0))
        };
        Self::new(ranges.into_iter().map(region).collect::<Result<_, _>>()?, 0)
    }

    /// Adds a region behind those that there are.
    ///
    /// # Errors
    /// It does not begin behind them, or there is no room. Nothing has changed then.
    pub fn add(&self, region: RamRegion) -> Result<(), RamError> {
        let _growing = lock(&self.growing);
        let count = self.num_regions();
        let start = region.start_addr();
        if self.get(count.wrapping_sub(1)).is_some_and(|before| before.last_addr() >= start) {
            return Err(RamError::Order(start.0));
        }
        let free = self.regions.get(count).ok_or(RamError::Full(count))?;
        let set = free.set(region);
        debug_assert!(set.is_ok(), "nobody else adds one meanwhile");
        Ok(())
    }

    fn get(&self, index: usize) -> Option<&RamRegion> {
        self.regions.get(index)?.get()
    }
}

impl GuestMemoryBackend for Ram {
    type R = RamRegion;

    fn num_regions(&self) -> usize {
        self.regions.partition_point(|region| region.get().is_some())
    }

    fn find_region(&self, addr: GuestAddress) -> Option<&RamRegion> {
        let begins = |region: &OnceLock<RamRegion>| region.get().is_some_and(|region| region.start_addr() <= addr);
        let found = self.get(self.regions.partition_point(begins).checked_sub(1)?)?;
        (addr <= found.last_addr()).then_some(found)
    }

    fn iter(&self) -> impl Iterator<Item = &RamRegion> {
        self.regions.iter().map_while(OnceLock::get)
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;

    fn region(gpa: u64) -> RamRegion {
        RamRegion::from_range(GuestAddress(gpa), 0x1000, None).unwrap()
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
    fn region_that_is_added_is_there_for_those_who_have_the_ram() {
        let ram = std::sync::Arc::new(Ram::new(vec![region(0)], 2).unwrap());
        let (reader, first) = (ram.clone(), ram.find_region(GuestAddress(0)).unwrap());
        ram.add(region(0x8000)).unwrap();
        reader.write_obj(7u8, GuestAddress(0x8fff)).unwrap();
        assert_eq!((starts(&reader), first.start_addr().0), (vec![0, 0x8000], 0));
        assert!(reader.write_obj(7u8, GuestAddress(0x9000)).is_err());
    }

    #[test]
    fn region_out_of_order_or_without_room_is_refused_and_changes_nothing() {
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
