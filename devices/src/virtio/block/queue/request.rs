// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Parser of the driver's requests (virtio 1.4, section 5.2.6). The driver may split a request into several buffers at any byte.

use smallvec::SmallVec;
use vm_memory::{Bytes, GuestAddress};

use crate::dma::DmaView;
use crate::virtio::block::config_space::MAX_ZEROES_SECTORS;
use crate::virtio::block::spec::{HEADER, SECTOR, request};
use crate::virtio::chain::{Chain, OUTSIDE, walk};

/// Weight of a discard in bytes. The weight is small, because the host only updates the file's metadata.
const DISCARD_WEIGHT: u64 = 1 << 20;

/// Request: its header, and the location of its data and status.
#[derive(Debug)]
pub(super) struct Request {
    /// Head index of the descriptor chain. The device needs the index to return the chain.
    pub(super) head: u16,
    /// Request type.
    pub(super) kind: u32,
    /// First sector.
    pub(super) sector: u64,
    /// Device-readable data after the header.
    pub(super) readable: Parts,
    /// Device-writable data before the status.
    pub(super) writable: Parts,
    /// Address of the status byte.
    pub(super) status: GuestAddress,
}

impl Request {
    /// Returns the type and the sector, for the record of the last requests. If the type does not fit into a byte, returns `u8::MAX` and
    /// the type instead.
    pub(super) fn noted(&self) -> (u8, u64) {
        match u8::try_from(self.kind) {
            Ok(kind) => (kind, self.sector),
            Err(_) => (u8::MAX, self.kind.into()),
        }
    }

    /// Returns the number of data bytes of a read or a write. Returns 0 for other requests.
    pub(super) fn bytes(&self) -> u64 {
        match self.kind {
            request::IN => self.writable.len as u64,
            request::OUT => self.readable.len as u64,
            _ => 0,
        }
    }

    /// Returns the weight of the request: the number of bytes that count towards the limit on requests under way. The weight of a
    /// write-zeroes request is the maximum number of zeroes that the device may have to write. A discard writes no data, so its weight is
    /// small and fixed.
    pub(super) fn weight(&self) -> u64 {
        match self.kind {
            request::DISCARD => DISCARD_WEIGHT,
            request::WRITE_ZEROES => u64::from(MAX_ZEROES_SECTORS) * SECTOR,
            _ => self.bytes(),
        }
    }
}

/// Guest memory in several parts. The addresses come from the descriptors, so they are IOVAs if the device is behind an IOMMU. No part is
/// empty.
#[derive(Debug, Default)]
pub(in crate::virtio::block) struct Parts {
    /// Address and length of each part. Small requests have one or two parts.
    pub(super) list: SmallVec<[(u64, usize); 2]>,
    /// Total bytes of the parts.
    pub(super) len: usize,
}

impl Parts {
    fn push(&mut self, address: u64, len: usize) {
        if len != 0 {
            self.list.push((address, len));
            self.len += len;
        }
    }

    /// Removes the last byte of the parts, and returns the byte's address.
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

    /// Returns the parts of the range that starts at byte `skip` and has at most `len` bytes.
    fn range(&self, mut skip: usize, mut len: usize) -> impl Iterator<Item = (u64, usize)> {
        self.list.iter().filter_map(move |(address, part)| {
            let start = skip.min(*part);
            skip -= start;
            let count = (part - start).min(len);
            len -= count;
            // A part that wraps around the end of the address space is outside memory, so a later access fails.
            (count != 0).then(|| (address.wrapping_add(start as u64), count))
        })
    }

    /// Fills `bytes` with content of the parts, from byte `skip` of the parts on.
    ///
    /// # Errors
    /// A part is outside the memory that the device can access.
    pub(super) fn read(&self, memory: &DmaView<'_>, skip: usize, bytes: &mut [u8]) -> Result<(), &'static str> {
        let mut at = 0;
        for (address, len) in self.range(skip, bytes.len()) {
            memory.read_slice(&mut bytes[at..at + len], GuestAddress(address)).map_err(|_| OUTSIDE)?;
            at += len;
        }
        Ok(())
    }

    /// Writes `bytes` to the parts, from byte `skip` of the parts on. Ignores bytes beyond the end of the parts.
    ///
    /// # Errors
    /// A part is outside the memory that the device can access.
    pub(super) fn write(&self, memory: &DmaView<'_>, skip: usize, bytes: &[u8]) -> Result<(), &'static str> {
        let mut at = 0;
        for (address, len) in self.range(skip, bytes.len()) {
            memory.write_slice(&bytes[at..at + len], GuestAddress(address)).map_err(|_| OUTSIDE)?;
            at += len;
        }
        Ok(())
    }
}

/// Walks `chain` and reads the request's header.
///
/// # Errors
/// The chain breaks a rule, so the request cannot be answered. The error names the rule. A chain breaks a rule in these cases:
/// - A link points outside the table or the links form a loop.
/// - The chain is longer than its queue.
/// - A device-readable buffer follows a device-writable one (virtio 1.4, section 2.7.4.2).
/// - The header is incomplete or outside memory.
/// - The chain has no room for the status.
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
    fn range_of_parts_is_cut_at_both_ends() {
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
