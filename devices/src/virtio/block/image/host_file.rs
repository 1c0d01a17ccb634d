// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Functions that open the host files and block devices of images, and read their properties.

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

/// File system type of tmpfs (`TMPFS_MAGIC`).
const TMPFS: FsWord = 0x0102_1994;

/// Opens a file or a block device. Returns the file, and true if the path names a block device.
///
/// If the process has inherited a descriptor for the path ([`inherited::file`]), this function tries to open the descriptor's file again.
/// The process and its parent then share no flags and no locks. If the open fails, this function returns the inherited descriptor.
///
/// # Errors
/// The path names neither a file nor a block device, or the host rejects the operation.
pub(super) fn open(path: &Path, read_only: bool) -> Result<(File, bool), ImageError> {
    if let Some(inherited) = inherited::file(path, if read_only { Access::Read } else { Access::ReadWrite }) {
        let inherited = inherited?;
        let file = reopen(inherited.as_fd(), read_only).unwrap_or(inherited);
        let is_device = file.metadata()?.file_type().is_block_device();
        return Ok((file, is_device));
    }
    let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
    // Without `O_NONBLOCK`, an open of a pipe would wait until another process opens the pipe's other end.
    let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(open_file(path, flags, Mode::empty()).map_err(io::Error::from)?);
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(ImageError::Kind);
    }
    Ok((file, kind.is_block_device()))
}

/// Clears `O_NONBLOCK`. Sets `O_DIRECT` if `direct` is true, and clears it otherwise. Without `O_NONBLOCK`, reads and writes wait instead
/// of failing.
///
/// # Errors
/// The file system does not support direct I/O.
pub(super) fn set_flags(file: &File, direct: bool) -> Result<(), ImageError> {
    let mut flags = (fcntl_getfl(file).map_err(io::Error::from)?) & !OFlags::NONBLOCK;
    // An inherited descriptor may have `O_DIRECT` set.
    flags.set(OFlags::DIRECT, direct);
    fcntl_setfl(file, flags)
        .map_err(|error| if direct { ImageError::Direct(error.into()) } else { ImageError::Host(error.into()) })
}

/// Returns true if a block device is read-only (`BLKROGET`).
///
/// # Errors
/// The host rejects the operation.
pub fn is_read_only_device(device: &File) -> io::Result<bool> {
    const BLKROGET: u32 = opcode::none(0x12, 94);
    // SAFETY: The kernel writes an int for this operation.
    let get = unsafe { Getter::<BLKROGET, libc::c_int>::new() };
    // SAFETY: The operation only reads a property of the device, or fails if the descriptor is not a block device.
    Ok(unsafe { ioctl(device, get) }? != 0)
}

/// Reserves disk space for `len` bytes from `offset` on. The range may lie beyond the end of the file.
///
/// # Errors
/// The file system has too little free space.
pub(super) fn allocate(file: &File, offset: u64, len: u64) -> io::Result<()> {
    match retry_on_intr(|| fallocate(file, FallocateFlags::KEEP_SIZE, offset, len)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            warn!(
                "cannot reserve disk space for a disk image, because its file system has no fallocate: guest writes fail when the file system is full"
            );
            Ok(())
        }
        outcome => Ok(outcome?),
    }
}

/// Returns true if a file is in the host's memory (tmpfs).
pub(super) fn is_in_memory(file: &File) -> bool {
    fstatfs(file).is_ok_and(|system| system.f_type == TMPFS)
}

/// Returns the size of a block device in bytes (`BLKGETSIZE64`).
pub(super) fn size_of_device(device: &File) -> io::Result<u64> {
    const BLKGETSIZE64: u32 = opcode::read::<usize>(0x12, 114);
    // SAFETY: The kernel writes a u64 for this operation.
    let get = unsafe { Getter::<BLKGETSIZE64, u64>::new() };
    // SAFETY: The operation only reads the size of the device, or fails if the descriptor is not a block device.
    Ok(unsafe { ioctl(device, get) }?)
}

/// Alignment that direct I/O needs.
pub(super) struct Alignment {
    /// Alignment of buffer addresses.
    pub(super) memory: usize,
    /// Alignment of file offsets and lengths.
    pub(super) offset: u32,
}

/// Returns the alignment that direct I/O on `file` needs. The file must be open with `O_DIRECT`.
///
/// # Errors
/// The file system does not support direct I/O.
pub(super) fn direct_alignment(file: &File) -> Result<Alignment, ImageError> {
    if let Ok(stat) = statx(file.as_fd(), c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        && stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        let memory = usize::try_from(stat.stx_dio_mem_align).unwrap_or(0);
        if memory == 0 || memory > PAGE || stat.stx_dio_offset_align == 0 {
            return Err(ImageError::Direct(io::ErrorKind::Unsupported.into()));
        }
        return Ok(Alignment { memory: memory.max(2), offset: stat.stx_dio_offset_align.max(512) });
    }
    // Linux before 6.1 cannot report the alignment, so try reads.
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
