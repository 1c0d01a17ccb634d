// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A read or a write under way: between the image and memory of the guest, step by step.

use std::sync::Arc;

use iommu_bounce::Permissions;
use smallvec::SmallVec;

use super::request::Parts;
use crate::dma::{DeviceMemory, HostIo, IoOwner};
use crate::platform::HostRange;
use crate::virtio::block::image::buffer::Buffer;
use crate::virtio::block::image::disk_image::Image;
use crate::virtio::block::image::op::{Buffers, MAX_BUFFERS, Op};

/// Most bytes that are copied at a time where the kernel cannot use the guest's buffers as they are.
const MOST_COPIED: usize = 256 << 10;

/// Why a request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::virtio::block) enum Failure {
    /// The host said so, by this error number.
    Host(i32),
    /// The driver's buffers are not in the device's memory, or no longer.
    Memory,
}

/// A buffer as the kernel takes it.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(in crate::virtio::block) struct IoBuffer(libc::iovec);

// SAFETY: It is an address, which is accessed by the kernel only.
unsafe impl Send for IoBuffer {}

impl IoBuffer {
    pub(in crate::virtio::block) fn new(address: *mut u8, len: usize) -> Self {
        Self(libc::iovec { iov_base: address.cast(), iov_len: len })
    }
}

/// The list of `buffers` for the kernel, which is valid as long as they stay where they are.
pub(in crate::virtio::block) fn list(buffers: &[IoBuffer]) -> Buffers {
    Buffers { first: buffers.as_ptr().cast(), count: buffers.len().min(MAX_BUFFERS) }
}

/// How the kernel gets at the guest's memory.
enum Memory {
    /// As it is.
    Lent {
        /// Keeps the memory there.
        io: HostIo,
        /// All of it. Those before `next` are done.
        buffers: SmallVec<[IoBuffer; 2]>,
        next: usize,
    },
    /// By a copy, as direct I/O takes aligned buffers only.
    Copied { parts: Parts, copy: Buffer, buffer: Box<[IoBuffer; 1]> },
}

/// A read or a write.
pub(in crate::virtio::block) struct Transfer {
    writes: bool,
    /// Where in the image.
    offset: u64,
    len: usize,
    done: usize,
    memory: Memory,
}

impl Transfer {
    /// Between `parts` and the image from `offset` on. Gives the number by which `owner` may be asked to end it, too.
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

    /// Guest memory that the kernel itself reads or writes.
    pub(in crate::virtio::block) fn lent(&self) -> &[HostRange] {
        match &self.memory {
            Memory::Lent { io, .. } => io.ranges(),
            Memory::Copied { .. } => &[],
        }
    }

    /// The next operation; `None` when all is done.
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

    /// The operation has ended with so many bytes, one at least.
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
