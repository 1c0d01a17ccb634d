// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Ranges of this process's memory that are guest memory, and the sources of their pages.
//!
//! Each range is recorded twice. A list for ordinary threads holds the file and the complete name. A table of atomics holds the last
//! [`TEXT_BYTES`] bytes of the name for the signal handler, which must neither lock nor allocate.

use std::fs::File;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::platform::HostRange;
use crate::sync::lock;

/// Maximum number of regions that the signal handler can name.
const TABLE: usize = 512;
/// Number of 64-bit words for the name of each region in the table.
const TEXT_WORDS: usize = 40;
/// Maximum length of a name in the table, in bytes.
pub(super) const TEXT_BYTES: usize = TEXT_WORDS * 8;

/// Source of the pages of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Supply {
    /// A file that the user named.
    File,
    /// Reserved huge pages.
    HugePages,
    /// Ordinary memory of the host.
    Memory,
}

/// Description of a region of guest memory, for messages.
#[derive(Clone, Debug)]
pub struct Origin {
    /// Name of the region for the user, such as `zone 'a', file /mnt/ram`.
    pub name: String,
    /// Source of the region's pages.
    pub supply: Supply,
    /// File that is mapped in the region, if this process has the file open.
    pub file: Option<Arc<File>>,
    /// Offset of the region's first byte in the file.
    pub offset: u64,
    /// Guest-physical address of the region's first byte, if it never changes.
    pub gpa: Option<u64>,
}

/// Registered region, for threads that may lock and allocate.
#[derive(Clone, Debug)]
pub(super) struct Region {
    generation: u64,
    pub(super) range: HostRange,
    pub(super) origin: Arc<Origin>,
    slot: Option<usize>,
}

#[derive(Default)]
struct Regions {
    last_generation: u64,
    list: Vec<Region>,
}

impl Regions {
    fn remove(&mut self, place: usize) {
        if let Some(slot) = self.list.swap_remove(place).slot {
            SLOTS[slot].generation.store(0, Ordering::Release);
        }
    }
}

static REGIONS: Mutex<Regions> = Mutex::new(Regions { last_generation: 0, list: Vec::new() });

/// Registered region, for the signal handler.
struct Slot {
    /// 0 while the slot is free or being written. Later regions have larger numbers.
    generation: AtomicU64,
    start: AtomicUsize,
    len: AtomicUsize,
    text: [AtomicU64; TEXT_WORDS],
}

static SLOTS: [Slot; TABLE] = [const {
    Slot {
        generation: AtomicU64::new(0),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        text: [const { AtomicU64::new(0) }; TEXT_WORDS],
    }
}; TABLE];

impl Slot {
    fn write(&self, generation: u64, range: HostRange, name: &str) {
        // Keep the end of a long name, because a path ends with the name of the file.
        let mut cut = name.len().saturating_sub(TEXT_BYTES);
        while !name.is_char_boundary(cut) {
            cut += 1;
        }
        let name = &name.as_bytes()[cut..];
        let mut bytes = [0; TEXT_BYTES];
        bytes[..name.len()].copy_from_slice(name);
        let (words, _) = bytes.as_chunks::<8>();
        for (word, bytes) in self.text.iter().zip(words) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        self.start.store(range.address, Ordering::Relaxed);
        self.len.store(range.len, Ordering::Relaxed);
        self.generation.store(generation, Ordering::Release);
    }

    /// Returns the generation of the slot's region if the region contains `address`.
    fn holds(&self, address: usize) -> Option<u64> {
        let generation = self.generation.load(Ordering::Acquire);
        let offset = address.checked_sub(self.start.load(Ordering::Relaxed))?;
        (generation != 0 && offset < self.len.load(Ordering::Relaxed)).then_some(generation)
    }
}

/// Registration of a region. Dropping this value ends the registration. Drop the registration before the range is unmapped.
#[derive(Debug)]
pub struct Registration(u64);

/// Registers `range` as guest memory. Replaces an earlier registration of the same address and length. If registered ranges overlap, the
/// range that was registered last counts.
pub fn register(range: HostRange, origin: Origin) -> Registration {
    let mut regions = lock(&REGIONS);
    if let Some(place) = regions.list.iter().position(|region| region.range == range) {
        regions.remove(place);
    }
    regions.last_generation += 1;
    let generation = regions.last_generation;
    let is_free = |slot: &&Slot| slot.generation.load(Ordering::Relaxed) == 0;
    let slot = SLOTS.iter().position(|slot| is_free(&slot));
    if let Some(slot) = slot {
        SLOTS[slot].write(generation, range, &origin.name);
    }
    regions.list.push(Region { generation, range, origin: Arc::new(origin), slot });
    Registration(generation)
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut regions = lock(&REGIONS);
        if let Some(place) = regions.list.iter().position(|region| region.generation == self.0) {
            regions.remove(place);
        }
    }
}

/// Returns the region that contains `address`.
pub(super) fn find(address: usize) -> Option<Region> {
    let regions = lock(&REGIONS);
    let holds =
        |region: &&Region| address.checked_sub(region.range.address).is_some_and(|offset| offset < region.range.len);
    regions.list.iter().filter(holds).max_by_key(|region| region.generation).cloned()
}

/// Calls `visit` with all regions. The regions stay registered and mapped during the call.
pub(super) fn with_all<R>(visit: impl FnOnce(&[Region]) -> R) -> R {
    visit(&lock(&REGIONS).list)
}

/// Writes the name of the region that contains `address` to `text`. Returns the length of the name and the offset of the address in the
/// region. Takes no lock and allocates nothing.
pub(super) fn find_in_signal(address: usize, text: &mut [u8; TEXT_BYTES]) -> Option<(usize, usize)> {
    let holding = SLOTS.iter().filter_map(|slot| slot.holds(address).map(|generation| (generation, slot)));
    let (generation, slot) = holding.max_by_key(|(generation, _)| *generation)?;
    let (words, _) = text.as_chunks_mut::<8>();
    for (bytes, word) in words.iter_mut().zip(&slot.text) {
        *bytes = word.load(Ordering::Relaxed).to_le_bytes();
    }
    let offset = address.wrapping_sub(slot.start.load(Ordering::Relaxed));
    if slot.generation.load(Ordering::Acquire) != generation {
        return None;
    }
    Some((text.iter().position(|byte| *byte == 0).unwrap_or(TEXT_BYTES), offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(name: &str) -> Origin {
        Origin { name: name.into(), supply: Supply::Memory, file: None, offset: 0, gpa: None }
    }

    fn name_in_signal(address: usize) -> Option<(String, usize)> {
        let mut text = [0; TEXT_BYTES];
        let (len, offset) = find_in_signal(address, &mut text)?;
        Some((String::from_utf8(text[..len].to_vec()).unwrap(), offset))
    }

    #[test]
    fn address_is_found_in_the_region_registered_last() {
        // No other test uses these addresses, because nothing is mapped there.
        let range = HostRange { address: 0x1000, len: 0x3000 };
        let whole = register(range, origin("whole"));
        let part = register(HostRange { address: 0x2000, len: 0x1000 }, origin("part"));
        let found = |address| find(address).map(|region| region.origin.name.clone());
        for (address, name, offset) in [(0x1000, "whole", 0), (0x2fff, "part", 0xfff), (0x3000, "whole", 0x2000)] {
            assert_eq!(found(address).as_deref(), Some(name), "{address:#x}");
            assert_eq!(name_in_signal(address), Some((name.into(), offset)), "{address:#x}");
        }
        drop(part);
        assert_eq!((found(0x2000).as_deref(), name_in_signal(0x2000).unwrap().1), (Some("whole"), 0x1000));
        let again = register(range, origin("again"));
        drop(whole);
        assert_eq!(found(0x2000).as_deref(), Some("again"), "the older name of the same range is gone already");
        drop(again);
        assert!(found(0x2000).is_none() && name_in_signal(0x2000).is_none());
        assert!(name_in_signal(0x4000).is_none());
    }

    #[test]
    fn long_name_keeps_its_end() {
        let long = format!("é{}end", "x".repeat(TEXT_BYTES - 4));
        let _kept = register(HostRange { address: 0x8000, len: 0x1000 }, origin(&long));
        let (name, _) = name_in_signal(0x8000).unwrap();
        assert!(name.ends_with("end") && name.len() == TEXT_BYTES - 1, "{} bytes", name.len());
        assert_eq!(find(0x8000).unwrap().origin.name, long);
    }
}
