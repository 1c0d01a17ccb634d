// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A read or a write under way: data moves between the image and guest memory, step by step.

use std::sync::Arc;

use iommu_bounce::Permissions;
use smallvec::SmallVec;

use super::request::Parts;
use crate::dma::{DeviceMemory, HostIo, IoOwner};
use crate::platform::HostRange;
use crate::virtio::block::image::buffer::Buffer;
use crate::virtio::block::image::disk_image::Image;
use crate::virtio::block::image::op::{Buffers, MAX_BUFFERS, Op};

/// Maximum number of bytes that are copied at a time, if the kernel cannot use the guest's buffers directly.
const MOST_COPIED: usize = 256 << 10;

/// Reason why a request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::virtio::block) enum Failure {
    /// The host returned this error number.
    Host(i32),
    /// The driver's buffers are outside the device's memory, or were unmapped.
    Memory,
}

/// Buffer that the kernel reads or writes.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(in crate::virtio::block) struct IoBuffer(libc::iovec);

// SAFETY: The structure has only an address and a length. Code that accesses the memory is `unsafe` and states its own requirements.
unsafe impl Send for IoBuffer {}

impl IoBuffer {
    pub(in crate::virtio::block) fn new(address: *mut u8, len: usize) -> Self {
        Self(libc::iovec { iov_base: address.cast(), iov_len: len })
    }
}

/// Returns the list of `buffers` for the kernel. The list is valid as long as `buffers` does not move.
pub(in crate::virtio::block) fn list(buffers: &[IoBuffer]) -> Buffers {
    Buffers { first: buffers.as_ptr().cast(), count: buffers.len().min(MAX_BUFFERS) }
}

/// Way in which the kernel accesses the guest's memory.
enum Memory {
    /// The kernel uses the guest's buffers directly.
    Lent {
        /// Registration of the I/O, which keeps the guest memory mapped.
        io: HostIo,
        /// All buffers. The buffers before index `next` are completely transferred.
        buffers: SmallVec<[IoBuffer; 2]>,
        next: usize,
    },
    /// The data is copied, because direct I/O needs aligned buffers, or because the image is a qcow2 image.
    Copied { parts: Parts, copy: Buffer, buffer: Box<[IoBuffer; 1]> },
}

/// Progress of a read or a write.
pub(in crate::virtio::block) struct Transfer {
    writes: bool,
    /// Offset in the image.
    offset: u64,
    len: usize,
    done: usize,
    memory: Memory,
}

impl Transfer {
    /// Creates a transfer between `parts` and the image from `offset` on. If the kernel uses the guest's buffers directly and an IOMMU
    /// translates their addresses, also returns the number that `owner` uses to cancel the transfer.
    pub(in crate::virtio::block) fn new(
        writes: bool,
        offset: u64,
        parts: Parts,
        memory: &DeviceMemory,
        image: &Image,
        owner: &Arc<impl IoOwner + 'static>,
    ) -> Result<(Self, Option<u64>), Failure> {
        let access = if writes { Permissions::READ } else { Permissions::WRITE };
        let io = memory.begin_io(&parts.list, access, owner).ok_or(Failure::Memory)?;
        let len = parts.len;
        if io.ranges().iter().all(|range| image.takes(range.address, range.len)) {
            let buffer = |address, len| IoBuffer::new(std::ptr::with_exposed_provenance_mut(address), len);
            let mut buffers: SmallVec<[IoBuffer; 2]> = SmallVec::with_capacity(io.ranges().len());
            for range in io.ranges() {
                match buffers.last_mut() {
                    Some(IoBuffer(last)) if last.iov_base.addr() + last.iov_len == range.address => {
                        last.iov_len += range.len;
                    }
                    _ => buffers.push(buffer(range.address, range.len)),
                }
            }
            let number = memory.is_translated().then(|| io.number());
            let memory = Memory::Lent { io, buffers, next: 0 };
            return Ok((Self { writes, offset, len, done: 0, memory }, number));
        }
        let mut copy = Buffer::new(len.min(MOST_COPIED));
        let buffer = Box::new([IoBuffer::new(copy.address(), 0)]);
        let memory = Memory::Copied { parts, copy, buffer };
        Ok((Self { writes, offset, len, done: 0, memory }, None))
    }

    /// Returns the guest memory that the kernel accesses directly.
    pub(in crate::virtio::block) fn lent(&self) -> &[HostRange] {
        match &self.memory {
            Memory::Lent { io, .. } => io.ranges(),
            Memory::Copied { .. } => &[],
        }
    }

    /// Returns the next operation. `None` means that the transfer is complete.
    pub(in crate::virtio::block) fn next(&mut self, memory: &DeviceMemory) -> Result<Option<Op>, Failure> {
        if self.done == self.len {
            return Ok(None);
        }
        let offset = self.offset + self.done as u64;
        let buffers = match &mut self.memory {
            Memory::Lent { buffers, next, .. } => list(&buffers[*next..]),
            Memory::Copied { parts, copy, buffer } => {
                let len = (self.len - self.done).min(MOST_COPIED);
                buffer[0].0.iov_len = len;
                if self.writes {
                    let bytes = &mut copy.bytes_mut()[..len];
                    parts.read(&memory.view(), self.done, bytes).map_err(|_| Failure::Memory)?;
                }
                list(&buffer[..])
            }
        };
        Ok(Some(if self.writes { Op::Write { buffers, offset } } else { Op::Read { buffers, offset } }))
    }

    /// Records that the operation has transferred `bytes` bytes. `bytes` must be at least 1.
    pub(in crate::virtio::block) fn ended(&mut self, bytes: usize, memory: &DeviceMemory) -> Result<(), Failure> {
        let bytes = bytes.min(self.len - self.done);
        match &mut self.memory {
            Memory::Lent { buffers, next, .. } => {
                let mut left = bytes;
                while left != 0 {
                    let IoBuffer(buffer) = &mut buffers[*next];
                    let part = left.min(buffer.iov_len);
                    buffer.iov_base = buffer.iov_base.wrapping_byte_add(part);
                    buffer.iov_len -= part;
                    left -= part;
                    *next += usize::from(buffer.iov_len == 0);
                }
            }
            Memory::Copied { parts, copy, .. } if !self.writes => {
                let bytes = &copy.bytes_mut()[..bytes];
                parts.write(&memory.view(), self.done, bytes).map_err(|_| Failure::Memory)?;
            }
            Memory::Copied { .. } => {}
        }
        self.done += bytes;
        Ok(())
    }
}
