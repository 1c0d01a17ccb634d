// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of opening and resizing an image.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Reason why an image cannot be used.
#[derive(Debug, Error)]
pub enum ImageError {
    /// The file cannot be opened or examined.
    #[error("{0}")]
    Host(#[from] io::Error),
    /// The path names neither a file nor a block device.
    #[error("is neither a file nor a block device: name a file or block device with a disk image")]
    Kind,
    /// This process has already locked the image, for another disk or as a backing file.
    #[error("is already used by this VM, as the image or a backing file of a disk; {}", if *.read_only { "to share it, open it read-only everywhere" } else { "a writable image can have only one user" })]
    Used {
        /// True if this open was read-only.
        read_only: bool,
    },
    /// The host's block device is read-only.
    #[error("is a block device that can only be read")]
    ReadOnly,
    /// Another process has locked the image.
    #[error("is in use: another process has locked it; {}", if *.read_only { "to share it, open it read-only everywhere" } else { "a writable image can have only one user" })]
    Locked {
        /// True if this open was read-only.
        read_only: bool,
    },
    /// Writes of a process that has ended are still under way.
    #[error(
        "is in use: writes of a process that has ended are still under way; try again when the image's storage responds"
    )]
    Writing,
    /// The image is smaller than one block.
    #[error("has {bytes} bytes, less than one block of {block} bytes: enlarge the image")]
    Empty {
        /// Size of the image in bytes.
        bytes: u64,
        /// Size of a block in bytes.
        block: u32,
    },
    /// The image starts like an image of another format.
    #[error(
        "looks like an image in {0} format; set image_type to {0} if Carom supports this format, or to raw to give the guest the file's bytes unchanged"
    )]
    Format(&'static str),
    /// The image violates its format, or uses an unsupported feature of the format.
    #[error("{0}")]
    Malformed(String),
    /// The image has a backing file, but the configuration does not allow backing files.
    #[error(
        "has the backing file '{0}', but backing files are not allowed: an image can name any file of the host, so turn backing_files on only for a trusted image"
    )]
    BackingFile(String),
    /// A backing file cannot be used.
    #[error("cannot use the backing file {}: {error}", .path.display())]
    Behind {
        /// Path of the backing file.
        path: PathBuf,
        /// Reason why the backing file cannot be used.
        error: Box<ImageError>,
    },
    /// The file system has too little free space for the whole image.
    #[error("cannot allocate disk space for the whole image: {0}; free disk space, or turn sparse on")]
    Allocate(#[source] io::Error),
    /// The file system does not support direct I/O.
    #[error("cannot be opened for direct I/O: {0}; turn direct off")]
    Direct(#[source] io::Error),
}

/// Reason why a resize failed.
#[derive(Debug, Error)]
pub enum ResizeError {
    /// The new size is zero or not a multiple of the block size.
    #[error("the new size is {bytes} bytes, but must be a positive multiple of the disk's block size, {block} bytes")]
    Blocks {
        /// Requested size in bytes.
        bytes: u64,
        /// Size of a block in bytes.
        block: u32,
    },
    /// Carom cannot change the size of the image.
    #[error("cannot change the size from {has} to {bytes} bytes: {why}")]
    Fixed {
        /// Requested size in bytes.
        bytes: u64,
        /// Size of the image in bytes.
        has: u64,
        /// Reason why Carom cannot change the size.
        why: &'static str,
    },
    /// Another process has locked bytes that would be added to the disk.
    #[error(
        "cannot grow the image: another process has locked the bytes to be added; try again when that process has released these bytes"
    )]
    Locked,
    /// The host rejected the operation.
    #[error("{0}")]
    Host(#[from] io::Error),
}
