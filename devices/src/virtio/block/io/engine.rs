// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! I/O on an image. io_uring runs many operations at a time. If the host kernel does not allow io_uring, operations run one after the
//! other.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use log::warn;

use super::plain::Plain;
use super::ring::Ring;
use crate::virtio::block::image::disk_image::Image;
use crate::virtio::block::image::op::{Ended, Op};

/// I/O method.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMode {
    /// io_uring, if the kernel allows it.
    #[default]
    Async,
    /// Plain system calls, one after the other.
    Plain,
}

/// Runs operations on an image.
pub(in crate::virtio::block) struct Engine {
    /// `None` if the kernel does not allow io_uring, or if plain I/O was requested.
    ring: Option<Box<Ring>>,
    plain: Plain,
}

impl Engine {
    /// Creates an engine for up to `operations` operations at a time.
    pub(in crate::virtio::block) fn new(image: Arc<Image>, operations: u16, mode: IoMode) -> Self {
        let mut ring = None;
        // The qcow2 code runs each operation synchronously, so it cannot use io_uring.
        if mode == IoMode::Async && image.qcow2().is_none() {
            match Ring::new(image.clone(), operations) {
                Ok(made) => ring = Some(Box::new(made)),
                Err(error) => {
                    warn!(
                        "io_uring is unavailable for a disk queue, so its requests are served one after the other: {error}; if the host disables io_uring, see kernel.io_uring_disabled"
                    );
                }
            }
        }
        Self { ring, plain: Plain::new(image) }
    }

    /// Starts an operation. When the operation has ended, [`Self::next_ended`] returns the operation's result and `number`. The kernel need
    /// not start the operation until [`Self::submit`] is called.
    ///
    /// `are_few` is true if the caller starts only a few operations now, and no operation is under way. In this case, a write to the page
    /// cache, or a read from a tmpfs, runs immediately in this thread. io_uring would hand such an operation to a kernel thread (Linux,
    /// `io_uring/rw.c`). The kernel thread would not be faster: it also runs one operation after the other, and it must first be woken.
    ///
    /// # Safety
    /// The buffers and their list must stay valid until [`Self::next_ended`] has returned the operation's end. Until then nothing may hold
    /// references to the buffers' bytes.
    pub(in crate::virtio::block) unsafe fn begin(&mut self, number: u64, op: &Op, are_few: bool) {
        let copies = |image: &Image| match op {
            Op::Read { .. } => image.is_in_memory(),
            Op::Write { .. } => image.is_cached(),
            _ => false,
        };
        match &mut self.ring {
            // SAFETY: The caller guarantees what `Ring::begin` requires.
            Some(ring) if !(are_few && copies(ring.image())) => unsafe { ring.begin(number, op) },
            // SAFETY: The caller guarantees what `Plain::run` requires; the operation ends before this function returns.
            _ => unsafe { self.plain.run(number, op) },
        }
    }

    /// Submits the started operations to the kernel. If operations are under way, waits until `wanted` of them have ended.
    ///
    /// # Errors
    /// The kernel rejects operations, and the reason is not temporary.
    pub(in crate::virtio::block) fn submit(&mut self, wanted: usize) -> io::Result<()> {
        self.ring.as_mut().map_or(Ok(()), |ring| ring.submit(wanted))
    }

    /// Returns the next operation that has ended.
    pub(in crate::virtio::block) fn next_ended(&mut self) -> Option<Ended> {
        self.plain.next_ended().or_else(|| self.ring.as_mut()?.next_ended())
    }

    /// Returns true if an operation has ended.
    pub(in crate::virtio::block) fn has_ended(&mut self) -> bool {
        self.plain.has_ended() || self.ring.as_mut().is_some_and(|ring| ring.has_ended())
    }

    /// Asks the kernel to cancel an operation that is under way. The end of a cancelled operation is reported like the end of any other
    /// operation.
    pub(in crate::virtio::block) fn cancel(&mut self, number: u64) {
        if let Some(ring) = &mut self.ring {
            ring.cancel(number);
        }
    }

    /// Returns true if the kernel has not accepted all started operations yet.
    pub(in crate::virtio::block) fn has_unsubmitted(&mut self) -> bool {
        self.ring.as_mut().is_some_and(|ring| ring.has_unsubmitted())
    }

    /// Returns the file descriptor that becomes readable when an operation has ended.
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

    /// Length and image offset of the operations under test.
    const LEN: usize = 512;
    const OFFSET: u64 = 512;

    /// Starts a read or a write of the image. Returns true if the operation has ended when [`Engine::begin`] returns. Returns `None` if the
    /// host does not allow io_uring.
    fn is_done_at_once(file: File, is_write: bool, are_few: bool, alignment: usize) -> Option<bool> {
        file.write_all_at(&[3; 4096], 0).unwrap();
        let image = Arc::new(Image::made_up(file, 4096, alignment, false));
        let ring = match Ring::new(image.clone(), 4) {
            Ok(ring) => ring,
            Err(error) => {
                eprintln!("not tested: the host does not allow io_uring: {error}");
                return None;
            }
        };
        let mut engine = Engine { ring: Some(Box::new(ring)), plain: Plain::new(image.clone()) };
        let mut bytes = [7_u8; LEN];
        let buffer = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let buffers = Buffers { first: &raw const buffer, count: 1 };
        let op = if is_write { Op::Write { buffers, offset: OFFSET } } else { Op::Read { buffers, offset: OFFSET } };
        // SAFETY: The buffer and the list stay valid until `next_ended` has returned the operation's end, and nothing accesses the bytes
        // before this end.
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
    fn single_write_to_the_page_cache_runs_at_once() {
        let write = |are_few, alignment| is_done_at_once(tempfile().unwrap(), true, are_few, alignment);
        assert_ne!(write(true, 1), Some(false));
        assert_ne!(write(false, 1), Some(true));
        assert_ne!(write(true, 512), Some(true), "direct I/O bypasses the page cache");
    }

    #[test]
    fn single_read_from_tmpfs_runs_at_once() {
        let file = || File::from(memfd_create("image", MemfdFlags::CLOEXEC).unwrap());
        assert_ne!(is_done_at_once(file(), false, true, 1), Some(false));
        assert_ne!(is_done_at_once(file(), false, false, 1), Some(true));
    }
}
