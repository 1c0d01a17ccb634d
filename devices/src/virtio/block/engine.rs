// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! I/O on an image: by io_uring, many operations at a time, or one after the other where the host's kernel refuses that.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use log::warn;

use super::image::Image;
use super::op::{Ended, Op};
use super::plain::Plain;
use super::ring::Ring;

/// How I/O is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMode {
    /// By io_uring, unless the kernel refuses it.
    #[default]
    Async,
    /// By one system call after the other.
    Plain,
}

/// Runs operations.
pub(super) enum Engine {
    Ring(Box<Ring>),
    Plain(Plain),
}

impl Engine {
    /// For so many operations at a time.
    pub(super) fn new(image: Arc<Image>, operations: u16, mode: IoMode) -> Self {
        // What has tables is read and written by code that waits for each operation.
        if mode == IoMode::Async && image.qcow2().is_none() {
            match Ring::new(image.clone(), operations) {
                Ok(ring) => return Self::Ring(Box::new(ring)),
                Err(error) => warn!("io_uring is not to be had, requests are served one after the other: {error}"),
            }
        }
        Self::Plain(Plain::new(image))
    }

    /// Begins an operation, which ends with `number`. It may begin with [`Self::submit`] only.
    ///
    /// # Safety
    /// The buffers, and the list of them, must stay until [`Self::next_ended`] has told the operation's end, and nobody may
    /// hold references to their bytes.
    pub(super) unsafe fn begin(&mut self, number: u64, op: &Op) {
        match self {
            // SAFETY: The caller's promise is what is asked for.
            Self::Ring(ring) => unsafe { ring.begin(number, op) },
            // SAFETY: As above; it ends before this returns.
            Self::Plain(plain) => unsafe { plain.run(number, op) },
        }
    }

    /// Hands what was begun to the kernel.
    ///
    /// # Errors
    /// The kernel takes nothing any more.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.submit(0),
            Self::Plain(_) => Ok(()),
        }
    }

    /// The same, and waits for the end of one operation at least, if any is under way.
    ///
    /// # Errors
    /// The kernel takes nothing any more.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.submit(1),
            Self::Plain(_) => Ok(()),
        }
    }

    /// An operation that has ended.
    pub(super) fn next_ended(&mut self) -> Option<Ended> {
        match self {
            Self::Ring(ring) => ring.next_ended(),
            Self::Plain(plain) => plain.next_ended(),
        }
    }

    /// Whether there is one.
    pub(super) fn has_ended(&mut self) -> bool {
        match self {
            Self::Ring(ring) => ring.has_ended(),
            Self::Plain(plain) => plain.has_ended(),
        }
    }

    /// Asks the kernel to end an operation, if it is under way. It ends as any other does.
    pub(super) fn cancel(&mut self, number: u64) {
        if let Self::Ring(ring) = self {
            ring.cancel(number);
        }
    }

    /// Whether something was begun that the kernel does not have yet.
    pub(super) fn has_unsubmitted(&mut self) -> bool {
        match self {
            Self::Ring(ring) => ring.has_unsubmitted(),
            Self::Plain(_) => false,
        }
    }

    /// What can be read when an operation has ended.
    pub(super) fn source(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Ring(ring) => Some(ring.source()),
            Self::Plain(_) => None,
        }
    }
}
