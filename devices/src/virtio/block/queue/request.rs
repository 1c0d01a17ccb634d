// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests as the driver writes them (virtio 1.4, section 5.2.6), however it splits them into buffers.

use smallvec::SmallVec;
use vm_memory::{Bytes, GuestAddress};

use crate::dma::DmaView;
use crate::virtio::block::config_space::MAX_ZEROES_SECTORS;
use crate::virtio::block::spec::{HEADER, SECTOR, request};
use crate::virtio::chain::{Chain, OUTSIDE, walk};

/// As how many bytes a discard counts: the host changes what it knows of the file, for each of a few ranges.
const DISCARD_WEIGHT: u64 = 1 << 20;

/// A request: its header, and where all else of it is.
#[derive(Debug)]
pub(super) struct Request {
    /// The chain's head, by which it is given back.
    pub(super) head: u16,
    /// Its type.
    pub(super) kind: u32,
    /// The sector that it begins with.
    pub(super) sector: u64,
    /// What the device reads, behind the header.
    pub(super) readable: Parts,
    /// What the device writes, before the status.
    pub(super) writable: Parts,
    /// Where the status goes.
    pub(super) status: GuestAddress,
}

impl Request {
    /// What is kept of it among the last requests: its type and its sector; of a type that a byte has no room for, only that.
    pub(super) fn noted(&self) -> (u8, u64) {
        match u8::try_from(self.kind) {
            Ok(kind) => (kind, self.sector),
            Err(_) => (u8::MAX, self.kind.into()),
        }
    }

    /// Bytes that it reads or writes of the disk; 0 for others.
    pub(super) fn bytes(&self) -> u64 {
        match self.kind {
            request::IN => self.writable.len as u64,
            request::OUT => self.readable.len as u64,
            _ => 0,
        }
    }

    /// As how many bytes it counts while it is under way. Zeroes may have to be written; what is discarded is not.
    pub(super) fn weight(&self) -> u64 {
        match self.kind {
            request::DISCARD => DISCARD_WEIGHT,
            request::WRITE_ZEROES => u64::from(MAX_ZEROES_SECTORS) * SECTOR,
            _ => self.bytes(),
        }
    }
}

/// Memory of the guest in parts, none of them empty, as the device names it.
#[derive(Debug, Default)]
pub(in crate::virtio::block) struct Parts {
    /// Address and length. Small requests have one or two.
    pub(super) list: SmallVec<[(u64, usize); 2]>,
    /// Bytes of all.
    pub(super) len: usize,
}

impl Parts {
    fn push(&mut self, address: u64, len: usize) {
        if len != 0 {
            self.list.push((address, len));
            self.len += len;
        }
    }

    /// Takes the last byte away, and returns where it is.
    fn pop_byte(&mut self) -> Option<u64> {
        let (address, len) = self.list.last_mut()?;
        *len -= 1;
        let at = address.checked_add(*len as u64);
        if *len == 0 {
            self.list.pop();
        }
        self.len -= 1;
        at
    }

    /// The parts from `skip` on, `len` bytes at most.
    fn range(&self, mut skip: usize, mut len: usize) -> impl Iterator<Item = (u64, usize)> {
        self.list.iter().filter_map(move |(address, part)| {
            let start = skip.min(*part);
            skip -= start;
            let count = (part - start).min(len);
            len -= count;
            // A part that wraps around was never in memory.
            (count != 0).then(|| (address.wrapping_add(start as u64), count))
        })
    }

    /// Reads the bytes of the parts from `skip` on.
    ///
    /// # Errors
    /// A part is not in the memory that the device sees.
    pub(super) fn read(&self, memory: &DmaView<'_>, skip: usize, bytes: &mut [u8]) -> Result<(), &'static str> {
        let mut at = 0;
        for (address, len) in self.range(skip, bytes.len()) {
            memory.read_slice(&mut bytes[at..at + len], GuestAddress(address)).map_err(|_| OUTSIDE)?;
            at += len;
        }
        Ok(())
    }

    /// Writes `bytes` to the parts from `skip` on, as far as these go.
    ///
    /// # Errors
    /// A part is not in the memory that the device sees.
    pub(super) fn write(&self, memory: &DmaView<'_>, skip: usize, bytes: &[u8]) -> Result<(), &'static str> {
        let mut at = 0;
        for (address, len) in self.range(skip, bytes.len()) {
            memory.write_slice(&bytes[at..at + len], GuestAddress(address)).map_err(|_| OUTSIDE)?;
            at += len;
        }
        Ok(())
    }
}

/// Walks `chain` and reads its header.
///
/// # Errors
/// The rule that the chain breaks, so that nothing can be told of the request: its links lead nowhere or in a circle, it is longer
/// than its queue, a readable buffer follows a writable one (virtio 1.4, section 2.7.4.2), the header is not whole or not in
/// memory, or there is no room for the status.
pub(super) fn read(chain: Chain<&DmaView<'_>>, memory: &DmaView<'_>, queue_size: u16) -> Result<Request, &'static str> {
    let head = chain.head_index();
    let mut header = [0; HEADER];
    let mut have = 0;
    let (mut readable, mut writable) = (Parts::default(), Parts::default());
    for buffer in walk(chain, queue_size) {
        let buffer = buffer?;
        if buffer.writable {
            writable.push(buffer.address.0, buffer.len);
        } else if writable.len != 0 {
            return Err("a device-readable buffer follows a device-writable one");
        } else {
            let of_header = buffer.len.min(HEADER - have);
            memory.read_slice(&mut header[have..have + of_header], buffer.address).map_err(|_| OUTSIDE)?;
            have += of_header;
            readable.push(buffer.address.0.wrapping_add(of_header as u64), buffer.len - of_header);
        }
    }
    if have < HEADER {
        return Err("a request is shorter than its header");
    }
    let status = writable.pop_byte().ok_or("a request has no room for its status")?;
    let [kind, _, low, high] =
        [0, 4, 8, 12].map(|at| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]));
    let sector = u64::from(high) << 32 | u64::from(low);
    Ok(Request { head, kind, sector, readable, writable, status: GuestAddress(status) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_cut_where_it_is_wanted() {
        let mut parts = Parts::default();
        for (address, len) in [(0x1000, 10), (0x2000, 0), (0x3000, 1), (0x4000, 20)] {
            parts.push(address, len);
        }
        assert_eq!((parts.len, parts.list.len()), (31, 3));
        let cut = |skip, len| parts.range(skip, len).collect::<Vec<_>>();
        assert_eq!(cut(0, 31), parts.list.to_vec());
        assert_eq!(cut(9, 3), [(0x1009, 1), (0x3000, 1), (0x4000, 1)]);
        assert_eq!(cut(12, 100), [(0x4001, 19)]);
        assert_eq!(cut(31, 1), []);
        assert_eq!(cut(5, 0), []);
    }

    #[test]
    fn last_byte_is_taken_from_the_last_part() {
        let mut parts = Parts::default();
        parts.push(0x1000, 2);
        parts.push(0x2000, 1);
        assert_eq!(parts.pop_byte(), Some(0x2000));
        assert_eq!(parts.pop_byte(), Some(0x1001));
        assert_eq!((parts.pop_byte(), parts.len), (Some(0x1000), 0));
        assert_eq!(parts.pop_byte(), None);
    }
}
