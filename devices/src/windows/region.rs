// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host addresses of the shared memory region. This module contains all unsafe code of window memory, except the code that creates memory
//! slots.

use std::ffi::c_void;
use std::io;
use std::os::fd::AsFd;
use std::ptr;

use log::warn;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use vm_memory::VolatileSlice;

use crate::host_memory::{Origin, Registration, Supply, register};
use crate::platform::HostRange;

/// Size of the smallest page in bytes.
const SMALL_PAGE: usize = 4096;

/// Reserved range of this process's addresses for chunks. The reservation itself allocates no memory. No code creates Rust references to
/// bytes of the range, because the guest and devices can change these bytes at any time.
pub(super) struct Region {
    /// Reserved range: the region, and the padding for its alignment.
    reserved: HostRange,
    /// First address of the region, aligned to the chunk size.
    base: usize,
    chunk_size: usize,
    count: usize,
    /// True if the region must stay mapped for ever, because the guest may still see it.
    is_kept: bool,
    /// Registered name of the region, for messages about lost memory. `None` for a temporary region, which the guest never sees.
    name: Option<Registration>,
    /// Number of calls of [`map`](Self::map) that fail from now on, in tests.
    #[cfg(test)]
    pub(super) refusals: std::sync::atomic::AtomicU32,
}

impl Region {
    /// Reserves addresses for `count` chunks of `chunk_size` bytes. `chunk_size` is a power of two and a multiple of the page size.
    pub(super) fn reserve(chunk_size: usize, count: usize) -> io::Result<Self> {
        let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
        let len = count.checked_mul(chunk_size).and_then(|len| len.checked_add(chunk_size)).ok_or_else(too_large)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: No address is requested, so the kernel picks an unused range.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), flags) }?;
        let address = start.expose_provenance();
        let base = address.next_multiple_of(chunk_size);
        Ok(Self {
            reserved: HostRange { address, len },
            base,
            chunk_size,
            count,
            is_kept: false,
            name: None,
            #[cfg(test)]
            refusals: Default::default(),
        })
    }

    /// Registers the region as guest memory. `huge` is true if the chunks of the region consist of reserved huge pages.
    pub(super) fn set_name(&mut self, huge: bool) {
        let supply = if huge { Supply::HugePages } else { Supply::Memory };
        let origin = Origin { name: "bounce windows".into(), supply, file: None, offset: 0, gpa: None };
        let range = HostRange { address: self.base, len: self.count * self.chunk_size };
        self.name = Some(register(range, origin));
    }

    /// Returns the range of chunk `index` in this process, or `None` if the region has no such chunk.
    pub(super) fn place(&self, index: u32) -> Option<HostRange> {
        let index = usize::try_from(index).ok().filter(|index| *index < self.count)?;
        Some(HostRange { address: self.base + index * self.chunk_size, len: self.chunk_size })
    }

    /// Returns the index of the chunk that begins at `address` of this process.
    pub(super) fn index(&self, address: usize) -> Option<u32> {
        let offset = address.checked_sub(self.base)?;
        let index = u32::try_from(offset / self.chunk_size).ok()?;
        (self.place(index)?.address == address).then_some(index)
    }

    /// Maps the start of `file` as chunk `index`, and makes all pages of the mapping present. Replaces the old mapping of the place. `file`
    /// must have at least the size of a chunk.
    ///
    /// # Errors
    /// The kernel rejected the mapping. The place then has its old mapping, or is inaccessible.
    pub(super) fn map(&self, index: u32, file: impl AsFd) -> io::Result<()> {
        let place = self.place(index).ok_or(io::ErrorKind::InvalidInput)?;
        #[cfg(test)]
        self.fail_if_configured()?;
        let address = ptr::with_exposed_provenance_mut::<c_void>(place.address);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::POPULATE;
        // SAFETY: The range lies within the reservation, which nothing else in this process uses. Only raw pointers and the guest access
        // the range, and any mapping is valid for such accesses.
        let result = unsafe { mmap(address, place.len, access, flags, file, 0) };
        if let Err(error) = result {
            self.fill_hole(place);
            return Err(error.into());
        }
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            // SAFETY: The range was just mapped. Neither advice changes its bytes or its access rights.
            if let Err(error) = unsafe { madvise(address, place.len, advice) } {
                warn!(
                    "cannot exclude window memory from forks and core dumps, so forks may be slower and core dumps larger: {error}"
                );
            }
        }
        Ok(())
    }

    /// Fails like a kernel without free memory, for as many calls as a test has requested.
    #[cfg(test)]
    fn fail_if_configured(&self) -> io::Result<()> {
        use std::sync::atomic::Ordering::Relaxed;
        let refusal = self.refusals.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
        refusal.map_or(Ok(()), |_| Err(io::Error::from_raw_os_error(libc::ENOMEM)))
    }

    /// Asks the kernel to back the first `len` bytes of `file` with huge pages now. `len` is a multiple of the huge page size.
    ///
    /// The kernel reclaims and compacts memory if necessary. The kernel does so even if the host's setting for memory files uses no huge
    /// pages by default (madvise(2), `MADV_COLLAPSE`; Linux 6.1 and later).
    ///
    /// # Errors
    /// The kernel does not support the advice, has no free huge page, or is configured to deny huge pages to memory files. The file may
    /// then have some huge pages. Its bytes do not change.
    pub(super) fn collapse(file: impl AsFd, len: usize) -> io::Result<()> {
        // Map the file at a temporary address that is aligned to its length.
        let region = Self::reserve(len, 1)?;
        let address = ptr::with_exposed_provenance_mut::<c_void>(region.base);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: The range lies within the reservation, which no other code knows.
        unsafe { mmap(address, len, access, MapFlags::SHARED | MapFlags::FIXED, file, 0) }?;
        // Some kernels (6.18) collapse nothing if the range has no page table yet. So populate one page.
        // SAFETY: The range was just mapped. The advice changes neither its bytes nor its access rights.
        unsafe { madvise(address, SMALL_PAGE, Advice::LinuxPopulateWrite) }?;
        // SAFETY: The range was just mapped. The advice changes neither its bytes nor its access rights.
        match unsafe { libc::madvise(address, len, libc::MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Reserves a range again after a failed mapping, because the kernel may already have unmapped the old mapping. Otherwise another
    /// mapping of this process could appear at an address that the guest can access.
    fn fill_hole(&self, place: HostRange) {
        let address = ptr::with_exposed_provenance_mut::<c_void>(place.address);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: FIXED_NOREPLACE never replaces an existing mapping.
        let result = unsafe { mmap_anonymous(address, place.len, ProtFlags::empty(), flags) };
        if let Err(error) = result
            && error != rustix::io::Errno::EXIST
        {
            warn!("cannot reserve the addresses of window memory at {:#x} again: {error}", place.address);
        }
    }

    /// Keeps the region mapped even after this value is dropped, because the guest may still see part of it. No other mapping of this
    /// process may use the region's addresses.
    pub(super) fn keep(&mut self) {
        self.is_kept = true;
    }

    /// Returns the bytes of chunk `index`, or `None` if the region has no such chunk. If no file is mapped at the chunk's place, an access
    /// through the slice faults.
    pub(super) fn slice(&self, index: u32) -> Option<VolatileSlice<'_>> {
        let place = self.place(index)?;
        let address = ptr::with_exposed_provenance_mut::<u8>(place.address);
        // SAFETY: The range is part of the reservation, which stays mapped as long as `self` lives.
        Some(unsafe { VolatileSlice::new(address, place.len) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.is_kept {
            std::mem::forget(self.name.take());
            return;
        }
        drop(self.name.take());
        let address = ptr::with_exposed_provenance_mut::<c_void>(self.reserved.address);
        // SAFETY: Only `self` uses the reservation. The owner has removed all slots, or else has called `keep`. All slices borrow from
        // `self`.
        if let Err(error) = unsafe { munmap(address, self.reserved.len) } {
            warn!("cannot unmap window memory: {error}");
        }
    }
}
