// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Buffers of descriptor chains.

use vm_memory::{Bytes, GuestAddress};

use crate::dma::DmaView;
use crate::virtio::chain::{Chain, OUTSIDE, walk};

/// Address and length of each buffer.
pub(super) type Buffers = Vec<(GuestAddress, usize)>;

/// Direction that all buffers of a chain must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// The device reads the buffers.
    Readable,
    /// The device writes the buffers.
    Writable,
}

/// Adds the buffers of a chain to `buffers`. Returns the total length of the added buffers.
///
/// # Errors
/// The chain breaks a rule. The error is the text of this rule.
pub(super) fn collect(
    chain: Chain<&DmaView<'_>>,
    queue_size: u16,
    direction: Direction,
    buffers: &mut Buffers,
) -> Result<usize, &'static str> {
    let mut bytes = 0usize;
    for buffer in walk(chain, queue_size) {
        let buffer = buffer?;
        match (direction, buffer.writable) {
            (Direction::Readable, true) => return Err("a transmit chain has a device-writable buffer"),
            (Direction::Writable, false) => return Err("a receive chain has a device-readable buffer"),
            _ => {}
        }
        if buffer.len != 0 {
            buffers.push((buffer.address, buffer.len));
            bytes = bytes.checked_add(buffer.len).ok_or("the total length of the buffers is too large")?;
        }
    }
    Ok(bytes)
}

/// Copies as much of the content of `buffers` as fits into `data`. Returns the number of copied bytes.
///
/// # Errors
/// A buffer is outside the memory that the device can access.
pub(super) fn read(memory: &DmaView<'_>, buffers: &Buffers, data: &mut [u8]) -> Result<usize, &'static str> {
    let mut done = 0;
    for (address, len) in buffers {
        let free = &mut data[done..];
        let part = (*len).min(free.len());
        if part == 0 {
            break;
        }
        memory.read_slice(&mut free[..part], *address).map_err(|_| OUTSIDE)?;
        done += part;
    }
    Ok(done)
}

/// Writes `data` to `buffers`. The buffers are large enough for `data`.
///
/// # Errors
/// A buffer is outside the memory that the device can access.
pub(super) fn write(memory: &DmaView<'_>, buffers: &Buffers, data: &[u8]) -> Result<(), &'static str> {
    let mut left = data;
    for (address, len) in buffers {
        let (part, rest) = left.split_at((*len).min(left.len()));
        if part.is_empty() {
            break;
        }
        memory.write_slice(part, *address).map_err(|_| OUTSIDE)?;
        left = rest;
    }
    Ok(())
}
