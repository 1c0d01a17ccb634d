// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! I/O by io_uring.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;
use std::{io, thread};

use io_uring::register::{Probe, Restriction};
use io_uring::{IoUring, opcode, squeue, types};

use super::submission::{self, Kernel};
use crate::virtio::block::image::disk_image::Image;
use crate::virtio::block::image::op::{Buffers, Ended, Op};

/// The number of what asks for another operation's end. Its own end says nothing.
const CANCEL: u64 = u64::MAX;

/// Operations of a ring. Others fail: the queues of a ring are in memory that all threads share, and filters of system calls do not see
/// what is in them.
const NEEDED: [u8; 7] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::AsyncCancel::CODE,
];

/// When to try again after the kernel took no operation.
pub(in crate::virtio::block) const KERNEL_AGAIN: Duration = Duration::from_millis(2);

/// A ring of its own.
pub(super) struct Ring {
    ring: IoUring,
    image: Arc<Image>,
    /// Operations whose end was not told yet.
    under_way: usize,
    /// Ends that were read to make room for others, with room for those of all operations.
    reaped: VecDeque<Ended>,
}

impl Ring {
    /// For so many operations at a time.
    ///
    /// # Errors
    /// The kernel has no io_uring, does not let this process use it, or lacks an operation.
    pub(super) fn new(image: Arc<Image>, operations: u16) -> io::Result<Self> {
        let ring = IoUring::builder().dontfork().setup_r_disabled().build(u32::from(operations).max(2))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !NEEDED.into_iter().all(|code| probe.is_supported(code)) {
            return Err(io::Error::other("the host's kernel is too old"));
        }
        ring.submitter().register_restrictions(&mut NEEDED.map(Restriction::sqe_op))?;
        ring.submitter().register_enable_rings()?;
        Ok(Self { ring, image, under_way: 0, reaped: VecDeque::with_capacity(operations.into()) })
    }

    /// The image.
    pub(super) fn image(&self) -> &Image {
        &self.image
    }

    /// Begins an operation.
    ///
    /// # Safety
    /// As for [`super::engine::Engine::begin`].
    pub(super) unsafe fn begin(&mut self, number: u64, op: &Op) {
        // Not a registered file: the kernel closes such files some time after the process has ended.
        let file = types::Fd(self.image.file().as_raw_fd());
        // What has one buffer needs no list.
        let only = |buffers: &Buffers| {
            // SAFETY: The caller has promised that the list is there.
            let buffer = (buffers.count == 1).then(|| unsafe { *buffers.first })?;
            Some((buffer.iov_base.cast::<u8>(), u32::try_from(buffer.iov_len).ok()?))
        };
        let count = |buffers: &Buffers| u32::try_from(buffers.count).unwrap_or(u32::MAX);
        let entry = match *op {
            Op::Read { buffers, offset } => match only(&buffers) {
                Some((place, len)) => opcode::Read::new(file, place, len).offset(offset).build(),
                None => opcode::Readv::new(file, buffers.first, count(&buffers)).offset(offset).build(),
            },
            Op::Write { buffers, offset } => match only(&buffers) {
                Some((place, len)) => opcode::Write::new(file, place, len).offset(offset).build(),
                None => opcode::Writev::new(file, buffers.first, count(&buffers)).offset(offset).build(),
            },
            Op::Allocate { mode, offset, len } => opcode::Fallocate::new(file, len).offset(offset).mode(mode).build(),
            Op::Sync => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
        };
        // SAFETY: The caller has promised that what the entry leads to stays until its end is told.
        unsafe { self.push(&entry.user_data(number)) };
        self.under_way += 1;
    }

    /// Asks the kernel to end an operation.
    pub(super) fn cancel(&mut self, number: u64) {
        let entry = opcode::AsyncCancel::new(number).build().user_data(CANCEL);
        // SAFETY: It leads to no memory.
        unsafe { self.push(&entry) };
    }

    /// # Safety
    /// What the entry leads to stays until its end is told.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: The caller's promise is what is asked for.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            submission::make_room(self);
        }
    }

    /// Hands what was begun to the kernel, and waits for the ends of `wanted` operations if any are under way.
    ///
    /// # Errors
    /// The kernel takes nothing any more.
    pub(super) fn submit(&mut self, wanted: usize) -> io::Result<()> {
        let wanted = if self.under_way == 0 || self.has_ended() { 0 } else { wanted };
        if wanted == 0 && !self.has_unsubmitted() { Ok(()) } else { submission::submit(self, wanted) }
    }

    /// An operation that has ended.
    pub(super) fn next_ended(&mut self) -> Option<Ended> {
        self.reaped.pop_front().or_else(|| self.read_end())
    }

    /// The end of an operation in the completion queue.
    fn read_end(&mut self) -> Option<Ended> {
        loop {
            let entry = self.ring.completion().next()?;
            if entry.user_data() != CANCEL {
                self.under_way -= 1;
                return Some(Ended { number: entry.user_data(), result: entry.result() });
            }
        }
    }

    /// Whether an operation has ended.
    pub(super) fn has_ended(&mut self) -> bool {
        !self.reaped.is_empty() || !self.ring.completion().is_empty()
    }

    /// Whether something was begun that the kernel does not have yet.
    pub(super) fn has_unsubmitted(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    /// What can be read when an operation has ended.
    pub(super) fn source(&self) -> BorrowedFd<'_> {
        // SAFETY: The ring owns its descriptor, which stays open as long as the ring is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl Kernel for Ring {
    fn enter(&mut self, wanted: usize) -> io::Result<usize> {
        self.ring.submit_and_wait(wanted)
    }

    fn has_ended(&mut self) -> bool {
        Self::has_ended(self)
    }

    fn reap(&mut self) -> bool {
        let has_any = !self.ring.completion().is_empty();
        while let Some(ended) = self.read_end() {
            self.reaped.push_back(ended);
        }
        has_any
    }

    fn rest(&mut self) {
        thread::sleep(KERNEL_AGAIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_does_nothing_but_what_disks_need() {
        let file = tempfile::tempfile().unwrap();
        let Ok(mut ring) = Ring::new(Arc::new(Image::made_up(file, 4096, 1, false)), 4) else {
            return eprintln!("not tested, as the host lets nobody use io_uring");
        };
        let root = c"/";
        let open = opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), root.as_ptr()).build();
        let socket = opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build();
        for (number, entry) in [(1, open), (2, socket)] {
            // SAFETY: The path is there until the end.
            unsafe { ring.push(&entry.user_data(number)) };
            ring.under_way += 1;
            ring.submit(1).unwrap();
            assert_eq!(ring.next_ended(), Some(Ended { number, result: -libc::EACCES }));
        }
        // SAFETY: It leads to no memory.
        unsafe { ring.begin(3, &Op::Sync) };
        ring.submit(1).unwrap();
        assert_eq!(ring.next_ended(), Some(Ended { number: 3, result: 0 }));
    }
}
