// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Credit: the number of bytes that each side of a connection may send (virtio 1.4, section 5.10.6.3).

use std::num::Wrapping;

use super::packet::Header;

/// Maximum number of bytes from the guest that a connection keeps until the host's side accepts them.
pub(super) const BUF_ALLOC: usize = 128 << 10;
const BUF_ALLOC_32: u32 = 128 << 10;

/// Credit of both sides of a connection. All byte counts are modulo 2^32.
#[derive(Debug, Default)]
pub(super) struct Credit {
    /// Size of the guest's receive buffer.
    guest_alloc: u32,
    /// Bytes that the guest has read from its receive buffer.
    guest_forwarded: Wrapping<u32>,
    /// Bytes sent to the guest.
    sent: Wrapping<u32>,
    /// Bytes received from the guest.
    received: Wrapping<u32>,
    /// Bytes from the guest that the host's side has accepted.
    forwarded: Wrapping<u32>,
    /// Value of `forwarded` that was last sent to the guest.
    announced: Wrapping<u32>,
}

impl Credit {
    /// Stores the state of the guest's receive buffer. The header of each packet from the guest contains this state.
    pub(super) fn hear(&mut self, header: &Header) {
        self.guest_alloc = header.buf_alloc;
        self.guest_forwarded = Wrapping(header.fwd_cnt);
    }

    /// Returns the number of free bytes in the guest's receive buffer.
    pub(super) fn left(&self) -> usize {
        let under_way = (self.sent - self.guest_forwarded).0;
        // The cast is lossless, because Carom runs only on 64-bit hosts.
        self.guest_alloc.saturating_sub(under_way) as usize
    }

    pub(super) fn count_sent(&mut self, bytes: u32) {
        self.sent += bytes;
    }

    pub(super) fn count_received(&mut self, bytes: u32) {
        self.received += bytes;
    }

    /// Records that the host's side has accepted `bytes` received bytes, at most [`BUF_ALLOC`].
    pub(super) fn count_forwarded(&mut self, bytes: usize) {
        self.forwarded += u32::try_from(bytes).unwrap_or(BUF_ALLOC_32);
    }

    /// Returns true if a credit update is due, so that the guest receives new credit before its credit is used up. Both conditions must be
    /// met:
    /// * More than half of the guest's credit is used up.
    /// * Since the last update, the host's side has accepted at least a quarter of [`BUF_ALLOC`], or all received bytes.
    pub(super) fn needs_announcement(&self) -> bool {
        let (taken_up, news) = ((self.received - self.announced).0, (self.forwarded - self.announced).0);
        let drained = self.forwarded == self.received;
        taken_up > BUF_ALLOC_32 / 2 && news != 0 && (drained || news >= BUF_ALLOC_32 / 4)
    }

    /// Writes the state of the device's receive buffer into the header of a packet for the guest.
    pub(super) fn announce(&mut self, header: &mut Header) {
        self.announced = self.forwarded;
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
    fn guest_room_is_its_buffer_minus_bytes_in_flight() {
        let mut credit = Credit::default();
        assert_eq!(credit.left(), 0);
        credit.hear(&heard(1000, 0));
        credit.count_sent(900);
        assert_eq!(credit.left(), 100);
        credit.hear(&heard(1000, 850));
        assert_eq!(credit.left(), 950);
        credit.hear(&heard(10, 850));
        assert_eq!(credit.left(), 0, "the guest's buffer has shrunk");
        credit.hear(&heard(1000, 901));
        assert_eq!(credit.left(), 0, "the guest claims to have forwarded more than it received");
    }

    #[test]
    fn credit_counters_wrap_around() {
        let mut credit = Credit { sent: Wrapping(u32::MAX - 9), ..Credit::default() };
        credit.hear(&heard(100, u32::MAX - 9));
        credit.count_sent(30);
        assert_eq!(credit.left(), 70);
        credit.hear(&heard(100, 20));
        assert_eq!(credit.left(), 100);
    }

    #[test]
    fn credit_update_is_due_at_half_buffer_not_per_byte() {
        let mut credit = Credit::default();
        credit.count_received(BUF_ALLOC_32 / 2);
        credit.count_forwarded(BUF_ALLOC / 2);
        assert!(!credit.needs_announcement(), "the guest still has credit for the other half");
        credit.count_received(BUF_ALLOC_32 / 2);
        assert!(credit.needs_announcement());
        let mut header = Header::default();
        credit.announce(&mut header);
        assert_eq!((header.buf_alloc, header.fwd_cnt), (BUF_ALLOC_32, BUF_ALLOC_32 / 2));
        credit.count_received(BUF_ALLOC_32 / 2);
        credit.count_forwarded(1);
        assert!(!credit.needs_announcement(), "a byte is not worth a packet");
        credit.count_forwarded(BUF_ALLOC - 1);
        assert!(credit.needs_announcement(), "all bytes were accepted");
    }
}
