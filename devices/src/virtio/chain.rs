// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Buffers of descriptor chains. The functions read requests and write replies. The driver may have split a request or reply into several
//! buffers.

use std::ops::Deref;

use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

use super::DeviceError;
use crate::crash::Slot;
use crate::dma::NearMemory;

/// Error text for a buffer outside the memory that the device can access.
pub(crate) const OUTSIDE: &str = "a buffer is outside the memory that the device can access";

/// Buffer of a descriptor chain. The address is not checked. The length fits in a `usize`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    pub(crate) address: GuestAddress,
    pub(crate) len: usize,
    /// True if the device writes the buffer, false if the device reads it.
    pub(crate) writable: bool,
}

/// Descriptor chain that was taken from a queue.
pub(crate) struct Chain<M> {
    chain: DescriptorChain<M>,
    /// Entry for this chain in the record of last requests.
    slot: Option<&'static Slot>,
}

impl<M> Chain<M> {
    /// Wraps `chain`. [`Walk`] records the sizes of the chain's readable and writable parts in `slot`.
    pub(super) fn new(chain: DescriptorChain<M>, slot: Option<&'static Slot>) -> Self {
        Self { chain, slot }
    }

    /// Returns the head index. The device returns the chain to the driver by this index.
    pub(crate) fn head_index(&self) -> u16
    where
        M: Deref,
        M::Target: GuestMemory,
    {
        self.chain.head_index()
    }
}

impl<M> From<DescriptorChain<M>> for Chain<M> {
    fn from(chain: DescriptorChain<M>) -> Self {
        Self { chain, slot: None }
    }
}

/// Iterator over the buffers of a descriptor chain. The iterator reads each descriptor only when the caller asks for the next buffer.
///
/// If the chain is broken, the last item is an error that names the broken rule. A chain is broken if a link leaves the table or forms a
/// loop, or if the chain is longer than its queue.
#[derive(Clone)]
pub(crate) struct Walk<M> {
    chain: DescriptorChain<M>,
    slot: Option<&'static Slot>,
    /// Numbers of bytes in the buffers so far: device-readable bytes, then device-writable bytes.
    sizes: [usize; 2],
    /// Maximum number of buffers that may still follow.
    left: u16,
    /// True if another descriptor must follow: before the first descriptor, and after a descriptor that has a next descriptor.
    open: bool,
}

/// Returns an iterator over the buffers of `chain`.
pub(crate) fn walk<M>(Chain { chain, slot }: Chain<M>, queue_size: u16) -> Walk<M> {
    Walk { chain, slot, sizes: [0; 2], left: queue_size, open: true }
}

impl<M> Iterator for Walk<M>
where
    M: Deref,
    M::Target: GuestMemory,
{
    type Item = Result<Buffer, &'static str>;

    fn next(&mut self) -> Option<Self::Item> {
        if !self.open {
            return None;
        }
        self.open = false;
        // Here, `None` means that the chain is broken: after the last descriptor of a valid chain, `open` is false.
        let Some(descriptor) = self.chain.next() else {
            return Some(Err(
                "the links of a descriptor chain must stay in the chain's table, and must not form a loop",
            ));
        };
        if self.left == 0 {
            return Some(Err("a descriptor chain is longer than the queue"));
        }
        self.left -= 1;
        self.open = descriptor.has_next();
        let Ok(len) = usize::try_from(descriptor.len()) else { return Some(Err("a buffer is too long")) };
        let writable = descriptor.is_write_only();
        if let Some(slot) = self.slot {
            let size = &mut self.sizes[usize::from(writable)];
            *size = size.saturating_add(len);
            slot.set_sizes(self.sizes[0], self.sizes[1]);
        }
        Some(Ok(Buffer { address: descriptor.addr(), len, writable }))
    }
}

/// Chain whose readable part has been read, and whose reply has not been written yet.
pub(crate) struct Request<'m> {
    /// Head index of the chain. The device returns the chain to the driver by this index.
    pub(crate) head: u16,
    /// Size of the readable part in bytes. If the caller's buffer is smaller, [`read_request`] copies only the start of the readable part.
    pub(crate) readable: usize,
    /// Size of the writable part in bytes.
    pub(crate) writable: usize,
    /// First writable buffer.
    first: Option<Buffer>,
    /// Rest of the chain after the first writable buffer.
    rest: Walk<&'m NearMemory<'m>>,
}

/// Walks `chain` and copies the start of its readable part to `buffer`.
///
/// # Errors
/// The chain breaks one of these rules, and the error text names the rule:
/// * The chain's links stay in the table and form no loop.
/// * The chain is not longer than its queue.
/// * No readable buffer follows a writable one (virtio 1.3, section 2.7.4.2).
/// * Each readable buffer that is copied is in memory that the device can access.
pub(crate) fn read_request<'m>(
    chain: DescriptorChain<&'m NearMemory<'m>>,
    memory: &'m NearMemory<'m>,
    queue_size: u16,
    buffer: &mut [u8],
) -> Result<Request<'m>, &'static str> {
    let head = chain.head_index();
    let mut walk = walk(chain.into(), queue_size);
    let (mut readable, mut writable) = (0usize, 0usize);
    let mut reply = None;
    while let Some(part) = walk.next() {
        let part = part?;
        if part.writable {
            reply.get_or_insert_with(|| (part, walk.clone()));
            writable += part.len;
        } else if reply.is_some() {
            return Err("a device-readable buffer follows a device-writable one");
        } else {
            let free = buffer.get_mut(readable..).unwrap_or_default();
            let copied = part.len.min(free.len());
            if copied != 0 {
                memory.read_slice(&mut free[..copied], part.address).map_err(|_| OUTSIDE)?;
            }
            readable += part.len;
        }
    }
    let (first, rest) = reply.map_or((None, walk), |(first, rest)| (Some(first), rest));
    Ok(Request { head, readable, writable, first, rest })
}

impl Request<'_> {
    /// Returns the address for a reply of `len` bytes, or `None` if the first writable buffer is too short for the reply.
    pub(crate) fn reply_place(&self, len: usize) -> Option<GuestAddress> {
        self.first.filter(|buffer| buffer.len >= len).map(|buffer| buffer.address)
    }

    /// Writes `data` to the start of the writable part. `data` is at most [`Request::writable`] bytes long.
    ///
    /// # Errors
    /// A writable buffer is outside the memory that the device can access, or the driver changed the chain after the device read it.
    pub(crate) fn write_reply(mut self, memory: &NearMemory<'_>, data: &[u8]) -> Result<(), &'static str> {
        let mut next = self.first;
        let mut left = data;
        while !left.is_empty() {
            let buffer = next.ok_or("the driver changed a descriptor chain while the device served it")?;
            let (part, rest) = left.split_at(buffer.len.min(left.len()));
            if !part.is_empty() {
                memory.write_slice(part, buffer.address).map_err(|_| OUTSIDE)?;
            }
            left = rest;
            next = if left.is_empty() {
                None
            } else {
                self.rest.next().and_then(Result::ok).filter(|buffer| buffer.writable)
            };
        }
        Ok(())
    }
}

/// Returns a function that turns the text of a broken rule into an error that names `queue`.
pub(crate) fn broken(queue: u16) -> impl Fn(&'static str) -> DeviceError {
    move |rule| DeviceError::Queue { queue, rule }
}

/// Returns a function that turns an error of virtio-queue into an error that names `queue`.
pub(crate) fn ring_error(queue: u16) -> impl Fn(virtio_queue::Error) -> DeviceError {
    move |source| DeviceError::Ring { queue, source }
}
