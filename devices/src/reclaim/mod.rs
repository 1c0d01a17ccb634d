// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Gives unused guest RAM back to the host, for the balloon.
//!
//! RAM that is mapped for a host device is pinned. If a pinned page were given back, the guest would get a new page at its next access, but
//! the device would still access the old page. So [`Reclaim`] tracks pinned pages and does not give them back. [`PinningMapper`] and
//! [`PinnedWhole`] notify [`Reclaim`] before pages are pinned and after they are unpinned. `pins` counts the pins of each page, and
//! `discard` makes the system call.
//!
//! A thread that gives pages back locks the counts before it checks them, and unlocks the counts after the host has removed the pages.
//! While the thread holds the lock, it gives back at most one piece of 2 MiB, or one huge page if huge pages are larger. So a thread that
//! maps RAM for a device waits for at most one such piece. The mapping then pins the pages that the host allocates in place of the removed
//! pages.

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

/// Result of a request to give memory back to the host, in bytes. Addresses that are not RAM do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Bytes that the host got back.
    pub given_back: u64,
    /// Bytes that the guest keeps, because a host device has them pinned, or because they do not fill a whole page of the host.
    pub kept_back: u64,
    /// Bytes that the guest keeps, because the host kernel rejected the system call.
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
    /// Number of pins that cover all RAM, including RAM that is added later.
    whole: usize,
    /// Pins of each region that is or was part of the RAM. The key is the region's address in this process, because this address never
    /// changes. The guest-physical address is unsuitable as the key, because another region can get the address of a withdrawn region.
    regions: BTreeMap<usize, RegionPins>,
}

impl Pinned {
    fn of(&mut self, region: &RamRegion) -> &mut RegionPins {
        self.regions.entry(region.as_ptr() as usize).or_insert_with(|| RegionPins::new(region.len()))
    }
}

/// Guest RAM that can be given back, with the pins of its pages.
pub struct Reclaim {
    ram: Arc<Ram>,
    /// Size of the host's pages for this RAM in bytes, a power of two.
    page: u64,
    pinned: Mutex<Pinned>,
    throttle: Throttle,
}

impl Reclaim {
    /// Starts to track the pins of `ram`, which consists of host pages of `page` bytes. No page is pinned yet.
    pub fn new(ram: Arc<Ram>, page: u64) -> Self {
        Self { ram, page: page.max(PAGE), pinned: Mutex::default(), throttle: Throttle::default() }
    }

    /// Gives `len` bytes at guest-physical address `gpa` back to the host. Only unpinned whole pages of RAM are given back. The content of
    /// these pages is then undefined.
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

    /// Gives a range of one region back, piece by piece.
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

    /// Gives one piece of a region back. The piece is small, because other threads wait for the lock meanwhile.
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
            // This thread holds the lock, so no other thread can pin the pages meanwhile.
            match discard::discard(region, &free) {
                Ok(()) => done.given_back += len,
                Err(error) => {
                    done.refused += len;
                    if self.throttle.pass() {
                        warn!("cannot give {len:#x} bytes of guest RAM back to the host: {error}");
                    }
                }
            }
        }
        done
    }

    /// Counts a pin or an unpin of `len` bytes at `address` of this process. For a pin (`pin` is true), call this function before the pages
    /// are pinned. For an unpin, call this function after the pages are unpinned. Ignores memory that is not RAM.
    fn count(&self, address: usize, len: u64, pin: bool) {
        let mut pinned = lock(&self.pinned);
        let of = |region: &RamRegion| address.checked_sub(region.as_ptr() as usize).map(|offset| offset as u64);
        if let Some(region) = self.ram.iter().find(|region| of(region).is_some_and(|offset| offset < region.len())) {
            pinned.of(region);
        }
        // Search by the address only, because a late unpin may belong to a withdrawn region.
        if let Some((start, pins)) = pinned.regions.range_mut(..=address).next_back() {
            let (offset, size) = ((address - start) as u64, pins.size());
            if offset < size {
                pins.count(offset..(offset + len).min(size), pin);
            }
        }
    }

    /// Pins all RAM, including RAM that is added later, until the returned value is dropped.
    pub fn pin_whole(self: &Arc<Self>) -> PinnedWhole {
        lock(&self.pinned).whole += 1;
        PinnedWhole(self.clone())
    }
}

/// Pin of all RAM. Dropping this value removes the pin.
pub struct PinnedWhole(Arc<Reclaim>);

impl Drop for PinnedWhole {
    fn drop(&mut self) {
        lock(&self.0.pinned).whole -= 1;
    }
}
