// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How much either side of a connection may send (virtio 1.4, section 5.10.6.3).

use std::num::Wrapping;

use super::packet::Header;

/// Bytes of the guest that a connection keeps at most, while the host's side does not take them.
pub(super) const BUF_ALLOC: usize = 128 << 10;
const BUF_ALLOC_32: u32 = 128 << 10;

/// Both sides' credit. Counts of bytes are modulo 2^32.
#[derive(Debug, Default)]
pub(super) struct Credit {
    /// The guest's buffer, and what has left it.
    guest_alloc: u32,
    guest_forwarded: Wrapping<u32>,
    /// Bytes that were sent to the guest.
    sent: Wrapping<u32>,
    /// Bytes that came of the guest, how many of them the host's side has taken, and how many the guest knows of.
    received: Wrapping<u32>,
    forwarded: Wrapping<u32>,
    told: Wrapping<u32>,
}

impl Credit {
    /// What a packet of the guest says of its buffer.
    pub(super) fn hear(&mut self, header: &Header) {
        self.guest_alloc = header.buf_alloc;
        self.guest_forwarded = Wrapping(header.fwd_cnt);
    }

    /// Bytes that the guest has room for.
    pub(super) fn left(&self) -> usize {
        let under_way = (self.sent - self.guest_forwarded).0;
        // Fits, as this is for 64-bit hosts.
        self.guest_alloc.saturating_sub(under_way) as usize
    }

    pub(super) fn count_sent(&mut self, bytes: u32) {
        self.sent += bytes;
    }

    pub(super) fn count_received(&mut self, bytes: u32) {
        self.received += bytes;
    }

    /// The host's side has taken so many of the bytes that came, which are [`BUF_ALLOC`] at most.
    pub(super) fn count_forwarded(&mut self, bytes: usize) {
        self.forwarded += u32::try_from(bytes).unwrap_or(BUF_ALLOC_32);
    }

    /// Whether the guest is to be told of room that it may soon wait for: at half of the buffer, but not byte by byte.
    pub(super) fn is_worth_telling(&self) -> bool {
        let (taken_up, news) = ((self.received - self.told).0, (self.forwarded - self.told).0);
        let drained = self.forwarded == self.received;
        taken_up > BUF_ALLOC_32 / 2 && news != 0 && (drained || news >= BUF_ALLOC_32 / 4)
    }

    /// Tells of this side's buffer in a packet.
    pub(super) fn tell(&mut self, header: &mut Header) {
        self.told = self.forwarded;
        header.buf_alloc = BUF_ALLOC_32;
        header.fwd_cnt = self.forwarded.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(buf_alloc: u32, fwd_cnt: u32) -> Header {
        Header { buf_alloc, fwd_cnt, ..Header::default() }
    }

    #[test]
    fn guests_room_is_what_it_said_less_what_is_under_way() {
        let mut credit = Credit::default();
        assert_eq!(credit.left(), 0);
        credit.hear(&heard(1000, 0));
        credit.count_sent(900);
        assert_eq!(credit.left(), 100);
        credit.hear(&heard(1000, 850));
        assert_eq!(credit.left(), 950);
        credit.hear(&heard(10, 850));
        assert_eq!(credit.left(), 0, "its buffer has shrunk");
        credit.hear(&heard(1000, 901));
        assert_eq!(credit.left(), 0, "it has forwarded more than it got");
    }

    #[test]
    fn counts_wrap_around() {
        let mut credit = Credit { sent: Wrapping(u32::MAX - 9), ..Credit::default() };
        credit.hear(&heard(100, u32::MAX - 9));
        credit.count_sent(30);
        assert_eq!(credit.left(), 70);
        credit.hear(&heard(100, 20));
        assert_eq!(credit.left(), 100);
    }

    #[test]
    fn guest_is_told_of_room_in_time_and_not_byte_by_byte() {
        let mut credit = Credit::default();
        credit.count_received(BUF_ALLOC_32 / 2);
        credit.count_forwarded(BUF_ALLOC / 2);
        assert!(!credit.is_worth_telling(), "it has room for as much again");
        credit.count_received(BUF_ALLOC_32 / 2);
        assert!(credit.is_worth_telling());
        let mut header = Header::default();
        credit.tell(&mut header);
        assert_eq!((header.buf_alloc, header.fwd_cnt), (BUF_ALLOC_32, BUF_ALLOC_32 / 2));
        credit.count_received(BUF_ALLOC_32 / 2);
        credit.count_forwarded(1);
        assert!(!credit.is_worth_telling(), "a byte is not worth a packet");
        credit.count_forwarded(BUF_ALLOC - 1);
        assert!(credit.is_worth_telling(), "all is drained");
    }
}
