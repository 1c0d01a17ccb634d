// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM for tests.

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileSlice};

use crate::GuestRam;

/// Guest RAM made of regions, each of them contiguous in host memory and none next to another there.
#[derive(Debug)]
pub struct TestRam(GuestMemoryMmap<()>);

impl TestRam {
    /// RAM at these guest addresses: `(gpa, len)` each, in bytes.
    ///
    /// # Panics
    /// If the regions overlap, or the memory is not to be had.
    pub fn new(regions: &[(u64, usize)]) -> Self {
        let regions: Vec<_> = regions.iter().map(|&(gpa, len)| (GuestAddress(gpa), len)).collect();
        Self(GuestMemoryMmap::from_ranges(&regions).expect("the regions are disjoint"))
    }

    /// Where the byte at `gpa` is in the host's address space.
    ///
    /// # Panics
    /// If there is no RAM.
    pub fn host_address(&self, gpa: u64) -> usize {
        let slice = self.slice(gpa, 1).expect("there is RAM");
        slice.ptr_guard().as_ptr().addr()
    }
}

impl GuestRam for TestRam {
    fn slice(&self, gpa: u64, len: u64) -> Option<VolatileSlice<'_>> {
        let len = usize::try_from(len).ok()?;
        self.0.get_slice(GuestAddress(gpa), len).ok()
    }

    fn regions(&self) -> Vec<(u64, u64)> {
        self.0.iter().map(|region| (region.start_addr().0, region.len())).collect()
    }

    fn prefix(&self, gpa: u64, len: u64) -> Option<VolatileSlice<'_>> {
        let len = usize::try_from(len).ok()?;
        self.0.get_slices(GuestAddress(gpa), len).next()?.ok()
    }
}
