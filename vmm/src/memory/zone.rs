// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host memory that backs a zone of RAM.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use carom_api::config::MemoryZoneConfig;
use carom_api::error::FileError;
use devices::file_size;
use devices::ram::RamRegion;
use log::debug;
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals, fstatfs, ftruncate, memfd_create,
    open,
};
use rustix::io::retry_on_intr;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryRegion, MmapRegion};

use super::MemoryError;
use super::policy::hold_to_node;
use crate::arch::layout::{GIB, MIB};

/// Size of a huge page. With huge pages, the host, KVM and the IOMMU need fewer page tables.
const HUGE_PAGE: u64 = 2 * MIB;
/// Magic number of the hugetlbfs file system in `statfs` (`HUGETLBFS_MAGIC`).
const HUGETLBFS: u64 = 0x9584_58f6;

/// Memory that backs a zone.
enum Backing {
    /// Private memory of this process.
    Private,
    /// A file that is mapped as shared memory. Writes to RAM change the file, and other processes may map the file too.
    Shared(Arc<File>),
    /// A file that is mapped privately. RAM starts with the file's contents, and writes to RAM do not reach the file.
    Copied(File),
}

impl Backing {
    /// Creates or opens the backing memory of `zone`, with `size` bytes.
    fn new(zone: &MemoryZoneConfig, size: u64) -> Result<Self, MemoryError> {
        Ok(match &zone.file {
            Some(path) if zone.shared => Self::Shared(Arc::new(open_file(path, true, size)?)),
            Some(path) => Self::Copied(open_file(path, false, size)?),
            None if zone.can_be_shared() => Self::Shared(memfd(zone, size)?),
            None => Self::Private,
        })
    }

    fn shared(&self) -> Option<&Arc<File>> {
        match self {
            Self::Shared(file) => Some(file),
            Self::Private | Self::Copied(_) => None,
        }
    }
}

/// Opens the file of a zone. If the path is a directory, creates an unnamed file in this directory.
fn open_file(path: &Path, shared: bool, size: u64) -> Result<File, FileError> {
    let fail = |source| FileError { field: MemoryZoneConfig::FILE, path: path.display().to_string(), source };
    let access = if shared { OFlags::RDWR } else { OFlags::RDONLY };
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let in_directory = path.is_dir();
    let opened = match in_directory {
        true => open(path, OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR),
        false => open(path, access | flags, Mode::empty()),
    };
    let file = File::from(opened.map_err(|error| fail(error.into()))?);
    let metadata = file.metadata().map_err(fail)?;
    if !metadata.is_file() {
        return Err(fail(io::Error::other("is neither a regular file nor a directory")));
    }
    let system = fstatfs(&file).map_err(|error| fail(error.into()))?.f_type;
    if u64::try_from(system) == Ok(HUGETLBFS) {
        return Err(fail(io::Error::other("is on a hugetlbfs file system: use hugepages instead of a file")));
    }
    if in_directory {
        file.set_len(size).map_err(|error| fail(file_size::explain(error)))?;
    } else if metadata.len() < size {
        let rule = format!(
            "has {} bytes, fewer than the zone's {size} bytes: enlarge the file, or make the zone smaller",
            metadata.len()
        );
        return Err(fail(io::Error::other(rule)));
    }
    Ok(file)
}

/// Creates the regions of a zone. `ranges` has the guest-physical address and the length of each region.
pub(super) fn regions(
    zone: &MemoryZoneConfig,
    thp: bool,
    ranges: &[(u64, u64)],
) -> Result<Vec<RamRegion>, MemoryError> {
    let size = ranges.iter().map(|(_, len)| len).sum();
    let backing = Backing::new(zone, size)?;
    let map_error = |message| MemoryError::Map { size, message };
    let mut offset = 0;
    let mut mappings = Vec::new();
    for &(gpa, len) in ranges {
        let place = backing.shared().map(|file| FileOffset::from_arc(file.clone(), offset));
        let mapping = map_aligned(zone, place.as_ref(), len).map_err(map_error)?;
        if let Backing::Copied(file) = &backing {
            map_privately(&mapping, file, offset, zone.reserve).map_err(|error| map_error(error.to_string()))?;
        }
        // The NUMA policy must be set before the first page is allocated.
        if let Some(node) = zone.host_numa_node {
            hold_to_node(&mapping, node)?;
        }
        // Exclude RAM from core dumps, because RAM contains the guest's data and is far larger than the rest of the process.
        advise(&mapping, Advice::LinuxDontDump, "core dumps without guest RAM");
        if thp && !zone.hugepages {
            advise(&mapping, Advice::LinuxHugepage, "transparent huge pages");
        }
        if zone.mergeable {
            advise(&mapping, Advice::LinuxMergeable, "merging of pages");
        }
        mappings.push((gpa, mapping));
        offset += len;
    }
    if let Some(file) = backing.shared() {
        take(zone, file, size)?;
    }
    let mut regions = Vec::new();
    for (gpa, mapping) in mappings {
        if zone.prefault {
            populate(&mapping).map_err(|source| MemoryError::Prefault { size, source })?;
        }
        let region = RamRegion::new(mapping, GuestAddress(gpa));
        regions.push(region.ok_or_else(|| map_error("the region exceeds the guest-physical address space".into()))?);
    }
    Ok(regions)
}

/// Allocates all pages of a shared zone now, if `hugepages` or `reserve` is set for the zone.
fn take(zone: &MemoryZoneConfig, file: &File, size: u64) -> Result<(), MemoryError> {
    let take = || {
        let taken = retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, size));
        taken.map_err(|error| file_size::explain(error.into()))
    };
    if zone.hugepages {
        // Allocate the huge pages now. If they were allocated later and the host had none left, the guest's access would kill this process
        // (SIGBUS).
        return take().map_err(|source| MemoryError::Create {
            size,
            zone: zone.id.clone(),
            huge_page: Some(zone.huge_page()),
            source,
        });
    }
    if zone.reserve { take().map_err(|source| MemoryError::Reserve { size, source }) } else { Ok(()) }
}

fn memfd(zone: &MemoryZoneConfig, size: u64) -> Result<Arc<File>, MemoryError> {
    let flags = match zone.huge_page() {
        _ if !zone.hugepages => MemfdFlags::empty(),
        GIB => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        _ => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
    };
    let make = || {
        let fd = memfd_create("carom-guest-ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags)?;
        ftruncate(&fd, size)?;
        // Without the seals, another process could shrink the file. An access beyond the new end would then kill this process (SIGBUS).
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Arc::new(File::from(fd)))
    };
    make().map_err(|error: rustix::io::Errno| MemoryError::Create {
        size,
        zone: zone.id.clone(),
        huge_page: zone.hugepages.then(|| zone.huge_page()),
        source: file_size::explain(error.into()),
    })
}

/// Maps `len` bytes, aligned to the huge page size if possible. KVM and the kernel can use huge pages only if guest-physical and host
/// addresses are equal modulo the huge page size.
fn map_aligned(zone: &MemoryZoneConfig, file: Option<&FileOffset>, len: u64) -> Result<MmapRegion, String> {
    let map = |len: u64| -> Result<MmapRegion, String> {
        let len = usize::try_from(len).map_err(|error| error.to_string())?;
        let kind = if file.is_some() { libc::MAP_SHARED } else { libc::MAP_ANONYMOUS | libc::MAP_PRIVATE };
        let reserve = if zone.reserve { 0 } else { libc::MAP_NORESERVE };
        MmapRegion::build(file.cloned(), len, libc::PROT_READ | libc::PROT_WRITE, kind | reserve)
            .map_err(|error| error.to_string())
    };
    let excess = |mapping: &MmapRegion| mapping.as_ptr() as u64 % HUGE_PAGE;
    let first = map(len)?;
    let too_high = excess(&first);
    // The kernel aligns mappings of reserved huge pages itself.
    if too_high == 0 || zone.hugepages {
        return Ok(first);
    }
    // The kernel usually places a new mapping right below the previous mapping. So replace the first mapping by a filler of `too_high`
    // bytes, which ends where the first mapping ended. The second mapping then starts `too_high` bytes below the start of the first
    // mapping. If the kernel places the second mapping elsewhere, RAM is slower, but works.
    drop(first);
    let filler = MmapRegion::<()>::new(usize::try_from(too_high).map_err(|error| error.to_string())?);
    let second = map(len)?;
    drop(filler);
    if excess(&second) != 0 {
        debug!("guest RAM of {len:#x} bytes is at {:p}, which prevents huge pages", second.as_ptr());
    }
    Ok(second)
}

/// Replaces the unused `mapping` with a private mapping of `file` from `offset` on. Writes to the mapping do not reach the file.
///
/// # Errors
/// The kernel rejects the call. A file that is too short is not an error here, so callers must check the file's length.
pub fn map_privately(mapping: &MmapRegion, file: &impl AsFd, offset: u64, reserve: bool) -> io::Result<()> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let how = if reserve { MapFlags::empty() } else { MapFlags::NORESERVE };
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | how;
    // SAFETY: The range is the memory of `mapping`, which is unused, so no reference to its bytes exists. The range stays mapped until
    // `mapping` is dropped.
    unsafe { mmap(mapping.as_ptr().cast(), mapping.size(), access, flags, file, offset) }?;
    advise(mapping, Advice::LinuxDontDump, "core dumps without guest RAM");
    Ok(())
}

/// Releases all host memory of a region. The region stays mapped, and the kernel allocates new pages at later accesses.
///
/// # Errors
/// The kernel rejects the call.
pub(super) fn empty(region: &RamRegion) -> io::Result<()> {
    // If the region maps a shared file, its pages must be removed from the file. Otherwise the next access would map the old pages again.
    let advice = if region.file_offset().is_some() { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
    // SAFETY: The range is the memory of `region`, and stays mapped. The contents change as if the guest had written them, and no Rust
    // reference to guest RAM exists.
    Ok(unsafe { madvise(region.as_ptr().cast(), region.size(), advice) }?)
}

/// Allocates the pages of an emptied region again, if the settings of `zone` require pages to be allocated in advance.
pub(super) fn refill(zone: &MemoryZoneConfig, region: &RamRegion) -> Result<(), MemoryError> {
    let size = region.len();
    if let Some(file) = region.file_offset() {
        take(zone, file.arc(), size)?;
    }
    if zone.prefault { populate(region).map_err(|source| MemoryError::Prefault { size, source }) } else { Ok(()) }
}

/// Gives the kernel advice about a mapping (`madvise`). With their default settings, some hosts use transparent huge pages only for
/// mappings with [`Advice::LinuxHugepage`].
fn advise(mapping: &MmapRegion, advice: Advice, what: &str) {
    // SAFETY: The range is the memory of `mapping`, and this advice does not change its contents.
    let result = unsafe { madvise(mapping.as_ptr().cast(), mapping.size(), advice) };
    if let Err(error) = result {
        debug!("cannot set an optional property of guest RAM ({what}): {error}");
    }
}

/// Allocates all pages of a mapping now.
///
/// # Errors
/// The kernel rejects the call, for example because no pages are left.
pub fn populate(mapping: &MmapRegion) -> io::Result<()> {
    // SAFETY: The range is the memory of `mapping`. The call only allocates missing pages, and does not change the contents.
    Ok(unsafe { madvise(mapping.as_ptr().cast(), mapping.size(), Advice::LinuxPopulateWrite) }?)
}
