// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The host addresses behind the shared memory region. All unsafe code of the windows but the hand-over of memory slots
//! stands here.

use std::ffi::c_void;
use std::io;
use std::os::fd::AsFd;
use std::ptr;

use log::warn;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use vm_memory::VolatileSlice;

use crate::host_memory::{Origin, Registration, Supply, register};
use crate::platform::HostRange;

/// Bytes of the smallest page.
const SMALL_PAGE: usize = 4096;

/// A reserved range of this process's addresses, into which chunks are mapped. It holds no memory of its own, and no
/// Rust reference to its bytes is ever made: the guest and devices change them at any time.
pub(super) struct Region {
    /// What was reserved: the region and what alignment cost.
    reserved: HostRange,
    /// First address of the region, aligned on chunks.
    base: usize,
    chunk_size: usize,
    count: usize,
    /// The guest may see it for ever: it stays mapped.
    is_kept: bool,
    /// Its name in messages, once the guest can see it.
    name: Option<Registration>,
    /// How many attempts to map something fail.
    #[cfg(test)]
    pub(super) refusals: std::sync::atomic::AtomicU32,
}

impl Region {
    /// Reserves room for `count` chunks of `chunk_size` bytes, a power of two and a multiple of the page size.
    pub(super) fn reserve(chunk_size: usize, count: usize) -> io::Result<Self> {
        let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
        let len = count.checked_mul(chunk_size).and_then(|len| len.checked_add(chunk_size)).ok_or_else(too_large)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: No address is asked for, so the kernel picks one where nothing is.
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

    /// Registers it as guest memory, of huge pages if `huge`.
    pub(super) fn set_name(&mut self, huge: bool) {
        let supply = if huge { Supply::HugePages } else { Supply::Memory };
        let origin = Origin { name: "bounce windows".into(), supply, file: None, offset: 0, gpa: None };
        let range = HostRange { address: self.base, len: self.count * self.chunk_size };
        self.name = Some(register(range, origin));
    }

    /// Where chunk `index` lies in this process; `None` beyond the region.
    pub(super) fn place(&self, index: u32) -> Option<HostRange> {
        let index = usize::try_from(index).ok().filter(|index| *index < self.count)?;
        Some(HostRange { address: self.base + index * self.chunk_size, len: self.chunk_size })
    }

    /// The chunk that begins at an address of this process.
    pub(super) fn index(&self, address: usize) -> Option<u32> {
        let offset = address.checked_sub(self.base)?;
        let index = u32::try_from(offset / self.chunk_size).ok()?;
        (self.place(index)?.address == address).then_some(index)
    }

    /// Maps the start of `file`, which is at least a chunk long, as chunk `index` over whatever was mapped there, with
    /// all its pages present.
    ///
    /// # Errors
    /// What the kernel refused. The place then holds what it held before, or nothing that can be accessed.
    pub(super) fn map(&self, index: u32, file: impl AsFd) -> io::Result<()> {
        let place = self.place(index).ok_or(io::ErrorKind::InvalidInput)?;
        #[cfg(test)]
        self.fail_if_told()?;
        let address = ptr::with_exposed_provenance_mut::<c_void>(place.address);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::POPULATE;
        // SAFETY: The range lies within the reservation, which nothing else in this process uses, and is accessed
        // through raw pointers and by the guest only, for which any mapping will do.
        let result = unsafe { mmap(address, place.len, access, flags, file, 0) };
        if let Err(error) = result {
            self.fill_hole(place);
            return Err(error.into());
        }
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            // SAFETY: The range was just mapped; neither advice changes its bytes or its access.
            if let Err(error) = unsafe { madvise(address, place.len, advice) } {
                warn!("advice on window memory refused, which only costs memory in a fork or a core dump: {error}");
            }
        }
        Ok(())
    }

    /// Fails as a kernel does that has no memory, as often as a test has told.
    #[cfg(test)]
    fn fail_if_told(&self) -> io::Result<()> {
        use std::sync::atomic::Ordering::Relaxed;
        let told = self.refusals.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
        told.map_or(Ok(()), |_| Err(io::Error::from_raw_os_error(libc::ENOMEM)))
    }

    /// Has the kernel make the first `len` bytes of `file`, a multiple of the huge page's size, of huge pages: at once, with
    /// whatever it takes to free some, and whatever the host's settings say memory files get by themselves (madvise(2),
    /// `MADV_COLLAPSE`; Linux 6.1 and later).
    ///
    /// # Errors
    /// What the kernel refused: it knows no such advice, has no huge page, or was told to deny them to memory files. The
    /// file may have some then; its bytes are as they were.
    pub(super) fn collapse(file: impl AsFd, len: usize) -> io::Result<()> {
        // A place of its own, aligned on its length.
        let region = Self::reserve(len, 1)?;
        let address = ptr::with_exposed_provenance_mut::<c_void>(region.base);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: The range lies within the reservation, which nobody else knows of.
        unsafe { mmap(address, len, access, MapFlags::SHARED | MapFlags::FIXED, file, 0) }?;
        // Where no page table is yet, some kernels (6.18) find nothing to do.
        // SAFETY: The range was just mapped; the advice changes neither its bytes nor its access.
        unsafe { madvise(address, SMALL_PAGE, Advice::LinuxPopulateWrite) }?;
        // SAFETY: As above.
        match unsafe { libc::madvise(address, len, libc::MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// A kernel that fails to map over a range may have unmapped it already. Reserves it again, so that nothing else of
    /// this process comes to lie where the guest may look.
    fn fill_hole(&self, place: HostRange) {
        let address = ptr::with_exposed_provenance_mut::<c_void>(place.address);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: FIXED_NOREPLACE leaves alone whatever is mapped there.
        let result = unsafe { mmap_anonymous(address, place.len, ProtFlags::empty(), flags) };
        if let Err(error) = result
            && error != rustix::io::Errno::EXIST
        {
            warn!("window memory at {:#x} could not be reserved again: {error}", place.address);
        }
    }

    /// Leaves it mapped when it is dropped: the guest may see a place of it still. Nothing else of this process may come to lie there.
    pub(super) fn keep(&mut self) {
        self.is_kept = true;
    }

    /// The bytes of chunk `index`; `None` beyond the region. Only for a chunk that a file was mapped to: elsewhere an
    /// access through the slice faults.
    pub(super) fn slice(&self, index: u32) -> Option<VolatileSlice<'_>> {
        let place = self.place(index)?;
        let address = ptr::with_exposed_provenance_mut::<u8>(place.address);
        // SAFETY: The range belongs to the reservation, which lives as long as `self`, and stays mapped in it.
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
        // SAFETY: The reservation is ours alone, its owner has removed all slots or called `keep`, and slices borrow from `self`.
        if let Err(error) = unsafe { munmap(address, self.reserved.len) } {
            warn!("window memory could not be unmapped: {error}");
        }
    }
}
