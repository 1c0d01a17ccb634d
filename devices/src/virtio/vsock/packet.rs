// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Packets in the guest's memory (virtio 1.4, section 5.10.6). The driver may split a packet into buffers of any number and size.
//!
//! The crate `virtio-vsock` only supports packets with one buffer, or with a header and one data buffer. The crate also requires each
//! buffer to be contiguous in host memory. A driver with zero-copy transmission (Linux 6.7 and later) sends many buffers. Behind the
//! virtio-iommu, a buffer that is contiguous in IOVAs need not be contiguous in host memory.

use vm_memory::{Bytes, GuestAddress};

use super::spec::HEADER;
use crate::dma::DmaView;
use crate::virtio::chain::{Chain, OUTSIDE, walk};

/// Header of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) src_cid: u64,
    pub(super) dst_cid: u64,
    pub(super) src_port: u32,
    pub(super) dst_port: u32,
    /// Number of data bytes after the header.
    pub(super) len: u32,
    pub(super) kind: u16,
    pub(super) op: u16,
    pub(super) flags: u32,
    /// Total size of the receive buffer of the packet's sender, in bytes.
    pub(super) buf_alloc: u32,
    /// Number of bytes that the packet's sender has read from its receive buffer since the connection began, modulo 2^32.
    pub(super) fwd_cnt: u32,
}

/// Splits off and returns the first bytes.
fn take<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
    let (first, rest) = bytes.split_first_chunk().expect("the fields are as long as the header");
    *bytes = rest;
    *first
}

impl Header {
    /// Decodes a header. All fields are little-endian.
    pub(super) fn decode(bytes: &[u8; HEADER]) -> Self {
        let bytes = &mut bytes.as_slice();
        Self {
            src_cid: u64::from_le_bytes(take(bytes)),
            dst_cid: u64::from_le_bytes(take(bytes)),
            src_port: u32::from_le_bytes(take(bytes)),
            dst_port: u32::from_le_bytes(take(bytes)),
            len: u32::from_le_bytes(take(bytes)),
            kind: u16::from_le_bytes(take(bytes)),
            op: u16::from_le_bytes(take(bytes)),
            flags: u32::from_le_bytes(take(bytes)),
            buf_alloc: u32::from_le_bytes(take(bytes)),
            fwd_cnt: u32::from_le_bytes(take(bytes)),
        }
    }

    /// Returns the operation and the ports, for the record of the last requests.
    pub(super) fn noted(&self) -> (u8, u64) {
        (u8::try_from(self.op).unwrap_or(u8::MAX), u64::from(self.src_port) << 32 | u64::from(self.dst_port))
    }

    /// Encodes the header in the format that [`Self::decode`] reads.
    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let mut put = |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
        put(0, &self.src_cid.to_le_bytes());
        put(8, &self.dst_cid.to_le_bytes());
        put(16, &self.src_port.to_le_bytes());
        put(20, &self.dst_port.to_le_bytes());
        put(24, &self.len.to_le_bytes());
        put(28, &self.kind.to_le_bytes());
        put(30, &self.op.to_le_bytes());
        put(32, &self.flags.to_le_bytes());
        put(36, &self.buf_alloc.to_le_bytes());
        put(40, &self.fwd_cnt.to_le_bytes());
        bytes
    }
}

/// Buffers of a descriptor chain, accessed as one contiguous buffer. [`gather`](Self::gather) replaces the buffers with the buffers of
/// another chain.
#[derive(Default)]
pub(super) struct Buffers {
    parts: Vec<(GuestAddress, usize)>,
    len: usize,
}

impl Buffers {
    /// Stores the buffers of `chain`. Returns their total length in bytes.
    ///
    /// # Errors
    /// The chain breaks a rule, and the error is the text of this rule. The chain breaks a rule in these cases:
    /// - A link points outside the table, or the links form a loop.
    /// - The chain is longer than its queue.
    /// - A buffer is device-readable although `writable` is true, or device-writable although `writable` is false.
    pub(super) fn gather(
        &mut self,
        chain: Chain<&DmaView<'_>>,
        queue_size: u16,
        writable: bool,
    ) -> Result<usize, &'static str> {
        self.parts.clear();
        self.len = 0;
        for buffer in walk(chain, queue_size) {
            let buffer = buffer?;
            if buffer.writable != writable {
                return Err(if writable {
                    "a buffer of this queue is device-readable, but must be device-writable"
                } else {
                    "a transmit buffer is device-writable"
                });
            }
            if buffer.len != 0 {
                self.parts.push((buffer.address, buffer.len));
                self.len += buffer.len;
            }
        }
        Ok(self.len)
    }

    /// Calls `each` for each contiguous part of the `len` bytes at offset `skip` of the buffers. The arguments are the address of the part,
    /// and the range of the part within these `len` bytes.
    fn for_each(
        &self,
        mut skip: usize,
        len: usize,
        mut each: impl FnMut(GuestAddress, std::ops::Range<usize>) -> vm_memory::guest_memory::Result<()>,
    ) -> Result<(), &'static str> {
        let mut done = 0;
        for (address, part) in &self.parts {
            let start = skip.min(*part);
            skip -= start;
            let count = (part - start).min(len - done);
            if count != 0 {
                let address = address.0.checked_add(start as u64).ok_or(OUTSIDE)?;
                each(GuestAddress(address), done..done + count).map_err(|_| OUTSIDE)?;
                done += count;
            }
        }
        if done == len { Ok(()) } else { Err("a packet is shorter than its header says") }
    }

    /// Reads the bytes from offset `skip` on into `bytes`.
    ///
    /// # Errors
    /// The buffers are too short, or a buffer is outside memory.
    pub(super) fn read(&self, memory: &DmaView<'_>, skip: usize, bytes: &mut [u8]) -> Result<(), &'static str> {
        self.for_each(skip, bytes.len(), |address, range| memory.read_slice(&mut bytes[range], address))
    }

    /// Writes `bytes` to the buffers from offset `skip` on.
    ///
    /// # Errors
    /// The buffers are too short, or a buffer is outside memory.
    pub(super) fn write(&self, memory: &DmaView<'_>, skip: usize, bytes: &[u8]) -> Result<(), &'static str> {
        self.for_each(skip, bytes.len(), |address, range| memory.write_slice(&bytes[range], address))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::dma::DeviceMemory;
    use crate::ram::Ram;

    #[test]
    fn header_round_trips() {
        let mut bytes = [0; HEADER];
        for (number, byte) in (0..).zip(&mut bytes) {
            *byte = number;
        }
        let header = Header::decode(&bytes);
        assert_eq!((header.src_cid, header.fwd_cnt), (0x0706_0504_0302_0100, 0x2b2a_2928));
        assert_eq!((header.len, header.kind, header.op), (0x1b1a_1918, 0x1d1c, 0x1f1e));
        assert_eq!(header.encode(), bytes);
    }

    #[test]
    fn access_crosses_buffer_boundaries() {
        let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap());
        let memory = DeviceMemory::all_ram(ram);
        let view = memory.view();
        let parts = vec![(GuestAddress(0x100), 3), (GuestAddress(0x10), 1), (GuestAddress(0x200), 8)];
        let buffers = Buffers { parts, len: 12 };
        buffers.write(&view, 2, b"abcdef").unwrap();
        let mut bytes = [0; 4];
        buffers.read(&view, 3, &mut bytes).unwrap();
        assert_eq!(&bytes, b"bcde");
        assert_eq!(view.read_obj::<u8>(GuestAddress(0x102)).unwrap(), b'a');
        assert_eq!(view.read_obj::<u8>(GuestAddress(0x10)).unwrap(), b'b');
        assert!(buffers.read(&view, 9, &mut bytes).is_err(), "the buffers are too short");
        for far in [0xffeu64, u64::MAX - 1, 1 << 50] {
            let buffers = Buffers { parts: vec![(GuestAddress(far), 12)], len: 12 };
            assert!(buffers.read(&view, 4, &mut bytes).is_err(), "{far:#x}");
        }
    }
}
