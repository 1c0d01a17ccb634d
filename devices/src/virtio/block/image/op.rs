// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Operations on an image.

/// An operation on an image. Places and lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::virtio::block) enum Op {
    /// Reads to the buffers.
    Read {
        /// The buffers.
        buffers: Buffers,
        /// Where in the image.
        offset: u64,
    },
    /// Writes the buffers.
    Write {
        /// The buffers.
        buffers: Buffers,
        /// Where in the image.
        offset: u64,
    },
    /// Has the file system give space back or set it to zero.
    Allocate {
        /// `FALLOC_FL_*`.
        mode: i32,
        /// Where in the image.
        offset: u64,
        /// How much.
        len: u64,
    },
    /// Makes durable what was written.
    Sync,
}

/// Buffers in this process, [`MAX_BUFFERS`] at most.
#[derive(Clone, Copy, Debug)]
pub(in crate::virtio::block) struct Buffers {
    pub(in crate::virtio::block) first: *const libc::iovec,
    pub(in crate::virtio::block) count: usize,
}

/// Most buffers of one operation (`UIO_MAXIOV`).
pub(in crate::virtio::block) const MAX_BUFFERS: usize = 1024;

/// The end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::virtio::block) struct Ended {
    /// The operation, by the number that it was begun with.
    pub(in crate::virtio::block) number: u64,
    /// Bytes, or a negative error number.
    pub(in crate::virtio::block) result: i32,
}
