// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! I/O with one system call after the other.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use crate::virtio::block::image::disk_image::Image;
use crate::virtio::block::image::op::{Buffers, Ended, Op};

/// Runs each operation immediately.
pub(in crate::virtio::block) struct Plain {
    image: Arc<Image>,
    ended: VecDeque<Ended>,
}

impl Plain {
    pub(in crate::virtio::block) fn new(image: Arc<Image>) -> Self {
        Self { image, ended: VecDeque::new() }
    }

    /// Runs an operation to its end.
    ///
    /// # Safety
    /// The same as for [`super::engine::Engine::begin`].
    pub(in crate::virtio::block) unsafe fn run(&mut self, number: u64, op: &Op) {
        if let Some(image) = self.image.qcow2() {
            // SAFETY: The caller guarantees that the buffers are valid. The buffers for a qcow2 image are never guest memory, so the guest
            // cannot access them during the call.
            let result = unsafe { image.run(op) };
            self.ended.push_back(Ended { number, result });
            return;
        }
        let result = loop {
            // SAFETY: The caller guarantees what `call` requires.
            let result = unsafe { self.call(op) };
            if result >= 0 {
                break i32::try_from(result).unwrap_or(i32::MAX);
            }
            let error = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            if error != libc::EINTR {
                break -error;
            }
        };
        self.ended.push_back(Ended { number, result });
    }

    /// # Safety
    /// The same as for [`Self::run`].
    unsafe fn call(&self, op: &Op) -> i64 {
        let file = self.image.file().as_raw_fd();
        let place = |offset: u64| i64::try_from(offset).unwrap_or(i64::MAX);
        let count = |buffers: &Buffers| i32::try_from(buffers.count).unwrap_or(i32::MAX);
        match *op {
            // SAFETY: The caller guarantees that the buffers are valid.
            Op::Read { buffers, offset } => unsafe {
                libc::preadv(file, buffers.first, count(&buffers), place(offset)) as i64
            },
            // SAFETY: As above.
            Op::Write { buffers, offset } => unsafe {
                libc::pwritev(file, buffers.first, count(&buffers), place(offset)) as i64
            },
            // SAFETY: The call takes numbers only.
            Op::Allocate { mode, offset, len } => unsafe {
                libc::fallocate(file, mode, place(offset), place(len)).into()
            },
            // SAFETY: The call takes a file descriptor only.
            Op::Sync => unsafe { libc::fdatasync(file).into() },
        }
    }

    /// Returns the next operation that has ended.
    pub(in crate::virtio::block) fn next_ended(&mut self) -> Option<Ended> {
        self.ended.pop_front()
    }

    /// Returns true if an operation has ended.
    pub(in crate::virtio::block) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }
}
