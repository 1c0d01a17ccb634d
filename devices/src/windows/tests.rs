// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of window memory with memory slots that record their use.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use iommu_bounce::{ChunkError, ChunkStore};

use super::supply::TARGET;
use super::{WindowError, WindowMemory, WindowMemoryConfig};
use crate::host_memory::{Cause, Loss};
use crate::virtio::test_support::FakeSlots;

const CHUNK: u64 = 2 << 20;
const BAR: u64 = 0x80_0000_0000;

fn config(chunks: u64, budget: u64, slots: &Arc<FakeSlots>) -> WindowMemoryConfig {
    WindowMemoryConfig {
        region_size: chunks * CHUNK,
        chunk_size: CHUNK,
        budget: budget * CHUNK,
        hugepages: false,
        slots: slots.clone(),
    }
}

fn windows(chunks: u64, budget: u64) -> (Arc<FakeSlots>, WindowMemory) {
    let slots = Arc::new(FakeSlots::default());
    let windows = WindowMemory::new(&config(chunks, budget, &slots)).unwrap();
    windows.moved(BAR).unwrap();
    (slots, windows)
}

fn place(index: u32) -> u64 {
    BAR + u64::from(index) * CHUNK
}

/// Waits, for a limited time, until `held` chunks are allocated. Returns the number of chunks that are allocated at the end of the wait.
fn settle(windows: &WindowMemory, held: u64) -> u64 {
    let deadline = Instant::now() + Duration::from_secs(60);
    while windows.held_bytes() != held * CHUNK && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    windows.held_bytes() / CHUNK
}

#[test]
fn chunk_cannot_be_backed_before_the_region_has_an_address() {
    let slots = Arc::new(FakeSlots::default());
    let windows = WindowMemory::new(&config(4, 4, &slots)).unwrap();
    assert!(matches!(windows.store().back(), Err(ChunkError::NoResources)));
    assert_eq!(slots.len(), 0);
    windows.moved(BAR).unwrap();
    assert!(windows.store().back().is_ok());
}

#[test]
fn backed_chunk_is_zero_and_the_guest_sees_its_memory() {
    let (slots, windows) = windows(4, 4);
    let mut store = windows.store();
    let index = store.back().unwrap();
    assert_eq!(slots.len(), 1);
    let memory = store.memory(index).unwrap();
    assert_eq!(memory.len() as u64, CHUNK);
    assert_eq!(memory.ptr_guard().as_ptr().addr(), slots.at(place(index)).unwrap().address);
    let mut bytes = vec![0xffu8; memory.len()];
    memory.copy_to(&mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 0));
    slots.store(place(index) + CHUNK - 1, 7);
    memory.copy_to(&mut bytes);
    assert_eq!(bytes.last(), Some(&7));
}

#[test]
fn lost_page_of_a_chunk_is_named_as_window_memory() {
    let (slots, windows) = windows(4, 4);
    let mut store = windows.store();
    store.back().unwrap();
    let index = store.back().unwrap();
    let address = slots.at(place(index)).unwrap().address + 0x1000;
    let loss = Loss { address: Some(address), gpa: Some(place(index) + 0x1000), cause: Cause::Poisoned };
    let expected = format!("bounce windows, offset 0x201000 (guest-physical {:#x})", place(index) + 0x1000);
    assert!(loss.explain().contains(&expected), "{}", loss.explain());
    drop((store, windows));
    assert!(!loss.explain().contains("bounce windows, offset"), "the region is gone");
}

#[test]
fn released_chunk_is_hidden_and_zero_when_backed_again() {
    let (slots, windows) = windows(1, 1);
    let mut store = windows.store();
    let index = store.back().unwrap();
    slots.store(place(index), 0x5a);
    store.release(index).unwrap();
    assert_ne!(slots.load(place(index)), 0x5a, "the guest still sees the old bytes");
    assert!(store.memory(index).is_none());
    slots.store(place(index), 0x77);
    let again = store.back().unwrap();
    assert_eq!(again, index);
    assert_eq!(slots.load(place(index)), 0, "a write to the released place changed the next chunk");
    assert_eq!((slots.len(), slots.removed()), (1, 0), "a slot is created once and stays");
}

#[test]
fn released_places_share_the_scratch_chunk() {
    let (slots, windows) = windows(2, 2);
    let mut store = windows.store();
    let (a, b) = (store.back().unwrap(), store.back().unwrap());
    store.release(a).unwrap();
    store.release(b).unwrap();
    slots.store(place(a) + 5, 9);
    assert_eq!(slots.load(place(b) + 5), 9);
}

/// Returns the inodes of the files that are mapped in `len` bytes at `address` of this process.
fn mapped_inodes(address: usize, len: usize) -> Vec<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let inside = maps.lines().filter_map(|line| {
        let mut fields = line.split_whitespace();
        let (start, _) = fields.next()?.split_once('-')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        let inode = fields.nth(3)?.parse().ok()?;
        (address..address + len).contains(&start).then_some(inode)
    });
    inside.collect()
}

/// True if this process has a descriptor of the file with this inode.
fn is_open(inode: u64) -> bool {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
    descriptors.flatten().any(|entry| std::fs::metadata(entry.path()).is_ok_and(|file| file.ino() == inode))
}

#[test]
fn released_chunk_gives_its_memory_back() {
    let (slots, windows) = windows(1, 1);
    let mut store = windows.store();
    let index = store.back().unwrap();
    let host = slots.at(place(index)).unwrap();
    let [inode] = mapped_inodes(host.address, host.len)[..] else { panic!("a chunk is one mapping") };
    assert!(is_open(inode));
    store.release(index).unwrap();
    assert_eq!(settle(&windows, 0), 0);
    assert!(!is_open(inode), "the file is still open");
    let scratch = mapped_inodes(host.address, host.len);
    assert!(scratch.len() == 1 && scratch[0] != inode, "the file is still mapped");
}

#[test]
fn parked_chunk_is_hidden_and_returns_zeroed_in_same_memory() {
    let (slots, windows) = windows(2, 1);
    let mut store = windows.store();
    let index = store.back().unwrap();
    let host = slots.at(place(index)).unwrap();
    let inodes = mapped_inodes(host.address, host.len);
    slots.store(place(index) + CHUNK - 1, 0x5a);
    store.park(index).unwrap();
    assert!(store.memory(index).is_none());
    assert!(is_open(inodes[0]), "a device may have the file mapped");
    assert_ne!(mapped_inodes(host.address, host.len), inodes);
    slots.store(place(index), 0x77);
    assert!(matches!(store.back(), Err(ChunkError::NoResources)), "a parked chunk counts against the budget");
    store.park(index).unwrap();
    store.unpark(index).unwrap();
    assert_eq!(mapped_inodes(host.address, host.len), inodes);
    assert_eq!((slots.load(place(index)), slots.load(place(index) + CHUNK - 1)), (0, 0));
    assert_eq!((slots.len(), slots.removed()), (1, 0));
    store.park(index).unwrap();
    store.release(index).unwrap();
    assert_eq!(settle(&windows, 0), 0);
    assert!(!is_open(inodes[0]));
    for result in [store.park(index), store.unpark(index), store.park(9), store.unpark(9)] {
        assert!(matches!(result, Err(ChunkError::Host(_))));
    }
}

#[test]
fn chunk_can_be_backed_at_a_place_that_is_free() {
    let (slots, windows) = windows(4, 2);
    let mut store = windows.store();
    store.back_at(2).unwrap();
    assert_eq!(slots.load(place(2)), 0);
    for index in [2, 4, u32::MAX] {
        let result = store.back_at(index);
        assert!(matches!(&result, Err(ChunkError::Host(error)) if error.kind() == std::io::ErrorKind::InvalidInput));
    }
    assert_eq!(store.back().unwrap(), 0, "the lowest free place is used next");
    assert!(matches!(store.back_at(1), Err(ChunkError::NoResources)), "the budget is used up");
    store.release(2).unwrap();
    store.back_at(1).unwrap();
}

#[test]
fn unknown_chunk_is_not_released() {
    let (_, windows) = windows(2, 2);
    let mut store = windows.store();
    let index = store.back().unwrap();
    for wrong in [index + 1, 2, u32::MAX] {
        assert!(matches!(store.release(wrong), Err(ChunkError::Host(_))));
        assert!(store.memory(wrong).is_none());
    }
    store.release(index).unwrap();
    assert!(matches!(store.release(index), Err(ChunkError::Host(_))));
}

#[test]
fn budget_and_region_bound_what_is_backed() {
    let (_, windows) = windows(3, 2);
    let mut store = windows.store();
    let first = store.back().unwrap();
    store.back().unwrap();
    assert!(matches!(store.back(), Err(ChunkError::NoResources)));
    store.release(first).unwrap();
    store.back().expect("a released place can be backed again at once");
    windows.set_budget(9 * CHUNK);
    store.back().unwrap();
    assert!(matches!(store.back(), Err(ChunkError::NoResources)), "the region has three places");
}

#[test]
fn stash_is_filled_only_while_in_use_and_within_the_budget() {
    let (_, windows) = windows(8, 3);
    assert_eq!(windows.held_bytes(), 0);
    windows.set_in_use(true);
    assert_eq!(settle(&windows, 3), 3, "the stash takes no more than the budget");
    let mut store = windows.store();
    for _ in 0..3 {
        store.back().unwrap();
        assert!(windows.held_bytes() <= 3 * CHUNK);
    }
    assert!(matches!(store.back(), Err(ChunkError::NoResources)));
    windows.set_budget(8 * CHUNK);
    let full = 3 + TARGET as u64;
    assert_eq!(settle(&windows, full), full);
    windows.set_in_use(false);
    assert_eq!(settle(&windows, 3), 3);
}

#[test]
fn lowered_budget_frees_the_stash_but_keeps_backed_chunks() {
    let (slots, windows) = windows(8, 8);
    windows.set_in_use(true);
    let mut store = windows.store();
    let index = store.back().unwrap();
    let full = 1 + TARGET as u64;
    assert_eq!(settle(&windows, full), full);
    slots.store(place(index), 3);
    windows.set_budget(0);
    assert_eq!(settle(&windows, 1), 1);
    assert_eq!(slots.load(place(index)), 3);
    assert!(matches!(store.back(), Err(ChunkError::NoResources)));
    store.release(index).unwrap();
    assert_eq!(settle(&windows, 0), 0);
}

#[test]
fn failed_slot_changes_nothing() {
    let (slots, windows) = windows(1, 1);
    let mut store = windows.store();
    slots.fail.store(true, Ordering::SeqCst);
    assert!(matches!(store.back(), Err(ChunkError::Host(_))));
    assert_eq!((slots.len(), settle(&windows, 0)), (0, 0));
    assert_eq!(store.back().unwrap(), 0);
    assert_eq!(slots.len(), 1);
}

#[test]
fn moved_region_takes_backed_chunks_along() {
    let (slots, windows) = windows(4, 4);
    let mut store = windows.store();
    let (kept, gone) = (store.back().unwrap(), store.back().unwrap());
    slots.store(place(kept), 0x11);
    store.release(gone).unwrap();
    windows.moved(BAR).unwrap();
    assert_eq!(slots.removed(), 0, "the address did not change");
    windows.moved(BAR / 2).unwrap();
    assert_eq!((slots.len(), slots.removed()), (2, 2));
    assert_eq!(slots.load(BAR / 2 + u64::from(kept) * CHUNK), 0x11);
    assert!(slots.at(place(kept)).is_none());
}

#[test]
fn dropped_window_memory_removes_all_slots() {
    let (slots, windows) = windows(4, 4);
    let mut store = windows.store();
    store.back().unwrap();
    store.back().unwrap();
    drop(windows);
    assert_eq!(slots.len(), 2, "the engine's store still owns the region");
    drop(store);
    assert_eq!(slots.len(), 0);
}

#[test]
fn impossible_sizes_are_refused() {
    let slots = Arc::new(FakeSlots::default());
    let good = config(4, 4, &slots);
    let new = |change: fn(&mut WindowMemoryConfig)| {
        let mut config = good.clone();
        change(&mut config);
        WindowMemory::new(&config).err()
    };
    assert!(matches!(new(|c| c.chunk_size = 3 << 20), Some(WindowError::ChunkSize(_))));
    assert!(matches!(new(|c| c.chunk_size = 2048), Some(WindowError::ChunkSize(2048))));
    assert!(matches!(new(|c| c.chunk_size = 0), Some(WindowError::ChunkSize(0))));
    assert!(matches!(new(|c| c.region_size = 0), Some(WindowError::RegionSize { .. })));
    assert!(matches!(new(|c| c.region_size += 4096), Some(WindowError::RegionSize { .. })));
    assert!(matches!(new(|c| c.region_size = u64::MAX), Some(WindowError::RegionSize { .. })));
    let small_huge = |c: &mut WindowMemoryConfig| (c.chunk_size, c.hugepages) = (1 << 20, true);
    assert!(matches!(new(small_huge), Some(WindowError::HugePages(_))));
}

#[test]
fn hosts_without_huge_pages_have_no_resources() {
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    if free.is_ok_and(|free| free.trim() != "0") {
        return;
    }
    let slots = Arc::new(FakeSlots::default());
    let windows = WindowMemory::new(&WindowMemoryConfig { hugepages: true, ..config(4, 4, &slots) }).unwrap();
    windows.moved(BAR).unwrap();
    assert!(windows.store().back().is_err());
    assert_eq!((windows.held_bytes(), slots.len()), (0, 0));
}

#[test]
fn chunk_that_fails_to_release_is_hidden_until_recovered() {
    let (slots, windows) = windows(2, 2);
    let mut store = windows.store();
    let (first, second) = (store.back().unwrap(), store.back().unwrap());
    slots.store(place(first), 0x5a);
    windows.refuse_maps(1);
    assert!(store.release(first).is_err());
    assert!(slots.at(place(first)).is_none(), "the guest still sees the chunk");
    assert!(matches!(store.back(), Err(ChunkError::NoResources)));

    windows.refuse_maps(1);
    assert_eq!(store.recover(), None);
    assert_eq!(store.recover(), Some(first));
    assert_eq!(store.recover(), None);
    assert_eq!(store.back().unwrap(), first);
    assert_eq!(slots.load(place(first)), 0);
    assert!(store.memory(second).is_some());
}

#[test]
fn lost_chunks_recover_in_turn_even_if_lost_during_backing() {
    let (_slots, windows) = windows(3, 3);
    let mut store = windows.store();
    let (first, second) = (store.back().unwrap(), store.back().unwrap());
    for index in [first, second] {
        windows.refuse_maps(1);
        assert!(store.release(index).is_err());
    }
    // Neither the chunk nor the scratch chunk can be mapped.
    windows.refuse_maps(2);
    assert!(store.back().is_err());
    assert!(matches!(store.back(), Err(ChunkError::NoResources)), "lost chunks use up the budget");
    windows.refuse_maps(1);
    let recovered: Vec<_> = (0..4).map(|_| store.recover()).collect();
    let third = 3 - first - second;
    assert_eq!(recovered, [None, Some(second), Some(third), Some(first)], "the first chunk is retried last");
    assert_eq!(settle(&windows, 0), 0);
    assert_eq!((0..3).filter(|_| store.back().is_ok()).count(), 3);
}

/// True if this process has window memory mapped at `address`.
fn is_mapped(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("carom-window")).any(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split(' ').next().unwrap();
        let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).unwrap());
        (start..end).contains(&address)
    })
}

#[test]
fn region_stays_mapped_if_a_slot_stays() {
    let (slots, windows) = windows(2, 2);
    let mut store = windows.store();
    let [first, other] = [store.back().unwrap(), store.back().unwrap()];
    let addresses = [first, other].map(|index| slots.at(place(index)).unwrap().address);
    slots.kept.store(1, Ordering::SeqCst);
    drop((store, windows));
    assert_eq!(slots.len(), 1, "the other slot is removed");
    assert_eq!(addresses.map(is_mapped), [true; 2]);
}

#[test]
fn slot_with_failed_removal_is_used_again() {
    let (slots, windows) = windows(1, 1);
    let mut store = windows.store();
    let index = store.back().unwrap();
    // The scratch chunk cannot be mapped over the chunk, and the slot cannot be removed.
    windows.refuse_maps(1);
    slots.kept.store(1, Ordering::SeqCst);
    store.release(index).unwrap_err();
    assert_eq!(slots.len(), 1);
    assert_eq!(store.recover(), Some(index));
    assert_eq!(store.back().unwrap(), index);
    slots.store(place(index), 7);
    assert_eq!((slots.len(), slots.load(place(index))), (1, 7));
}

#[test]
fn slot_with_failed_move_moves_the_next_time() {
    let (slots, windows) = windows(2, 2);
    let mut store = windows.store();
    let [first, other] = [store.back().unwrap(), store.back().unwrap()];
    slots.kept.store(1, Ordering::SeqCst);
    windows.moved(2 * BAR).unwrap_err();
    assert!(slots.at(place(first)).is_some() && slots.at(place(other)).is_none());
    assert!(slots.at(place(first) + BAR).is_none() && slots.at(place(other) + BAR).is_some());
    windows.moved(BAR).unwrap();
    windows.moved(2 * BAR).unwrap();
    assert_eq!(slots.len(), 2);
    assert!([first, other].iter().all(|index| slots.at(place(*index) + BAR).is_some()));
}
