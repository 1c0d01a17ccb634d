// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why an image cannot be used, or keeps its size.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why an image cannot be used.
#[derive(Debug, Error)]
pub enum ImageError {
    /// It cannot be opened or examined.
    #[error("{0}")]
    Host(#[from] io::Error),
    /// It is neither a file nor a block device.
    #[error("is neither a file nor a block device")]
    Kind,
    /// This process has locked it already, for another disk or as an image behind one.
    #[error("is already used by this VM, by another disk or as a backing file; {}", if *.read_only { "it must be read-only for all to be shared" } else { "a disk that is written to has one user" })]
    Used {
        /// True if it was opened for reading only.
        read_only: bool,
    },
    /// The host's block device can only be read.
    #[error("is a block device that can only be read")]
    ReadOnly,
    /// Another process has it.
    #[error("is in use: another process has locked it; {}", if *.read_only { "it must be read-only for all to be shared" } else { "a disk that is written to has one user" })]
    Locked {
        /// Whether it was to be read only.
        read_only: bool,
    },
    /// A process that has ended had writes under way, and they have not ended.
    #[error("is in use: writes of a process that has ended are still under way; try again once its storage answers")]
    Writing,
    /// There is not one block in it.
    #[error("has {bytes} bytes, less than a block of {block}")]
    Empty {
        /// Bytes of the image.
        bytes: u64,
        /// Bytes of a block.
        block: u32,
    },
    /// It begins as an image of another format does.
    #[error(
        "looks like an image in {0} format; say that it is one, where that is supported, or that it is raw, to give the guest its bytes as they are"
    )]
    Format(&'static str),
    /// It is none of the format that it is said to be, or asks for what is not supported.
    #[error("cannot be used as an image of its format: {0}")]
    Malformed(String),
    /// It has another image behind it, which was not allowed.
    #[error("has the image '{0}' behind it, which must be allowed, as its user may not reach that")]
    BackingFile(String),
    /// An image behind it cannot be used.
    #[error("the image behind it, {}: {error}", .path.display())]
    Behind {
        /// Where that is.
        path: PathBuf,
        /// Why.
        error: Box<ImageError>,
    },
    /// The file system has no room for all of it.
    #[error("room for all of the image cannot be had: {0}")]
    Allocate(#[source] io::Error),
    /// The file system knows no direct I/O.
    #[error("cannot be read directly, past the host's page cache: {0}")]
    Direct(#[source] io::Error),
}

/// Why a disk keeps its size.
#[derive(Debug, Error)]
pub enum ResizeError {
    /// It would not be whole blocks, or none.
    #[error("{bytes} bytes are no positive multiple of the disk's blocks of {block}")]
    Blocks {
        /// Bytes that were wanted.
        bytes: u64,
        /// Bytes of a block.
        block: u32,
    },
    /// Others give the image its size.
    #[error("{bytes} bytes are not the {has} that the image has: {why}")]
    Fixed {
        /// Bytes that were wanted.
        bytes: u64,
        /// Bytes that there are.
        has: u64,
        /// Why they stay.
        why: &'static str,
    },
    /// Another process has what would belong to the disk.
    #[error("another process has locked bytes that are to come")]
    Locked,
    /// The host cannot do it.
    #[error("{0}")]
    Host(#[from] io::Error),
}
