// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Giving guest RAM back to the host that the guest does not use: for the balloon.
//!
//! What a device of the host has mapped is pinned there. Were such a page given back, the guest would get a new one at its next
//! access, and the device would go on with the old one. So [`Reclaim`] knows what is pinned, and keeps it: [`PinningMapper`] and
//! [`PinnedWhole`] tell it before something is pinned and after it no longer is. `pins` counts, `discard` is the system call.
//!
//! The lock on the counts is held from the look at them until the pages are gone, for 2 MiB (or one huge page) at a time. Who
//! maps waits for one such piece at most, and finds the pages that there are after it.

mod discard;
mod pinning_mapper;
mod pins;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use log::warn;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

pub use self::pinning_mapper::PinningMapper;
use self::pins::{BLOCK, PAGE, RegionPins};
use crate::ram::{Ram, RamRegion};
use crate::sync::lock;
use crate::throttle::Throttle;

/// What became of memory that was to be given back, in bytes. What is not RAM is in none of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// The host has it.
    pub given_back: u64,
    /// The guest keeps it: a device of the host has it pinned, or it is a part of a huge page.
    pub kept_back: u64,
    /// The guest keeps it as the host did not take it.
    pub refused: u64,
}

impl std::ops::AddAssign for Reclaimed {
    fn add_assign(&mut self, other: Self) {
        self.given_back += other.given_back;
        self.kept_back += other.kept_back;
        self.refused += other.refused;
    }
}

#[derive(Default)]
struct Pinned {
    /// Who has all RAM pinned, whatever comes to it.
    whole: usize,
    /// Those of each region that RAM has or had, by its address in this process, where it stays for good. Not by its place: one that
    /// is withdrawn leaves that to another.
    regions: BTreeMap<usize, RegionPins>,
}

impl Pinned {
    fn of(&mut self, region: &RamRegion) -> &mut RegionPins {
        self.regions.entry(region.as_ptr() as usize).or_insert_with(|| RegionPins::new(region.len()))
    }
}

/// The RAM of a guest, to be given back, and what of it is pinned.
pub struct Reclaim {
    ram: Arc<Ram>,
    /// Bytes of the pages that RAM is made of, a power of two.
    page: u64,
    pinned: Mutex<Pinned>,
    throttle: Throttle,
}

impl Reclaim {
    /// Of `ram`, which is made of pages of `page` bytes.
    pub fn new(ram: Arc<Ram>, page: u64) -> Self {
        Self { ram, page: page.max(PAGE), pinned: Mutex::default(), throttle: Throttle::default() }
    }

    /// Gives `len` bytes at guest-physical `gpa` back to the host, as far as they are RAM in whole pages and not pinned. They
    /// read as anything from then on.
    pub fn give_back(&self, gpa: u64, len: u64) -> Reclaimed {
        let mut done = Reclaimed::default();
        let end = gpa.saturating_add(len);
        for region in self.ram.iter() {
            let start = region.start_addr().0;
            let (first, last) = (gpa.max(start), end.min(start + region.len()));
            if first < last {
                done += self.give_back_of(region, first - start..last - start);
            }
        }
        done
    }

    /// The same, for a range of one region.
    fn give_back_of(&self, region: &RamRegion, range: Range<u64>) -> Reclaimed {
        let whole = range.start.next_multiple_of(self.page)..range.end & !(self.page - 1);
        let mut done = Reclaimed::default();
        let piece = self.page.max(BLOCK);
        let mut next = whole.start;
        while next < whole.end {
            let end = (next + 1).next_multiple_of(piece).min(whole.end);
            done += self.give_back_piece(region, next..end);
            next = end;
        }
        done.kept_back = range.end - range.start - done.given_back - done.refused;
        done
    }

    /// The same, for a piece that is not so large that somebody waits for long.
    fn give_back_piece(&self, region: &RamRegion, piece: Range<u64>) -> Reclaimed {
        let mut done = Reclaimed::default();
        let mut pinned = lock(&self.pinned);
        if pinned.whole > 0 {
            return done;
        }
        let pins = pinned.of(region);
        let mut next = piece.start;
        while let Some(free) = pins.free(next..piece.end) {
            next = free.end;
            let free = free.start.next_multiple_of(self.page)..free.end & !(self.page - 1);
            if free.is_empty() {
                continue;
            }
            let len = free.end - free.start;
            // The lock is held: nobody pins it meanwhile.
            match discard::discard(region, &free) {
                Ok(()) => done.given_back += len,
                Err(error) => {
                    done.refused += len;
                    if self.throttle.pass() {
                        warn!("giving {len:#x} bytes of guest RAM back to the host: {error}");
                    }
                }
            }
        }
        done
    }

    /// `len` bytes at `address` of this process are about to be pinned, or are no longer. What is not RAM is ignored.
    fn count(&self, address: usize, len: u64, pin: bool) {
        let mut pinned = lock(&self.pinned);
        let of = |region: &RamRegion| address.checked_sub(region.as_ptr() as usize).map(|offset| offset as u64);
        if let Some(region) = self.ram.iter().find(|region| of(region).is_some_and(|offset| offset < region.len())) {
            pinned.of(region);
        }
        // By the address alone: what is unpinned late may be of a region that was withdrawn.
        if let Some((start, pins)) = pinned.regions.range_mut(..=address).next_back() {
            let (offset, size) = ((address - start) as u64, pins.size());
            if offset < size {
                pins.count(offset..(offset + len).min(size), pin);
            }
        }
    }

    /// All RAM is about to be pinned, and what comes to it, until what this returns is dropped.
    pub fn pin_whole(self: &Arc<Self>) -> PinnedWhole {
        lock(&self.pinned).whole += 1;
        PinnedWhole(self.clone())
    }
}

/// All RAM is pinned.
pub struct PinnedWhole(Arc<Reclaim>);

impl Drop for PinnedWhole {
    fn drop(&mut self) {
        lock(&self.0.pinned).whole -= 1;
    }
}
