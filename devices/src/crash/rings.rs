// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rings of the last requests to devices. The number of rings is fixed. A device claims one or several rings, and returns them when it is
//! removed. Recording a request takes only a few instructions, without a lock or an allocation. The crash report lists the requests in the
//! rings.
//!
//! The memory of the rings is never freed, so the report may read a ring while the ring's owner is being removed. If another device claims
//! the ring during the read, the report may mix requests of the old and the new owner.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::ring_text::{self, Kept, RingKind};

/// Number of requests that a ring keeps.
pub(super) const KEPT: usize = 256;
/// Number of rings in the process. Rings that were never claimed use no memory.
const RINGS: usize = 256;
/// Number of 64-bit words for the name of a ring. Longer names are cut.
const NAME_WORDS: usize = 5;

/// Flag of [`Slot::outcome`]: the device has given the request back to the driver. The lower half of the outcome is the number of bytes
/// that the device wrote to the request's buffers.
const USED: u64 = 1 << 56;
/// Flag of [`Slot::outcome`]: the request has a status.
const STATUS: u64 = 1 << 57;
/// Flag of [`Slot::outcome`]: the device has noted fields of the request ([`Ring::note`]).
const NOTED: u64 = 1 << 58;
const STATUS_SHIFT: u32 = 32;
const CODE_SHIFT: u32 = 40;
const HEAD_BITS: u32 = 16;

/// Request and its outcome. A slot occupies half a cache line.
#[repr(align(32))]
pub(crate) struct Slot {
    /// Number of the request, counted from 1, with the head index of the descriptor chain in the low 16 bits. The word is 0 while a thread
    /// fills the slot.
    number: AtomicU64,
    /// Sizes of the request's parts in bytes. The low half is the size of the readable part, and the high half is the size of the writable
    /// part.
    sizes: AtomicU64,
    outcome: AtomicU64,
    value: AtomicU64,
}

#[expect(clippy::cast_possible_truncation, reason = "the upper half is dropped on purpose")]
fn low_half(word: u64) -> u32 {
    word as u32
}

impl Slot {
    const fn empty() -> Self {
        Self {
            number: AtomicU64::new(0),
            sizes: AtomicU64::new(0),
            outcome: AtomicU64::new(0),
            value: AtomicU64::new(0),
        }
    }

    fn fill(&self, number: u64, head: u16) {
        self.number.store(0, Ordering::Relaxed);
        self.sizes.store(0, Ordering::Relaxed);
        self.outcome.store(0, Ordering::Relaxed);
        self.number.store(number << HEAD_BITS | u64::from(head), Ordering::Release);
    }

    fn is(&self, number: u64) -> bool {
        self.number.load(Ordering::Relaxed) >> HEAD_BITS == number
    }

    /// Records the sizes of the request's readable and writable parts in bytes.
    #[inline]
    pub(crate) fn set_sizes(&self, readable: usize, writable: usize) {
        let [readable, writable] = [readable, writable].map(|len| u64::from(u32::try_from(len).unwrap_or(u32::MAX)));
        self.sizes.store(writable << 32 | readable, Ordering::Relaxed);
    }

    /// Sets bits of the outcome. Only one thread may call this function at a time.
    fn add(&self, bits: u64) {
        self.outcome.store(self.outcome.load(Ordering::Relaxed) | bits, Ordering::Relaxed);
    }

    fn read(&self, number: u64) -> Option<Kept> {
        let word = self.number.load(Ordering::Acquire);
        if word >> HEAD_BITS != number {
            return None;
        }
        let [sizes, outcome, value] =
            [&self.sizes, &self.outcome, &self.value].map(|word| word.load(Ordering::Relaxed));
        let byte = |shift: u32| (outcome >> shift & 0xff) as u8;
        Some(Kept {
            number,
            head: (word & 0xffff) as u16,
            readable: low_half(sizes),
            writable: low_half(sizes >> 32),
            note: (outcome & NOTED != 0).then_some((byte(CODE_SHIFT), value)),
            used: (outcome & USED != 0).then_some(low_half(outcome)),
            status: (outcome & STATUS != 0).then_some(byte(STATUS_SHIFT)),
        })
    }
}

/// Number of a recorded request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Number(u64);

/// Ring of the last requests to a queue or a device.
pub(crate) struct Ring {
    taken: AtomicBool,
    kind: AtomicU64,
    name: [AtomicU64; NAME_WORDS],
    /// Number of requests that were recorded so far.
    count: AtomicU64,
    slots: [Slot; KEPT],
}

impl Ring {
    const fn empty() -> Self {
        Self {
            taken: AtomicBool::new(false),
            kind: AtomicU64::new(0),
            name: [const { AtomicU64::new(0) }; NAME_WORDS],
            count: AtomicU64::new(0),
            slots: [const { Slot::empty() }; KEPT],
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "the remainder is below KEPT")]
    fn slot(&self, number: u64) -> &Slot {
        &self.slots[(number % KEPT as u64) as usize]
    }

    /// Records a request. The caller must ensure that only one thread at a time writes to the ring.
    #[inline]
    pub(crate) fn begin_alone(&self, head: u16) -> (Number, &Slot) {
        let number = self.count.load(Ordering::Relaxed) + 1;
        let slot = self.slot(number);
        slot.fill(number, head);
        self.count.store(number, Ordering::Release);
        (Number(number), slot)
    }

    /// Records a request. Several threads may write to the ring at the same time.
    pub(crate) fn begin(&self, head: u16) -> (Number, &Slot) {
        let number = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        let slot = self.slot(number);
        slot.fill(number, head);
        (Number(number), slot)
    }

    /// Removes the last `requests` requests from the ring. The device will record these requests again when it retries them. The caller
    /// must ensure that only one thread at a time writes to the ring.
    pub(crate) fn take_back(&self, requests: u16) {
        let count = self.count.load(Ordering::Relaxed);
        let left = count.saturating_sub(requests.into());
        for number in (left + 1..=count).rev().take(KEPT) {
            self.slot(number).number.store(0, Ordering::Relaxed);
        }
        self.count.store(left, Ordering::Release);
    }

    /// Sets bits of a request's outcome, unless a newer request has replaced this request in the ring.
    #[inline]
    fn add(&self, Number(number): Number, bits: u64) {
        let slot = self.slot(number);
        if slot.is(number) {
            slot.add(bits);
        }
    }

    /// Records two fields that describe a request: `code` and `value`.
    #[inline]
    pub(crate) fn note(&self, Number(number): Number, code: u8, value: u64) {
        let slot = self.slot(number);
        if slot.is(number) {
            slot.value.store(value, Ordering::Relaxed);
            slot.add(NOTED | u64::from(code) << CODE_SHIFT);
        }
    }

    /// Records the status in the answer to a request.
    #[inline]
    pub(crate) fn set_status(&self, number: Number, status: u8) {
        self.add(number, STATUS | u64::from(status) << STATUS_SHIFT);
    }

    /// Records that the device gave a request back, and that it wrote `used` bytes to the request's buffers.
    #[inline]
    pub(crate) fn end(&self, number: Number, used: u32) {
        self.add(number, USED | u64::from(used));
    }

    /// Writes the requests, one per line, oldest first. Allocates nothing.
    fn write(&self, to: &mut impl Write) -> fmt::Result {
        let kind = RingKind::decode(self.kind.load(Ordering::Relaxed));
        let count = self.count.load(Ordering::Acquire);
        if count == 0 {
            return Ok(());
        }
        let mut name = [0; NAME_WORDS * 8];
        let (words, _) = name.as_chunks_mut::<8>();
        for (bytes, word) in words.iter_mut().zip(&self.name) {
            *bytes = word.load(Ordering::Relaxed).to_le_bytes();
        }
        let len = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        let name = name[..len].utf8_chunks().next().map_or("?", |chunk| chunk.valid());
        ring_text::head(to, name, kind)?;
        for number in count.saturating_sub(KEPT as u64) + 1..=count {
            match self.slot(number).read(number) {
                Some(kept) => ring_text::line(to, kind, &kept)?,
                None => writeln!(to, "{number} (the record of this request is incomplete)")?,
            }
        }
        Ok(())
    }
}

/// All rings, and a count of the claims that failed because no ring was free.
pub(super) struct Rings<const COUNT: usize> {
    rings: [Ring; COUNT],
    missed: AtomicU64,
}

/// Rings of the process.
pub(super) static ALL: Rings<RINGS> = Rings::new();

impl<const COUNT: usize> Rings<COUNT> {
    const fn new() -> Self {
        Self { rings: [const { Ring::empty() }; COUNT], missed: AtomicU64::new(0) }
    }

    /// Claims a free ring. Returns `None` if all rings are claimed.
    fn claim(&'static self, name: &str, kind: RingKind) -> Option<Claim> {
        let ring = self.rings.iter().find(|ring| {
            let taken = ring.taken.load(Ordering::Relaxed);
            !taken && ring.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
        });
        let Some(ring) = ring else {
            self.missed.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        let mut bytes = [0; NAME_WORDS * 8];
        let len = name.len().min(bytes.len());
        bytes[..len].copy_from_slice(&name.as_bytes()[..len]);
        let (words, _) = bytes.as_chunks::<8>();
        for (word, bytes) in ring.name.iter().zip(words) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        ring.kind.store(kind.encode(), Ordering::Relaxed);
        Some(Claim(ring))
    }

    /// Writes the requests of all claimed rings.
    pub(super) fn write(&self, to: &mut impl Write) -> fmt::Result {
        for ring in self.rings.iter().filter(|ring| ring.taken.load(Ordering::Acquire)) {
            ring.write(to)?;
        }
        match self.missed.load(Ordering::Relaxed) {
            0 => Ok(()),
            missed => writeln!(
                to,
                "requests to {missed} queues or devices were not recorded, because all {COUNT} rings were in use"
            ),
        }
    }
}

/// Claim on a ring. Dropping the claim returns the ring.
pub(crate) struct Claim(&'static Ring);

impl Claim {
    /// Claims a free ring of the process. Returns `None` if all rings are claimed.
    pub(crate) fn new(name: &str, kind: RingKind) -> Option<Self> {
        ALL.claim(name, kind)
    }

    /// Returns the ring. The caller may keep the ring after the claim was dropped. A later write can only corrupt one line about the ring's
    /// next owner.
    pub(crate) fn ring(&self) -> &'static Ring {
        self.0
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // The next owner counts its requests from 1 again, so old slots must not look like requests of the next owner.
        self.0.slots.iter().for_each(|slot| slot.number.store(0, Ordering::Relaxed));
        self.0.count.store(0, Ordering::Relaxed);
        self.0.taken.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: RingKind = RingKind::Queue { device: 2, index: 1 };

    fn text<const COUNT: usize>(rings: &Rings<COUNT>) -> String {
        let mut text = String::new();
        rings.write(&mut text).unwrap();
        text
    }

    #[test]
    fn requests_are_written_with_their_sizes_and_outcomes() {
        static RINGS: Rings<2> = Rings::new();
        let claim = RINGS.claim("disk0", BLOCK).unwrap();
        assert_eq!(text(&RINGS), "", "no request came yet");
        let ring = claim.ring();
        let (first, slot) = ring.begin_alone(7);
        slot.set_sizes(16, 4097);
        ring.note(first, 0, 2048);
        ring.set_status(first, 1);
        ring.end(first, 1);
        let (_, slot) = ring.begin_alone(3);
        slot.set_sizes(usize::MAX, 0);
        let expected = "last requests to disk0 (virtio device 2), queue 1, oldest first:\n\
                        1 head=7 readable=16 writable=4097 IN sector=2048 status=1 used=1\n\
                        2 head=3 readable=4294967295 writable=0 not given back\n";
        assert_eq!(text(&RINGS), expected);
    }

    #[test]
    fn full_ring_keeps_last_requests_and_drops_late_ends() {
        static RINGS: Rings<1> = Rings::new();
        let claim = RINGS.claim("net0", RingKind::Queue { device: 1, index: 0 }).unwrap();
        let (first, _) = claim.ring().begin_alone(9);
        for _ in 0..KEPT {
            claim.ring().begin_alone(1);
        }
        claim.ring().end(first, 77);
        let text = text(&RINGS);
        assert_eq!(text.lines().count(), 1 + KEPT);
        assert!(text.contains("\n2 head=1 ") && !text.contains("used=77") && !text.contains("head=9"), "{text}");
    }

    #[test]
    fn taken_back_requests_begin_again_with_their_number() {
        static RINGS: Rings<1> = Rings::new();
        let claim = RINGS.claim("net0", RingKind::Queue { device: 1, index: 0 }).unwrap();
        for head in [1, 2, 3] {
            claim.ring().begin_alone(head);
        }
        claim.ring().take_back(2);
        claim.ring().begin_alone(8);
        let kept = text(&RINGS);
        assert!(
            kept.ends_with(
                "\n1 head=1 readable=0 writable=0 not given back\n2 head=8 readable=0 writable=0 not given back\n"
            ),
            "{kept}"
        );
        claim.ring().take_back(u16::MAX);
        assert_eq!(text(&RINGS), "");
    }

    #[test]
    fn reused_ring_has_no_requests_of_its_old_owner() {
        static RINGS: Rings<1> = Rings::new();
        let before = RINGS.claim("a-name-that-is-as-long-as-names-may-ever-be", BLOCK).unwrap();
        for head in 0..5 {
            before.ring().begin_alone(head);
        }
        assert!(text(&RINGS).starts_with("last requests to a-name-that-is-as-long-as-names-may-ever (virtio"));
        assert!(RINGS.claim("rng", BLOCK).is_none());
        drop(before);
        let missed = "requests to 1 queues or devices were not recorded, because all 1 rings were in use\n";
        assert_eq!(text(&RINGS), missed);
        let after = RINGS.claim("rng", RingKind::Queue { device: 4, index: 0 }).unwrap();
        after.ring().begin_alone(6);
        let expected = "last requests to rng (virtio device 4), queue 0, oldest first:\n\
                        1 head=6 readable=0 writable=0 not given back\n";
        assert_eq!(text(&RINGS), format!("{expected}{missed}"));
    }

    #[test]
    fn name_cut_within_a_letter_is_still_valid_text() {
        static RINGS: Rings<1> = Rings::new();
        let claim = RINGS.claim(&format!("{}é", "x".repeat(39)), BLOCK).unwrap();
        claim.ring().begin_alone(0);
        assert!(text(&RINGS).starts_with(&format!("last requests to {} (", "x".repeat(39))));
    }

    #[test]
    fn concurrent_claims_get_separate_rings_and_lose_no_request() {
        static RINGS: Rings<4> = Rings::new();
        std::thread::scope(|scope| {
            for index in 0..4 {
                scope.spawn(move || {
                    for _ in 0..100 {
                        let claim = RINGS.claim("vdpa", RingKind::Queue { device: 1, index }).unwrap();
                        claim.ring().begin_alone(index);
                        drop(claim);
                    }
                });
            }
        });
        let claim = RINGS.claim("vfio0", RingKind::Messages).unwrap();
        std::thread::scope(|scope| {
            for id in 0..4 {
                let ring = claim.ring();
                scope.spawn(move || {
                    for _ in 0..KEPT / 4 {
                        let (number, _) = ring.begin(id);
                        ring.end(number, id.into());
                    }
                });
            }
        });
        let text = text(&RINGS);
        for id in 0..4 {
            assert_eq!(text.lines().filter(|line| line.ends_with(&format!("answer={id}"))).count(), KEPT / 4, "{text}");
        }
    }
}
