// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The memory of one chunk: an anonymous file of its own.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::retry_on_intr;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

/// Bytes of the huge pages that chunks can be made of.
pub(super) const HUGE_PAGE: u64 = 2 << 20;

/// A chunk's memory: zeroed, all of it allocated, sealed so that nobody it is handed to can resize it. Dropping the last
/// descriptor and mapping gives the memory back to the host.
#[derive(Debug)]
pub(super) struct Chunk(OwnedFd);

impl Chunk {
    /// Allocates `size` bytes, as huge pages of 2 MiB if `huge`.
    ///
    /// # Errors
    /// `ENOMEM` or `ENOSPC` when the host has no memory or no huge page left.
    pub(super) fn allocate(size: u64, huge: bool) -> io::Result<Self> {
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if huge {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        let file = memfd_create("carom-window", flags)?;
        ftruncate(&file, size)?;
        // vCPU threads are kicked by signals, which interrupt an allocation half way.
        retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), 0, size))?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self(file))
    }
}

impl Chunk {
    /// Writes zeros over its `size` bytes, in place: whoever else maps it sees them.
    ///
    /// # Errors
    /// What the kernel refused. The bytes may be as they were.
    pub(super) fn zero(&self, size: usize) -> io::Result<()> {
        let file = FileOffset::new(self.0.try_clone()?.into(), 0);
        // Mapped for the purpose: a file of huge pages cannot be written to otherwise.
        let view = MmapRegion::<()>::from_file(file, size).map_err(io::Error::other)?;
        let zeros = [0; 4096];
        for offset in (0..size).step_by(zeros.len()) {
            let len = zeros.len().min(size - offset);
            view.as_volatile_slice().write_slice(&zeros[..len], offset).map_err(io::Error::other)?;
        }
        Ok(())
    }
}

impl AsFd for Chunk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether the host is out of something, rather than broken.
pub(super) fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::ENOSPC | libc::EMFILE | libc::ENFILE))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{fcntl_get_seals, fstat};

    use super::*;

    #[test]
    fn chunk_is_allocated_and_cannot_be_resized() {
        let chunk = Chunk::allocate(HUGE_PAGE, false).unwrap();
        let stat = fstat(&chunk).unwrap();
        assert_eq!(u64::try_from(stat.st_size).unwrap(), HUGE_PAGE);
        assert!(u64::try_from(stat.st_blocks).unwrap() * 512 >= HUGE_PAGE, "not allocated: {stat:?}");
        let seals = fcntl_get_seals(&chunk).unwrap();
        assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
        assert!(ftruncate(&chunk, 0).is_err());
        assert!(ftruncate(&chunk, 2 * HUGE_PAGE).is_err());
        assert!(fcntl_add_seals(&chunk, SealFlags::WRITE).is_err());
    }
}
