// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Files and block devices of the host that hold images: opening them, and what they say of themselves.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use log::warn;
use rustix::fs::{
    AtFlags, FallocateFlags, FsWord, Mode, OFlags, StatxFlags, fallocate, fcntl_getfl, fcntl_setfl, fstatfs,
    open as open_file, statx,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::ioctl::{Getter, ioctl, opcode};

use super::buffer::{Buffer, PAGE};
use super::error::ImageError;
use super::lock::reopen;
use crate::inherited::{self, Access};

/// `TMPFS_MAGIC`.
const TMPFS: FsWord = 0x0102_1994;

/// Opens a file or a block device, and tells whether it is the latter. A descriptor that was inherited takes its place
/// ([`inherited::file`]). The process opens its file anew if it may: flags and locks are not the parent's then.
///
/// # Errors
/// It is neither, or the host refuses.
pub(super) fn open(path: &Path, read_only: bool) -> Result<(File, bool), ImageError> {
    if let Some(inherited) = inherited::file(path, if read_only { Access::Read } else { Access::ReadWrite }) {
        let inherited = inherited?;
        let file = reopen(inherited.as_fd(), read_only).unwrap_or(inherited);
        let is_device = file.metadata()?.file_type().is_block_device();
        return Ok((file, is_device));
    }
    let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
    // What opens a pipe would wait for its other end.
    let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(open_file(path, flags, Mode::empty()).map_err(io::Error::from)?);
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(ImageError::Kind);
    }
    Ok((file, kind.is_block_device()))
}

/// Has reads and writes that cannot be done at once wait, not fail, and pass the host's page cache by if `direct`.
///
/// # Errors
/// The file system knows no direct I/O.
pub(super) fn set_flags(file: &File, direct: bool) -> Result<(), ImageError> {
    let mut flags = (fcntl_getfl(file).map_err(io::Error::from)?) & !OFlags::NONBLOCK;
    // A file that was inherited may have it.
    flags.set(OFlags::DIRECT, direct);
    fcntl_setfl(file, flags)
        .map_err(|error| if direct { ImageError::Direct(error.into()) } else { ImageError::Host(error.into()) })
}

/// True if a block device can only be read (`BLKROGET`).
///
/// # Errors
/// The host refuses.
pub fn is_read_only_device(device: &File) -> io::Result<bool> {
    const BLKROGET: u32 = opcode::none(0x12, 94);
    // SAFETY: The kernel writes an int for this operation.
    let get = unsafe { Getter::<BLKROGET, libc::c_int>::new() };
    // SAFETY: It reads a property of what the descriptor is of, or fails.
    Ok(unsafe { ioctl(device, get) }? != 0)
}

/// Has the file system keep room for `len` bytes from `offset` on, which it may be asked for beyond the end of the file.
///
/// # Errors
/// There is not as much.
pub(super) fn allocate(file: &File, offset: u64, len: u64) -> io::Result<()> {
    match retry_on_intr(|| fallocate(file, FallocateFlags::KEEP_SIZE, offset, len)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            warn!("the file system of an image cannot be asked for room: it may be lacking when the guest writes");
            Ok(())
        }
        outcome => Ok(outcome?),
    }
}

/// Whether a file is in the host's memory (tmpfs).
pub(super) fn is_in_memory(file: &File) -> bool {
    fstatfs(file).is_ok_and(|system| system.f_type == TMPFS)
}

/// Bytes of a block device (`BLKGETSIZE64`).
pub(super) fn size_of_device(device: &File) -> io::Result<u64> {
    const BLKGETSIZE64: u32 = opcode::read::<usize>(0x12, 114);
    // SAFETY: The kernel writes a u64 for this operation.
    let get = unsafe { Getter::<BLKGETSIZE64, u64>::new() };
    // SAFETY: It reads the size of what the descriptor is of, or fails.
    Ok(unsafe { ioctl(device, get) }?)
}

/// What direct I/O must be aligned to.
pub(super) struct Alignment {
    /// Addresses of buffers.
    pub(super) memory: usize,
    /// Places in the file, and lengths.
    pub(super) offset: u32,
}

/// What direct I/O on `file`, which is open for it, must be aligned to.
///
/// # Errors
/// The file system knows none.
pub(super) fn direct_alignment(file: &File) -> Result<Alignment, ImageError> {
    if let Ok(told) = statx(file.as_fd(), c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        && told.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        let memory = usize::try_from(told.stx_dio_mem_align).unwrap_or(0);
        if memory == 0 || memory > PAGE || told.stx_dio_offset_align == 0 {
            return Err(ImageError::Direct(io::ErrorKind::Unsupported.into()));
        }
        return Ok(Alignment { memory: memory.max(2), offset: told.stx_dio_offset_align.max(512) });
    }
    // Before Linux 6.1 one has to try.
    let mut buffer = Buffer::new(PAGE);
    let mut refused = io::ErrorKind::Unsupported.into();
    for offset in [512u32, 4096] {
        match file.read_at(&mut buffer.bytes_mut()[..offset as usize], 0) {
            Ok(_) => return Ok(Alignment { memory: offset as usize, offset }),
            Err(error) => refused = error,
        }
    }
    Err(ImageError::Direct(refused))
}
