// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reading requests from descriptor chains and writing replies to them, however the driver split the buffers.

use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress};

use super::DeviceError;
use crate::dma::NearMemory;

/// What is wrong with a buffer outside guest memory.
pub(crate) const OUTSIDE: &str = "a buffer is not in guest memory";

/// A chain whose readable part has been read: what is left is to write the reply.
pub(crate) struct Request<'m> {
    /// The chain's head, by which it is given back.
    pub(crate) head: u16,
    /// Bytes of the readable part; it may be longer than the buffer that it was copied to.
    pub(crate) readable: usize,
    /// Bytes of the writable part.
    pub(crate) writable: usize,
    /// The first writable descriptor's buffer.
    first: Option<(GuestAddress, usize)>,
    /// The chain behind that descriptor.
    rest: DescriptorChain<&'m NearMemory<'m>>,
}

/// Walks `chain` and copies the start of its readable part to `buffer`.
///
/// # Errors
/// The rule that the chain breaks: its links lead nowhere or in a circle, it is longer than its queue, a readable buffer
/// follows a writable one (virtio 1.3, section 2.7.4.2), or a readable buffer is not in guest memory.
pub(crate) fn read_request<'m>(
    mut chain: DescriptorChain<&'m NearMemory<'m>>,
    memory: &'m NearMemory<'m>,
    queue_size: u16,
    buffer: &mut [u8],
) -> Result<Request<'m>, &'static str> {
    let head = chain.head_index();
    let (mut readable, mut writable) = (0usize, 0usize);
    let mut reply = None;
    let mut open = true;
    let mut count = 0;
    while open {
        // The iterator just ends where a chain is broken; a whole chain ends with a descriptor that names no next one.
        let descriptor = chain.next().ok_or("a descriptor chain leads out of its table, nowhere, or in a circle")?;
        count += 1;
        if count > queue_size {
            return Err("a descriptor chain is longer than the queue");
        }
        open = descriptor.has_next();
        let len = usize::try_from(descriptor.len()).map_err(|_| "a buffer is too long")?;
        if descriptor.is_write_only() {
            reply.get_or_insert_with(|| ((descriptor.addr(), len), chain.clone()));
            writable += len;
        } else if reply.is_some() {
            return Err("a device-readable buffer follows a device-writable one");
        } else {
            let free = buffer.get_mut(readable..).unwrap_or_default();
            let copied = len.min(free.len());
            if copied != 0 {
                memory.read_slice(&mut free[..copied], descriptor.addr()).map_err(|_| OUTSIDE)?;
            }
            readable += len;
        }
    }
    let (first, rest) = reply.map_or((None, chain), |(first, rest)| (Some(first), rest));
    Ok(Request { head, readable, writable, first, rest })
}

impl Request<'_> {
    /// Where `len` bytes of a reply go, if they all go to one buffer.
    pub(crate) fn reply_place(&self, len: usize) -> Option<GuestAddress> {
        self.first.filter(|(_, room)| *room >= len).map(|(address, _)| address)
    }

    /// Writes `data` to the start of the writable part; it is at most [`Request::writable`] bytes long.
    ///
    /// # Errors
    /// A writable buffer is not in guest memory, or the driver changed the chain meanwhile.
    pub(crate) fn write_reply(self, memory: &NearMemory<'_>, data: &[u8]) -> Result<(), &'static str> {
        let mut chain = self.rest;
        let mut next = self.first;
        let mut left = data;
        while !left.is_empty() {
            let (address, len) = next.ok_or("a descriptor chain changed while it was served")?;
            let (part, rest) = left.split_at(len.min(left.len()));
            if !part.is_empty() {
                memory.write_slice(part, address).map_err(|_| OUTSIDE)?;
            }
            left = rest;
            next = if left.is_empty() { None } else { next_writable(&mut chain) };
        }
        Ok(())
    }
}

/// The buffer of the next descriptor, if it is writable.
fn next_writable(chain: &mut DescriptorChain<&NearMemory<'_>>) -> Option<(GuestAddress, usize)> {
    let descriptor = chain.next().filter(|descriptor| descriptor.is_write_only())?;
    Some((descriptor.addr(), usize::try_from(descriptor.len()).ok()?))
}

/// Names `queue` in an error of a request on it.
pub(crate) fn broken(queue: u16) -> impl Fn(&'static str) -> DeviceError {
    move |rule| DeviceError::Queue { queue, rule }
}

/// Names `queue` in an error of its rings.
pub(crate) fn ring_error(queue: u16) -> impl Fn(virtio_queue::Error) -> DeviceError {
    move |source| DeviceError::Ring { queue, source }
}
