// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The buffers of descriptor chains; reading requests from them and writing replies to them, however the driver split the buffers.

use std::ops::Deref;

use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

use super::DeviceError;
use crate::crash::Slot;
use crate::dma::NearMemory;

/// What is wrong with a buffer outside guest memory.
pub(crate) const OUTSIDE: &str = "a buffer is not in guest memory";

/// A buffer of a descriptor chain. Nothing of it is checked but that its length is a `usize`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    pub(crate) address: GuestAddress,
    pub(crate) len: usize,
    /// The device writes it; otherwise it reads it.
    pub(crate) writable: bool,
}

/// A descriptor chain that was taken from a queue.
pub(crate) struct Chain<M> {
    chain: DescriptorChain<M>,
    /// Where it is kept.
    slot: Option<&'static Slot>,
}

impl<M> Chain<M> {
    /// What is known of it later is kept in `slot`.
    pub(super) fn new(chain: DescriptorChain<M>, slot: Option<&'static Slot>) -> Self {
        Self { chain, slot }
    }

    /// Its head, by which it is given back.
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

/// The buffers of a descriptor chain in their order, each read when it is asked for. A broken chain ends with the rule that it breaks:
/// its links lead nowhere or in a circle, or it is longer than its queue.
#[derive(Clone)]
pub(crate) struct Walk<M> {
    chain: DescriptorChain<M>,
    slot: Option<&'static Slot>,
    /// Bytes so far, of what the device reads and of what it writes.
    sizes: [usize; 2],
    /// How many buffers there may still be.
    left: u16,
    /// There is another one, or should be.
    open: bool,
}

/// Walks `chain`.
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
        // The chain just ends where it is broken; a whole one ends with a descriptor that names no next one.
        let Some(descriptor) = self.chain.next() else {
            return Some(Err("a descriptor chain leads out of its table, nowhere, or in a circle"));
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

/// A chain whose readable part has been read: what is left is to write the reply.
pub(crate) struct Request<'m> {
    /// The chain's head, by which it is given back.
    pub(crate) head: u16,
    /// Bytes of the readable part; it may be longer than the buffer that it was copied to.
    pub(crate) readable: usize,
    /// Bytes of the writable part.
    pub(crate) writable: usize,
    /// The first writable descriptor's buffer.
    first: Option<Buffer>,
    /// The chain behind that descriptor.
    rest: Walk<&'m NearMemory<'m>>,
}

/// Walks `chain` and copies the start of its readable part to `buffer`.
///
/// # Errors
/// The rule that the chain breaks: its links lead nowhere or in a circle, it is longer than its queue, a readable buffer
/// follows a writable one (virtio 1.3, section 2.7.4.2), or a readable buffer is not in guest memory.
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
    /// Where `len` bytes of a reply go, if they all go to one buffer.
    pub(crate) fn reply_place(&self, len: usize) -> Option<GuestAddress> {
        self.first.filter(|buffer| buffer.len >= len).map(|buffer| buffer.address)
    }

    /// Writes `data` to the start of the writable part; it is at most [`Request::writable`] bytes long.
    ///
    /// # Errors
    /// A writable buffer is not in guest memory, or the driver changed the chain meanwhile.
    pub(crate) fn write_reply(mut self, memory: &NearMemory<'_>, data: &[u8]) -> Result<(), &'static str> {
        let mut next = self.first;
        let mut left = data;
        while !left.is_empty() {
            let buffer = next.ok_or("a descriptor chain changed while it was served")?;
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

/// Names `queue` in an error of a request on it.
pub(crate) fn broken(queue: u16) -> impl Fn(&'static str) -> DeviceError {
    move |rule| DeviceError::Queue { queue, rule }
}

/// Names `queue` in an error of its rings.
pub(crate) fn ring_error(queue: u16) -> impl Fn(virtio_queue::Error) -> DeviceError {
    move |source| DeviceError::Ring { queue, source }
}
