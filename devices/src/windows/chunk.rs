// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory of one chunk: an anonymous file.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc;

use iommu_bounce::Permissions;
use log::debug;
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create, open,
};
use rustix::io::retry_on_intr;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use super::region::Region;
use crate::descriptors::check_reserve;
use crate::sandbox::{self, Call, ThreadRole};

/// Flags of `open` that open a file for writing, or create or truncate a file.
const NOT_FOR_READING: u32 = (libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC).cast_unsigned();

/// Calls that open a file for reading.
const OPENING: &[Call] =
    &[Call::Without(libc::SYS_open, 1, NOT_FOR_READING), Call::Without(libc::SYS_openat, 2, NOT_FOR_READING)];

/// Role of the thread that opens a chunk of window memory again, read-only, for another process.
pub const READER_ROLE: ThreadRole = ThreadRole { name: "window-reader", calls: &[OPENING] };

/// Size of a huge page in bytes.
pub(super) const HUGE_PAGE: u64 = 2 << 20;

/// Memory of a chunk: zeroed, completely allocated, and sealed so that no process can change its size. The host gets the memory back after
/// the last descriptor is closed and the last mapping is removed.
#[derive(Debug)]
pub(super) struct Chunk {
    file: OwnedFd,
    /// True if the chunk consists of reserved huge pages.
    is_huge: bool,
    /// True if another process may have the chunk mapped. That process can keep the mapping as long as it wants.
    handed_out: bool,
}

impl Chunk {
    /// Allocates `size` bytes. If `huge` is true, uses reserved huge pages of 2 MiB. Otherwise uses transparent huge pages if the host can
    /// provide them and `size` is a multiple of 2 MiB.
    ///
    /// # Errors
    /// * `ENOMEM` or `ENOSPC`: the host has no free memory or no free reserved huge page.
    /// * `EMFILE`: this process has too many open files.
    /// * `EFBIG`: the process's file size limit is less than `size`.
    pub(super) fn allocate(size: u64, huge: bool) -> io::Result<Self> {
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if huge {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        let file = memfd_create("carom-window", flags)?;
        check_reserve(&file)?;
        ftruncate(&file, size)?;
        if !huge && size.is_multiple_of(HUGE_PAGE) {
            // A huge page needs one entry in the page tables of this process, KVM and the IOMMU, instead of 512. Some of these entries are
            // created while the guest waits.
            let len = usize::try_from(size).map_err(io::Error::other)?;
            if let Err(error) = Region::collapse(&file, len) {
                debug!("a window chunk uses small pages, because the host cannot provide a huge page: {error}");
            }
        }
        // Signals kick vCPU threads out of the guest. Such a signal can also interrupt this call.
        retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), 0, size))?;
        // `hand_out` adds F_SEAL_SEAL later, because its argument `permissions` determines the other seals.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(Self { file, is_huge: huge, handed_out: false })
    }

    /// True if another process may have the chunk.
    pub(super) fn is_handed_out(&self) -> bool {
        self.handed_out
    }

    /// Returns a file descriptor for another process. The descriptor allows exactly the accesses in `permissions`. Existing mappings do not
    /// change.
    ///
    /// Returns `None` if no such descriptor is possible, in these cases:
    /// * `permissions` is write-only.
    /// * `permissions` includes write access, and the chunk consists of reserved huge pages. The other process could free and reallocate
    ///   these pages. Only `F_SEAL_WRITE` would prevent this, and this seal forbids all writes.
    ///
    /// The other process can keep the chunk for ever. So the chunk must not be reused for another owner.
    ///
    /// # Errors
    /// The host kernel rejected a call.
    pub(super) fn hand_out(&mut self, permissions: Permissions) -> io::Result<Option<OwnedFd>> {
        if !permissions.contains(Permissions::READ) {
            return Ok(None);
        }
        let writable = permissions.contains(Permissions::WRITE);
        if writable && self.is_huge {
            return Ok(None);
        }
        if !self.handed_out {
            // Another process could reopen a read-only descriptor for writing through /proc. So forbid all new writable mappings. The
            // existing writable mapping of this process stays.
            let more = if writable { SealFlags::empty() } else { SealFlags::FUTURE_WRITE };
            fcntl_add_seals(&self.file, SealFlags::SEAL | more)?;
            self.handed_out = true;
        }
        if writable {
            return Ok(Some(self.file.try_clone()?));
        }
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let (sender, receiver) = mpsc::channel();
        // A separate thread opens the file, because this thread may be a vCPU thread, and its sandbox forbids opening files. If the
        // separate thread ends early, `recv` fails.
        let open = move || drop(sender.send(open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())));
        sandbox::start(READER_ROLE, READER_ROLE.name.into(), open)?;
        Ok(Some(receiver.recv().map_err(io::Error::other)??))
    }
}

impl Drop for Chunk {
    /// Frees the memory even if another process still has the file. This is not possible if the chunk was handed out read-only.
    fn drop(&mut self) {
        if self.handed_out
            && let Ok(stat) = rustix::fs::fstat(&self.file)
            && let Ok(size) = u64::try_from(stat.st_size)
        {
            // This call fails if the chunk has F_SEAL_FUTURE_WRITE. The host then frees the memory when the last descriptor is closed.
            let _ = fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, size);
        }
    }
}

impl Chunk {
    /// Overwrites the chunk's `size` bytes with zeros in place. All other mappings see the zeros.
    ///
    /// # Errors
    /// The host kernel rejected a call. The bytes may be unchanged.
    pub(super) fn zero(&self, size: usize) -> io::Result<()> {
        let file = FileOffset::new(self.file.try_clone()?.into(), 0);
        // Map the file, because write(2) does not work on files of huge pages.
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
        self.file.as_fd()
    }
}

/// True if the error shows that the host has run out of a resource, such as memory or files.
pub(super) fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::ENOSPC | libc::EMFILE | libc::ENFILE | libc::EFBIG))
}

#[cfg(test)]
mod tests {
    use std::fs::{File, read_to_string};
    use std::os::unix::fs::FileExt;

    use rustix::fs::{fcntl_get_seals, fstat};

    use super::*;

    #[test]
    fn chunk_is_allocated_and_cannot_be_resized() {
        let chunk = Chunk::allocate(HUGE_PAGE, false).unwrap();
        let stat = fstat(&chunk).unwrap();
        assert_eq!(u64::try_from(stat.st_size).unwrap(), HUGE_PAGE);
        assert!(u64::try_from(stat.st_blocks).unwrap() * 512 >= HUGE_PAGE, "not allocated: {stat:?}");
        let seals = fcntl_get_seals(&chunk).unwrap();
        assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW));
        assert!(ftruncate(&chunk, 0).is_err());
        assert!(ftruncate(&chunk, 2 * HUGE_PAGE).is_err());
    }

    /// Returns a chunk that this process has mapped, like every chunk that Carom hands out.
    fn mapped() -> (Chunk, MmapRegion) {
        let chunk = Chunk::allocate(4096, false).unwrap();
        let file = FileOffset::new(chunk.file.try_clone().unwrap().into(), 0);
        let view = MmapRegion::from_file(file, 4096).unwrap();
        (chunk, view)
    }

    /// Reopens a file for reading and writing.
    fn reopen(file: &File) -> File {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        File::options().read(true).write(true).open(path).unwrap()
    }

    #[test]
    fn read_only_chunk_cannot_be_written_by_its_receiver() {
        let (mut chunk, view) = mapped();
        let file = File::from(chunk.hand_out(Permissions::READ).unwrap().unwrap());
        assert!(chunk.is_handed_out());
        view.as_volatile_slice().write_slice(&[7; 4096], 0).unwrap();
        let mut bytes = [0; 4096];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [7; 4096]);
        let map = |file: File| MmapRegion::<()>::from_file(FileOffset::new(file, 0), 4096);
        for file in [&file, &reopen(&file)] {
            assert!(file.write_at(&[1], 0).is_err());
            assert!(map(file.try_clone().unwrap()).is_err(), "mapped for writing");
            assert!(file.set_len(0).is_err() && fcntl_add_seals(file, SealFlags::WRITE).is_err());
        }
        assert!(chunk.hand_out(Permissions::READ).unwrap().is_some(), "the chunk can be handed out again");
    }

    #[test]
    fn writable_chunk_cannot_be_resized_or_sealed_by_its_receiver() {
        let (mut chunk, view) = mapped();
        let file = File::from(chunk.hand_out(Permissions::READ | Permissions::WRITE).unwrap().unwrap());
        file.write_all_at(&[5; 4096], 0).unwrap();
        assert_eq!(view.as_volatile_slice().read_obj::<u8>(4095).unwrap(), 5);
        assert!(file.set_len(0).is_err() && file.set_len(8192).is_err());
        assert!(fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).is_err());
        drop(chunk);
        assert_eq!(fstat(&file).unwrap().st_blocks, 0, "the memory is freed at once");
    }

    #[test]
    fn write_only_chunk_is_not_handed_out() {
        let (mut chunk, _view) = mapped();
        assert!(chunk.hand_out(Permissions::WRITE).unwrap().is_none());
        assert!(!chunk.is_handed_out());
    }

    /// Returns three results, which are true if a chunk can be handed out: for reads and writes, for reads only, and for writes only.
    /// Returns `None` if the host cannot allocate the chunks.
    fn handed_out(size: u64, huge: bool) -> Option<[bool; 3]> {
        let chunks = [Permissions::READ | Permissions::WRITE, Permissions::READ, Permissions::WRITE];
        let out = chunks.map(|permissions| {
            let mut chunk = Chunk::allocate(size, huge).ok()?;
            Some(chunk.hand_out(permissions).unwrap().is_some())
        });
        Some([out[0]?, out[1]?, out[2]?])
    }

    #[test]
    fn huge_pages_are_never_handed_out_writable() {
        assert_eq!(handed_out(HUGE_PAGE, false), Some([true, true, false]));
        match handed_out(HUGE_PAGE, true) {
            Some(out) => assert_eq!(out, [false, true, false]),
            None => eprintln!("skipped: the host has no reserved huge pages (/proc/sys/vm/nr_hugepages)"),
        }
        // The result depends only on `is_huge`, so this part of the test needs no reserved huge pages.
        let mut chunk = Chunk::allocate(4096, false).unwrap();
        chunk.is_huge = true;
        assert!(chunk.hand_out(Permissions::READ | Permissions::WRITE).unwrap().is_none());
        assert!(!chunk.is_handed_out());
    }

    /// True if the host can collapse memory files to huge pages, and has a free huge page now. If not, prints the reason.
    fn has_huge_pages() -> bool {
        let release = read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
        let version = (numbers.next().unwrap(), numbers.next().unwrap());
        let setting = read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
        if version < (6, 1) || setting.is_empty() || setting.contains("[deny]") {
            eprintln!("skipped: no huge pages for memory files: Linux {}, {}", release.trim(), setting.trim());
            return false;
        }
        let file = File::from(memfd_create("carom-test", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(HUGE_PAGE).unwrap();
        match Region::collapse(&file, usize::try_from(HUGE_PAGE).unwrap()) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN | libc::EBUSY)) => {
                eprintln!("skipped: the host has no free huge page now: {error}");
                false
            }
            other => other.map(|()| true).expect("this kernel collapses memory files"),
        }
    }

    /// Returns `field` in KiB from `/proc/self/smaps`, for the mapping that begins at `address`.
    fn mapping(address: usize, field: &str) -> u64 {
        let smaps = read_to_string("/proc/self/smaps").unwrap();
        let lines = smaps.lines().skip_while(|line| !line.starts_with(&format!("{address:x}-")));
        let line = lines.skip(1).find(|line| line.starts_with(field)).expect("no such mapping");
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn chunk_is_mapped_by_a_huge_page_where_the_host_has_one() {
        if !has_huge_pages() {
            return;
        }
        let len = usize::try_from(HUGE_PAGE).unwrap();
        let region = Region::reserve(len, 2).unwrap();
        let chunk = Chunk::allocate(HUGE_PAGE, false).unwrap();
        region.map(1, &chunk).unwrap();
        let place = region.place(1).unwrap();
        assert_eq!(mapping(place.address, "ShmemPmdMapped:"), HUGE_PAGE >> 10);
    }
}
