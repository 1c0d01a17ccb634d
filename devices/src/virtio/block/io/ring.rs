// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! I/O with io_uring.

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

/// Operation number that all cancel operations use. The ring ignores completions with this number.
const CANCEL: u64 = u64::MAX;

/// Operations that a ring allows. The kernel rejects all other operations. All threads of this process can write to a ring's queues, and
/// system call filters do not see the content of these queues. Without the restriction, a thread could use the ring to bypass its filter.
const NEEDED: [u8; 7] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::AsyncCancel::CODE,
];

/// Delay before the next submission, after the kernel accepted no operation.
pub(in crate::virtio::block) const KERNEL_AGAIN: Duration = Duration::from_millis(2);

/// Ring of one queue thread.
pub(super) struct Ring {
    ring: IoUring,
    image: Arc<Image>,
    /// Number of started operations whose completion this ring has not read yet.
    under_way: usize,
    /// Completions that were read early, to make room in the completion queue. This list has capacity for all operations.
    reaped: VecDeque<Ended>,
}

impl Ring {
    /// Creates a ring for up to `operations` operations at a time.
    ///
    /// # Errors
    /// The kernel does not support io_uring, does not allow this process to use io_uring, or does not support a needed operation.
    pub(super) fn new(image: Arc<Image>, operations: u16) -> io::Result<Self> {
        let ring = IoUring::builder().dontfork().setup_r_disabled().build(u32::from(operations).max(2))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !NEEDED.into_iter().all(|code| probe.is_supported(code)) {
            return Err(io::Error::other(
                "the host kernel is too old: its io_uring lacks an operation that Carom needs (update the kernel)",
            ));
        }
        ring.submitter().register_restrictions(&mut NEEDED.map(Restriction::sqe_op))?;
        ring.submitter().register_enable_rings()?;
        Ok(Self { ring, image, under_way: 0, reaped: VecDeque::with_capacity(operations.into()) })
    }

    /// Returns the image.
    pub(super) fn image(&self) -> &Image {
        &self.image
    }

    /// Starts an operation.
    ///
    /// # Safety
    /// The same as for [`super::engine::Engine::begin`].
    pub(super) unsafe fn begin(&mut self, number: u64, op: &Op) {
        // Do not register the file: the kernel closes registered files only some time after the process has ended. Until then, the next
        // user of the image would have to wait.
        let file = types::Fd(self.image.file().as_raw_fd());
        // An operation with a single buffer needs no list.
        let only = |buffers: &Buffers| {
            // SAFETY: The caller guarantees that the list is valid.
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
        // SAFETY: The caller guarantees that the buffers and their list stay valid until the operation's end is returned.
        unsafe { self.push(&entry.user_data(number)) };
        self.under_way += 1;
    }

    /// Asks the kernel to cancel an operation.
    pub(super) fn cancel(&mut self, number: u64) {
        let entry = opcode::AsyncCancel::new(number).build().user_data(CANCEL);
        // SAFETY: The entry points to no memory.
        unsafe { self.push(&entry) };
    }

    /// # Safety
    /// All memory that the entry points to must stay valid until the operation's end is returned.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: The caller guarantees what `SubmissionQueue::push` requires.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            submission::make_room(self);
        }
    }

    /// Submits the started operations to the kernel. If operations are under way, waits until `wanted` of them have ended.
    ///
    /// # Errors
    /// The kernel rejects operations, and the reason is not temporary.
    pub(super) fn submit(&mut self, wanted: usize) -> io::Result<()> {
        let wanted = if self.under_way == 0 || self.has_ended() { 0 } else { wanted };
        if wanted == 0 && !self.has_unsubmitted() { Ok(()) } else { submission::submit(self, wanted) }
    }

    /// Returns the next operation that has ended.
    pub(super) fn next_ended(&mut self) -> Option<Ended> {
        self.reaped.pop_front().or_else(|| self.read_end())
    }

    /// Reads the next completion from the completion queue.
    fn read_end(&mut self) -> Option<Ended> {
        loop {
            let entry = self.ring.completion().next()?;
            if entry.user_data() != CANCEL {
                self.under_way -= 1;
                return Some(Ended { number: entry.user_data(), result: entry.result() });
            }
        }
    }

    /// Returns true if an operation has ended.
    pub(super) fn has_ended(&mut self) -> bool {
        !self.reaped.is_empty() || !self.ring.completion().is_empty()
    }

    /// Returns true if the kernel has not accepted all started operations yet.
    pub(super) fn has_unsubmitted(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    /// Returns the file descriptor that becomes readable when an operation has ended.
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
    fn ring_rejects_operations_that_disks_do_not_need() {
        let file = tempfile::tempfile().unwrap();
        let Ok(mut ring) = Ring::new(Arc::new(Image::made_up(file, 4096, 1, false)), 4) else {
            return eprintln!("not tested: the host does not allow io_uring");
        };
        let root = c"/";
        let open = opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), root.as_ptr()).build();
        let socket = opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build();
        for (number, entry) in [(1, open), (2, socket)] {
            // SAFETY: The path is valid until the end of the test.
            unsafe { ring.push(&entry.user_data(number)) };
            ring.under_way += 1;
            ring.submit(1).unwrap();
            assert_eq!(ring.next_ended(), Some(Ended { number, result: -libc::EACCES }));
        }
        // SAFETY: The operation uses no memory.
        unsafe { ring.begin(3, &Op::Sync) };
        ring.submit(1).unwrap();
        assert_eq!(ring.next_ended(), Some(Ended { number: 3, result: 0 }));
    }
}
