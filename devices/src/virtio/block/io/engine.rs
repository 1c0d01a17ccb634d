// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! I/O on an image: by io_uring, many operations at a time, or one after the other where the host's kernel refuses that.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use log::warn;

use super::plain::Plain;
use super::ring::Ring;
use crate::virtio::block::image::disk_image::Image;
use crate::virtio::block::image::op::{Ended, Op};

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
pub(in crate::virtio::block) struct Engine {
    /// `None` where the kernel refuses it, or it was not asked for.
    ring: Option<Box<Ring>>,
    plain: Plain,
}

impl Engine {
    /// For so many operations at a time.
    pub(in crate::virtio::block) fn new(image: Arc<Image>, operations: u16, mode: IoMode) -> Self {
        let mut ring = None;
        // What has tables is read and written by code that waits for each operation.
        if mode == IoMode::Async && image.qcow2().is_none() {
            match Ring::new(image.clone(), operations) {
                Ok(made) => ring = Some(Box::new(made)),
                Err(error) => warn!("io_uring is not to be had, requests are served one after the other: {error}"),
            }
        }
        Self { ring, plain: Plain::new(image) }
    }

    /// Begins an operation, which ends with `number`. It may begin with [`Self::submit`] only.
    ///
    /// If they `are_few` that are begun now, and nothing is under way, one that copies to the page cache, or from a tmpfs, is done at
    /// once: io_uring would hand it to a thread of its own (Linux, `io_uring/rw.c`), which does one after the other likewise, and has to
    /// be woken.
    ///
    /// # Safety
    /// The buffers, and the list of them, must stay until [`Self::next_ended`] has told the operation's end, and nobody may
    /// hold references to their bytes.
    pub(in crate::virtio::block) unsafe fn begin(&mut self, number: u64, op: &Op, are_few: bool) {
        let copies = |image: &Image| match op {
            Op::Read { .. } => image.is_in_memory(),
            Op::Write { .. } => image.is_cached(),
            _ => false,
        };
        match &mut self.ring {
            // SAFETY: The caller's promise is what is asked for.
            Some(ring) if !(are_few && copies(ring.image())) => unsafe { ring.begin(number, op) },
            // SAFETY: As above; it ends before this returns.
            _ => unsafe { self.plain.run(number, op) },
        }
    }

    /// Hands what was begun to the kernel, and waits for the ends of `wanted` operations if any are under way.
    ///
    /// # Errors
    /// The kernel takes nothing any more.
    pub(in crate::virtio::block) fn submit(&mut self, wanted: usize) -> io::Result<()> {
        self.ring.as_mut().map_or(Ok(()), |ring| ring.submit(wanted))
    }

    /// An operation that has ended.
    pub(in crate::virtio::block) fn next_ended(&mut self) -> Option<Ended> {
        self.plain.next_ended().or_else(|| self.ring.as_mut()?.next_ended())
    }

    /// True if an operation has ended.
    pub(in crate::virtio::block) fn has_ended(&mut self) -> bool {
        self.plain.has_ended() || self.ring.as_mut().is_some_and(|ring| ring.has_ended())
    }

    /// Asks the kernel to end an operation, if it is under way. It ends as any other does.
    pub(in crate::virtio::block) fn cancel(&mut self, number: u64) {
        if let Some(ring) = &mut self.ring {
            ring.cancel(number);
        }
    }

    /// True if something was begun that the kernel does not have yet.
    pub(in crate::virtio::block) fn has_unsubmitted(&mut self) -> bool {
        self.ring.as_mut().is_some_and(|ring| ring.has_unsubmitted())
    }

    /// File that can be read when an operation has ended.
    pub(in crate::virtio::block) fn source(&self) -> Option<BorrowedFd<'_>> {
        self.ring.as_ref().map(|ring| ring.source())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use rustix::fs::{MemfdFlags, memfd_create};
    use tempfile::tempfile;

    use super::*;
    use crate::virtio::block::image::op::Buffers;

    /// Bytes of an operation, and where in the image it is.
    const LEN: usize = 512;
    const OFFSET: u64 = 512;

    /// Whether a read or a write of the image is done as soon as it is begun, one of few or not. `None` where the host lets nobody use
    /// io_uring.
    fn is_done_at_once(file: File, is_write: bool, are_few: bool, alignment: usize) -> Option<bool> {
        file.write_all_at(&[3; 4096], 0).unwrap();
        let image = Arc::new(Image::made_up(file, 4096, alignment, false));
        let ring = match Ring::new(image.clone(), 4) {
            Ok(ring) => ring,
            Err(error) => {
                eprintln!("not tested, as the host lets nobody use io_uring: {error}");
                return None;
            }
        };
        let mut engine = Engine { ring: Some(Box::new(ring)), plain: Plain::new(image.clone()) };
        let mut bytes = [7_u8; LEN];
        let buffer = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let buffers = Buffers { first: &raw const buffer, count: 1 };
        let op = if is_write { Op::Write { buffers, offset: OFFSET } } else { Op::Read { buffers, offset: OFFSET } };
        // SAFETY: Buffer and list stay until the end is told, below, and nobody looks at the bytes before.
        unsafe { engine.begin(1, &op, are_few) };
        let is_done = engine.has_ended();
        engine.submit(1).unwrap();
        while !engine.has_ended() {
            std::thread::yield_now();
        }
        assert_eq!(engine.next_ended(), Some(Ended { number: 1, result: 512 }));
        let mut read = [0; LEN];
        image.file().read_exact_at(&mut read, OFFSET).unwrap();
        assert_eq!(read, [if is_write { 7 } else { 3 }; LEN]);
        assert_eq!(read, bytes);
        Some(is_done)
    }

    #[test]
    fn write_to_the_page_cache_that_is_one_of_few_is_done_at_once() {
        let write = |are_few, alignment| is_done_at_once(tempfile().unwrap(), true, are_few, alignment);
        assert_ne!(write(true, 1), Some(false));
        assert_ne!(write(false, 1), Some(true));
        assert_ne!(write(true, 512), Some(true), "its file is not cached");
    }

    #[test]
    fn read_of_a_file_in_memory_that_is_one_of_few_is_done_at_once() {
        let file = || File::from(memfd_create("image", MemfdFlags::CLOEXEC).unwrap());
        assert_ne!(is_done_at_once(file(), false, true, 1), Some(false));
        assert_ne!(is_done_at_once(file(), false, false, 1), Some(true));
    }
}
