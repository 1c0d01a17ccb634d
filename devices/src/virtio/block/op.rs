// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Operations on an image.

/// An operation on an image. Places and lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Op {
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
pub(super) struct Buffers {
    pub(super) first: *const libc::iovec,
    pub(super) count: usize,
}

/// Most buffers of one operation (`UIO_MAXIOV`).
pub(super) const MAX_BUFFERS: usize = 1024;

/// The end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    /// The operation, by the number that it was begun with.
    pub(super) number: u64,
    /// Bytes, or a negative error number.
    pub(super) result: i32,
}
