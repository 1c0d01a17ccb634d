// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Ring of the last requests to the virtio-iommu. Recording a request takes only a few instructions and no lock. The crash report lists the
//! requests in the ring.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use iommu_bounce::WindowVersion;
use iommu_bounce::spec::{readable, request};

/// Number of requests that a ring keeps.
const KEPT: usize = 256;

/// Number of 64-bit words kept per request. The fields of a MAP request are the longest, with 36 bytes.
const WORDS: usize = 5;

/// Flag of [`Slot::outcome`]: the answer to the request has a status. The status is in the lowest byte of the outcome.
const ANSWERED: u64 = 1 << 8;
/// Flag of [`Slot::outcome`]: the answer to the request has no status.
const NO_STATUS: u64 = 1 << 9;

/// Request and its outcome.
struct Slot {
    /// Number of the request, counted from 1, or 0 while a thread fills the slot.
    number: AtomicU64,
    outcome: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl Slot {
    const fn empty() -> Self {
        Self { number: AtomicU64::new(0), outcome: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; WORDS] }
    }
}

/// Ring of the last requests to a virtio-iommu. Several threads may record requests at the same time. A reader may find a request that is
/// only partly recorded.
pub struct RequestRing {
    /// Number of requests that were recorded so far.
    count: AtomicU64,
    slots: [Slot; KEPT],
}

/// Request that is not answered yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending(u64);

/// Last requests to the virtio-iommu of the VM in this process.
pub static REQUESTS: RequestRing = RequestRing::new();

impl Default for RequestRing {
    fn default() -> Self {
        Self::new()
    }
}

impl RequestRing {
    /// Creates an empty ring.
    pub const fn new() -> Self {
        Self { count: AtomicU64::new(0), slots: [const { Slot::empty() }; KEPT] }
    }

    /// Records the fields of a request. `readable` is the request's device-readable part. Bytes that the guest put after the fields are not
    /// recorded. If the type of the request is unknown, only the type is recorded. `version` is the version of bounce windows that the driver
    /// accepted.
    pub fn begin(&self, readable: &[u8], version: WindowVersion) -> Pending {
        let fields = readable.first().map_or(0, |kind| fields(*kind)).min(readable.len());
        let mut bytes = [0; WORDS * 8];
        bytes[..fields].copy_from_slice(&readable[..fields]);
        // This byte is reserved in a request.
        bytes[VERSION] = u8::from(version == WindowVersion::V2);
        let number = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        let slot = self.slot(number);
        slot.number.store(0, Ordering::Relaxed);
        slot.outcome.store(0, Ordering::Relaxed);
        let (words, _) = bytes.as_chunks::<8>();
        for (word, bytes) in slot.words.iter().zip(words) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        slot.number.store(number, Ordering::Release);
        Pending(number)
    }

    /// Records the answer to a request. `written` is the request's device-writable part. Its fourth byte from the end is the status.
    pub fn end(&self, Pending(number): Pending, written: &[u8]) {
        let slot = self.slot(number);
        // The slot may hold a newer request now, because each slot is reused after `KEPT` requests.
        if slot.number.load(Ordering::Relaxed) == number {
            let status = written.len().checked_sub(4).map(|place| written[place]);
            let outcome = status.map_or(NO_STATUS, |status| ANSWERED | u64::from(status));
            slot.outcome.store(outcome, Ordering::Relaxed);
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "the remainder is below KEPT")]
    fn slot(&self, number: u64) -> &Slot {
        &self.slots[(number % KEPT as u64) as usize]
    }

    /// Writes the requests, one per line, oldest first. Allocates nothing.
    pub(super) fn write(&self, to: &mut impl Write) -> fmt::Result {
        let count = self.count.load(Ordering::Acquire);
        for number in count.saturating_sub(KEPT as u64) + 1..=count {
            let slot = self.slot(number);
            if slot.number.load(Ordering::Acquire) != number {
                writeln!(to, "{number} (the record of this request is incomplete)")?;
                continue;
            }
            let mut bytes = [0; WORDS * 8];
            let (words, _) = bytes.as_chunks_mut::<8>();
            for (bytes, word) in words.iter_mut().zip(&slot.words) {
                *bytes = word.load(Ordering::Relaxed).to_le_bytes();
            }
            write!(to, "{number} ")?;
            write_fields(to, &bytes)?;
            match slot.outcome.load(Ordering::Relaxed) {
                0 => writeln!(to, " not answered")?,
                NO_STATUS => writeln!(to, " no status")?,
                outcome => writeln!(to, " status={}", outcome & 0xff)?,
            }
        }
        Ok(())
    }
}

/// Offset of a byte of the record that is 1 if the driver uses version 2 of bounce windows, otherwise 0.
const VERSION: usize = 1;

/// Returns how many bytes the ring records for a request of type `kind`.
fn fields(kind: u8) -> usize {
    match kind {
        request::ATTACH => readable::ATTACH,
        // DETACH, UNMAP, PROBE and the WINDOW requests end with reserved bytes, which are not recorded.
        request::DETACH => readable::DETACH - 8,
        request::MAP => readable::MAP,
        request::UNMAP => readable::UNMAP - 4,
        request::PROBE => 8,
        request::WINDOW_ADD => readable::WINDOW_ADD - 8,
        request::WINDOW_DEL => readable::WINDOW_DEL - 8,
        request::MAP_LIST => readable::MAP_LIST,
        _ => 1,
    }
}

fn write_fields(to: &mut impl Write, bytes: &[u8; WORDS * 8]) -> fmt::Result {
    let le32 = |at: usize| bytes[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
    let le64 = |at: usize| bytes[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    match bytes[0] {
        request::ATTACH => write!(to, "ATTACH domain={} endpoint={:#x} flags={:#x}", le32(4), le32(8), le32(12)),
        request::DETACH => write!(to, "DETACH domain={} endpoint={:#x}", le32(4), le32(8)),
        request::MAP => {
            let (start, end, gpa, flags) = (le64(8), le64(16), le64(24), le32(32));
            write!(to, "MAP domain={} iova={start:#x}..={end:#x} gpa={gpa:#x} flags={flags:#x}", le32(4))
        }
        request::UNMAP => write!(to, "UNMAP domain={} iova={:#x}..={:#x}", le32(4), le64(8), le64(16)),
        request::PROBE => write!(to, "PROBE endpoint={:#x}", le32(4)),
        request::WINDOW_ADD => {
            let (flags, iova) = if bytes[VERSION] == 0 { (le32(16), le64(8)) } else { (le32(8), le64(12)) };
            write!(to, "WINDOW_ADD domain={} flags={flags:#x} iova={iova:#x}", le32(4))
        }
        request::WINDOW_DEL => {
            let iova = if bytes[VERSION] == 0 { le64(8) } else { le64(12) };
            write!(to, "WINDOW_DEL domain={} iova={iova:#x}", le32(4))
        }
        request::MAP_LIST => {
            let (start, flags, count) = (le64(8), le32(16), le32(20));
            write!(to, "MAP_LIST domain={} iova={start:#x} flags={flags:#x} ranges={count}", le32(4))
        }
        kind => write!(to, "type={kind:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use iommu_bounce::spec::Status;
    use iommu_bounce::test_utils::{
        attach, map, map_list, unmap, window_add, window_add_v2, window_del, window_del_v2,
    };

    use super::*;

    fn text(ring: &RequestRing) -> String {
        let mut text = String::new();
        ring.write(&mut text).unwrap();
        text
    }

    #[test]
    fn requests_are_written_with_their_fields_and_outcomes() {
        let ring = RequestRing::new();
        let first = ring.begin(&attach(0x18, 1), WindowVersion::V3);
        ring.end(first, &[0; 4]);
        let second = ring.begin(&map(1, 0x1000, 0x1fff, 0x8000, 3), WindowVersion::V3);
        ring.end(second, &[Status::Range as u8, 0, 0, 0]);
        let third = ring.begin(&unmap(1, 0x1000, 0x1fff), WindowVersion::V3);
        ring.end(third, &[]);
        ring.begin(&unmap(1, 0, u64::MAX), WindowVersion::V3);
        let expected = "1 ATTACH domain=1 endpoint=0x18 flags=0x0 status=0\n\
                        2 MAP domain=1 iova=0x1000..=0x1fff gpa=0x8000 flags=0x3 status=5\n\
                        3 UNMAP domain=1 iova=0x1000..=0x1fff no status\n\
                        4 UNMAP domain=1 iova=0x0..=0xffffffffffffffff not answered\n";
        assert_eq!(text(&ring), expected);
    }

    #[test]
    fn requests_for_windows_are_written_by_their_version() {
        let ring = RequestRing::new();
        let (iova, flags) = (0xc020_0000, 3);
        ring.begin(&window_add(1, flags, iova), WindowVersion::V3);
        ring.begin(&window_add_v2(1, flags, iova), WindowVersion::V2);
        ring.begin(&window_del(1, iova), WindowVersion::V3);
        ring.begin(&window_del_v2(1, iova), WindowVersion::V2);
        ring.begin(&map_list(1, 0x1000, flags, &[(0x8000, 0x1000), (0x4000, 0x1000)]), WindowVersion::V3);
        let expected = "1 WINDOW_ADD domain=1 flags=0x3 iova=0xc0200000 not answered\n\
                        2 WINDOW_ADD domain=1 flags=0x3 iova=0xc0200000 not answered\n\
                        3 WINDOW_DEL domain=1 iova=0xc0200000 not answered\n\
                        4 WINDOW_DEL domain=1 iova=0xc0200000 not answered\n\
                        5 MAP_LIST domain=1 iova=0x1000 flags=0x3 ranges=2 not answered\n";
        assert_eq!(text(&ring), expected);
    }

    #[test]
    fn full_ring_keeps_last_requests_and_drops_late_answers() {
        let ring = RequestRing::new();
        let first = ring.begin(&unmap(7, 0, 0), WindowVersion::V3);
        for page in 0..KEPT as u64 {
            let pending = ring.begin(&unmap(1, page, page), WindowVersion::V3);
            ring.end(pending, &[0; 4]);
        }
        ring.end(first, &[Status::NoEnt as u8, 0, 0, 0]);
        let text = text(&ring);
        assert_eq!(text.lines().count(), KEPT);
        assert!(text.starts_with("2 UNMAP domain=1 iova=0x0") && !text.contains("status=6"), "{text}");
    }

    #[test]
    fn bytes_outside_the_fields_are_not_recorded() {
        let ring = RequestRing::new();
        ring.begin(b"Z a secret of the guest's, as long as any request there is", WindowVersion::V3);
        let mut long = unmap(1, 0, 0).to_vec();
        long.extend(b"a secret of the guest's");
        ring.begin(&long, WindowVersion::V3);
        ring.begin(&long[..7], WindowVersion::V3);
        ring.begin(&[], WindowVersion::V3);
        let kept = ring.slots.iter().flat_map(|slot| &slot.words).map(|word| word.load(Ordering::Relaxed));
        let bytes: Vec<u8> = kept.flat_map(u64::to_le_bytes).collect();
        assert!(!bytes.windows(6).any(|bytes| bytes == b"secret"));
        assert!(text(&ring).starts_with("1 type=0x5a not answered\n2 UNMAP domain=1 iova=0x0..=0x0 not"));
    }

    #[test]
    fn concurrent_writers_lose_no_request() {
        let ring = RequestRing::new();
        std::thread::scope(|scope| {
            for domain in 0..4 {
                let ring = &ring;
                scope.spawn(move || {
                    for page in 0..KEPT as u64 / 4 {
                        let pending = ring.begin(&unmap(domain, page, page), WindowVersion::V3);
                        ring.end(pending, &[0; 4]);
                    }
                });
            }
        });
        let text = text(&ring);
        for domain in 0..4 {
            let of_domain =
                text.lines().filter(|line| line.contains(&format!("domain={domain} ")) && line.ends_with("status=0"));
            assert_eq!(of_domain.count(), KEPT / 4);
        }
    }
}
