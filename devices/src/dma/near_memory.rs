// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fast view of guest memory for queue handlers, which make many small accesses, nearly all in one region.

use std::cell::Cell;
use std::iter::FusedIterator;

use vm_memory::bitmap::BS;
use vm_memory::guest_memory::{GuestMemoryBackendSliceIterator, GuestMemorySliceIterator, Result};
use vm_memory::{GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryRegion, Permissions, VolatileSlice};

use crate::ram::{Ram, RamBitmap, RamRegion};

/// Slice of RAM.
pub(super) type RamSlice<'a> = VolatileSlice<'a, BS<'a, RamBitmap>>;

/// View of guest memory that caches the last accessed region.
///
/// Serving one request takes about ten accesses to rings, descriptors and buffers, while the guest waits. With `Ram` instead of this view,
/// these accesses would be the most expensive part of a request. `Ram` looks up the region of each access twice, and supports ranges that
/// span several regions.
pub(crate) struct NearMemory<'m> {
    memory: &'m Ram,
    last: Cell<Option<&'m RamRegion>>,
}

impl<'m> NearMemory<'m> {
    /// Returns a view of `memory`.
    pub(crate) fn new(memory: &'m Ram) -> Self {
        Self { memory, last: Cell::new(None) }
    }

    /// Returns `count` bytes at `addr` if they lie in the last accessed region.
    fn near(&self, addr: GuestAddress, count: usize) -> Option<RamSlice<'_>> {
        let region = self.last.get()?;
        let offset = region.to_region_addr(addr)?;
        // This call fails if the range exceeds the region.
        region.get_slice(offset, count).ok()
    }

    /// Returns `count` bytes at `addr` if they lie in one region.
    fn slice(&self, addr: GuestAddress, count: usize) -> Option<RamSlice<'_>> {
        self.near(addr, count).or_else(|| {
            self.last.set(self.memory.find_region(addr));
            self.near(addr, count)
        })
    }

    /// Returns the slices of one access.
    pub(super) fn slices(&self, addr: GuestAddress, count: usize) -> NearSlices<'_> {
        match self.slice(addr, count) {
            Some(slice) => NearSlices::One(Some(slice)),
            None => NearSlices::Several(GuestMemoryBackend::get_slices(self.memory, addr, count)),
        }
    }
}

impl GuestMemory for NearMemory<'_> {
    type PhysicalMemory = Ram;
    type Bitmap = RamBitmap;

    fn check_range(&self, addr: GuestAddress, count: usize, _access: Permissions) -> bool {
        GuestMemoryBackend::check_range(self.memory, addr, count)
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        _access: Permissions,
    ) -> Result<impl GuestMemorySliceIterator<'a, BS<'a, RamBitmap>>> {
        Ok(self.slices(addr, count))
    }

    fn physical_memory(&self) -> Option<&Ram> {
        Some(self.memory)
    }
}

/// Iterator over the slices of one access.
pub(super) enum NearSlices<'a> {
    /// The access lies in one region.
    One(Option<RamSlice<'a>>),
    /// The access spans several regions, or is partly outside guest memory.
    Several(GuestMemoryBackendSliceIterator<'a, Ram>),
}

impl<'a> Iterator for NearSlices<'a> {
    type Item = Result<RamSlice<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::One(slice) => slice.take().map(Ok),
            Self::Several(slices) => slices.next(),
        }
    }
}

impl FusedIterator for NearSlices<'_> {}

impl<'a> GuestMemorySliceIterator<'a, BS<'a, RamBitmap>> for NearSlices<'a> {}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;

    fn memory() -> Ram {
        let ranges = [(GuestAddress(0), 0x2000), (GuestAddress(0x2000), 0x1000), (GuestAddress(0x10000), 0x1000)];
        Ram::from_ranges(&ranges).unwrap()
    }

    #[test]
    fn accesses_reach_the_same_bytes_as_without_the_view() {
        let memory = memory();
        let near = NearMemory::new(&memory);
        for at in [0u64, 0x1ff8, 0x2000, 0x10000, 0x10ff8, 0x1ffc, 0x8] {
            let at = GuestAddress(at);
            near.write_obj(at.0 | 1 << 40, at).unwrap();
            assert_eq!(memory.read_obj::<u64>(at).unwrap(), at.0 | 1 << 40);
            memory.write_obj(at.0 | 1 << 50, at).unwrap();
            assert_eq!(near.read_obj::<u64>(at).unwrap(), at.0 | 1 << 50);
        }
    }

    #[test]
    fn accesses_outside_memory_fail_as_without_the_view() {
        let memory = memory();
        let near = NearMemory::new(&memory);
        let mut bytes = [0; 16];
        for at in [0x2ff8u64, 0x3000, 0xfff8, 0x10ff8, 0x20000, u64::MAX - 3] {
            near.read_slice(&mut bytes[..8], GuestAddress(0x10)).unwrap();
            assert_eq!(
                near.read_slice(&mut bytes, GuestAddress(at)).is_ok(),
                memory.read_slice(&mut bytes, GuestAddress(at)).is_ok(),
                "{at:#x}"
            );
            assert!(near.write_slice(&bytes, GuestAddress(at)).is_err(), "{at:#x}");
        }
        assert!(!GuestMemory::check_range(&near, GuestAddress(0x2ff8), 16, Permissions::Read));
        assert!(GuestMemory::check_range(&near, GuestAddress(0x1ff8), 16, Permissions::Read));
        near.read_slice(&mut [], GuestAddress(u64::MAX)).unwrap();
    }
}
