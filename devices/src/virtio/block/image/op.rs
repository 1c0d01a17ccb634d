// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Operations on an image.

/// Operation on an image. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::virtio::block) enum Op {
    /// Reads from the image into the buffers.
    Read {
        /// The buffers.
        buffers: Buffers,
        /// Offset in the image.
        offset: u64,
    },
    /// Writes the buffers to the image.
    Write {
        /// The buffers.
        buffers: Buffers,
        /// Offset in the image.
        offset: u64,
    },
    /// Deallocates a range or sets it to zero, with `fallocate`.
    Allocate {
        /// Mode of `fallocate`: `FALLOC_FL_*` flags.
        mode: i32,
        /// Offset in the image.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Makes the written data durable.
    Sync,
}

/// List of at most [`MAX_BUFFERS`] buffers in this process's memory.
#[derive(Clone, Copy, Debug)]
pub(in crate::virtio::block) struct Buffers {
    pub(in crate::virtio::block) first: *const libc::iovec,
    pub(in crate::virtio::block) count: usize,
}

/// Maximum number of buffers in one operation (`UIO_MAXIOV`).
pub(in crate::virtio::block) const MAX_BUFFERS: usize = 1024;

/// Result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::virtio::block) struct Ended {
    /// Number that the caller gave the operation at its start.
    pub(in crate::virtio::block) number: u64,
    /// Number of bytes that were read or written, or a negative error number.
    pub(in crate::virtio::block) result: i32,
}
