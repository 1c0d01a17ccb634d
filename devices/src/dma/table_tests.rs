// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the table: the accesses that it allows, and the operations that an UNMAP waits for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Mutex, Weak};
use std::thread;

use proptest::prelude::*;
use vm_memory::{GuestMemory, MmapRegion, Permissions as Access};

use super::super::faults::{FaultRelay, fault_relay};
use super::super::memory::DeviceMemory;
use super::*;
use crate::guest_visible::test_support::showing;
use crate::host_range::test_support::pages;
use crate::sync::lock;

const RW: Permissions = Permissions::READ.union(Permissions::WRITE);
const ENDPOINT: EndpointId = 0x18;

fn rig() -> (DmaTable, FaultRelay) {
    let ranges = [(GuestAddress(0), 0x8000), (GuestAddress(0x1_0000), 0x8000)];
    let ram = Arc::new(Ram::from_ranges(&ranges).unwrap());
    let (sender, relay) = fault_relay();
    (DmaTable::new("user0", ram, Some((ENDPOINT, sender))), relay)
}

/// Removes a range. Returns the removed mappings, or `None` if the range does not consist of whole mappings.
fn remove(table: &DmaTable, iova: u64, len: u64) -> Option<Vec<(u64, u64)>> {
    let mut removed = Vec::new();
    match table.remove(iova, len, |iova, len| removed.push((iova, len))) {
        Ok(()) => Some(removed),
        Err(error) => {
            assert_eq!((error, removed), (RemoveError::NotWhole, vec![]));
            None
        }
    }
}

/// Returns a table that can map the pages of a device. Also returns a weak reference that is valid while the pages are mapped in this
/// process.
fn rig_with_device() -> (DmaTable, FaultRelay, DeviceRange, Weak<MmapRegion>) {
    let (table, relay) = rig();
    let (device, mapped) = pages(0x4000);
    table.connect(None, Some(&showing(&[&device])));
    (table, relay, device, mapped)
}

fn stopped(relay: &FaultRelay) -> Vec<(u64, Permissions)> {
    relay.take().0.into_iter().map(|fault| (fault.iova, fault.access)).collect()
}

#[test]
fn device_accesses_mapped_memory_with_its_permissions() {
    let (table, relay) = rig();
    assert!(table.insert(0x10_0000, 0x1000, Backing::Ram(0x2000), RW));
    assert!(table.insert(0x10_1000, 0x1000, Backing::Ram(0x1_0000), Permissions::READ));
    assert!(table.insert(0x10_2000, 0x1000, Backing::Ram(0x3000), Permissions::WRITE));
    assert!(table.write(0x10_0ffc, &[1, 2, 3, 4]));
    table.ram.write_slice(&[5, 6], GuestAddress(0x1_0000)).unwrap();
    let mut data = [0; 6];
    assert!(table.read(0x10_0ffc, &mut data));
    assert_eq!(data, [1, 2, 3, 4, 5, 6]);
    assert_eq!(table.ram.read_obj::<u32>(GuestAddress(0x2ffc)).unwrap(), 0x0403_0201);
    assert_eq!(stopped(&relay), []);
    // This write crosses into a read-only mapping. The table writes nothing, and reports the first address that cannot be written.
    assert!(!table.write(0x10_0ffc, &[9; 8]));
    assert_eq!(table.ram.read_obj::<u32>(GuestAddress(0x2ffc)).unwrap(), 0x0403_0201);
    assert!(!table.read(0x10_2000, &mut data));
    assert!(!table.read(0xf_ffff, &mut data));
    let (read, write) = (Permissions::READ, Permissions::WRITE);
    assert_eq!(stopped(&relay), [(0x10_1000, write), (0x10_2000, read), (0xf_ffff, read)]);
    assert!(table.write(0x10_2000, &[7]));
    assert!(!table.read(u64::MAX - 1, &mut data));
    assert!(table.read(0, &mut []));
}

#[test]
fn blocked_mapping_denies_access_but_exists_until_removed() {
    let (table, relay) = rig();
    assert!(table.insert(0x10_0000, 0x2000, Backing::Ram(0x2000), Permissions::READ));
    assert!(table.insert(0x10_2000, 0x1000, Backing::Chunk(3), RW));
    let (iova, len, backing, permissions) = (0x10_0000, 0x2000, Backing::Ram(0x2000), Permissions::READ);
    assert_eq!(table.mapping(0x10_1fff, Permissions::READ), Some(Mapping { iova, len, backing, permissions }));
    assert_eq!(table.mapping(0x10_1fff, Permissions::WRITE), None);
    assert_eq!(table.mapping(0x10_3000, Permissions::READ), None);
    assert_eq!(stopped(&relay), [], "`mapping` does not report by itself");
    table.report_stopped(0x10_3000, Permissions::READ);
    assert_eq!(stopped(&relay), [(0x10_3000, Permissions::READ)]);

    let mut chunks = Vec::new();
    assert_eq!(table.block(0x10_1000, 0x2000, |chunk| chunks.push(chunk)), Err(RemoveError::NotWhole));
    assert!(table.mapping(0x10_1000, Permissions::READ).is_some());
    assert_eq!(table.block(0x10_0000, 0x3000, |chunk| chunks.push(chunk)), Ok(()));
    assert_eq!(chunks, [3]);
    assert_eq!(table.mapping(0x10_1000, Permissions::READ), None);
    assert!(!table.read(0x10_1000, &mut [0]));
    assert!(!table.insert(0x10_0000, 0x1000, backing, RW), "the blocked mapping still exists");
    assert_eq!(remove(&table, 0x10_0000, 0x3000), Some(vec![(0x10_0000, 0x2000), (0x10_2000, 0x1000)]));
}

#[test]
fn removed_mapping_denies_access() {
    let (table, relay) = rig();
    for page in 0..4u64 {
        assert!(table.insert(page << 12, 0x1000, Backing::Ram(page << 12), RW));
    }
    for (iova, len) in [(0x800, 0x1000), (0, 0x800), (0x3000, 0x2000), (0x8000, 0x1000), (0, 0), (u64::MAX, 2)] {
        assert_eq!(remove(&table, iova, len), None, "{iova:#x} {len:#x}");
    }
    assert_eq!(table.count(), 4);
    assert_eq!(remove(&table, 0x1000, 0x2000), Some(vec![(0x1000, 0x1000), (0x2000, 0x1000)]));
    assert!(!table.read(0x1000, &mut [0]));
    assert_eq!(stopped(&relay), [(0x1000, Permissions::READ)]);
    assert_eq!(remove(&table, 0, 0x4000), None, "the range has a gap");
    table.clear();
    assert!(!table.read(0, &mut [0]));
}

#[test]
fn mapping_over_another_is_refused() {
    let (table, _relay) = rig();
    assert!(table.insert(0x2000, 0x2000, Backing::Ram(0), RW));
    for (iova, len) in [(0x2000, 0x2000), (0x1000, 0x1001), (0x3fff, 1), (0, 0x8000), (0, 0), (u64::MAX, 2)] {
        assert!(!table.insert(iova, len, Backing::Ram(0), RW), "{iova:#x} {len:#x}");
    }
    assert!(table.insert(0x1000, 0x1000, Backing::Ram(0), RW));
    assert!(table.insert(u64::MAX, 1, Backing::Ram(0), RW));
    assert!(table.read(u64::MAX, &mut [0]));
}

#[test]
fn only_guest_memory_has_a_backing() {
    let (table, _relay) = rig();
    let slice = table.ram.get_slice(GuestAddress(0x1_1000), 0x2000).unwrap();
    assert_eq!(table.backing_of(&slice), Some(Backing::Ram(0x1_1000)));
    let mut other = [0u8; 64];
    assert_eq!(table.backing_of(&VolatileSlice::from(&mut other[..])), None);
}

#[test]
fn view_allows_mapped_memory_and_reports_other_accesses() {
    let (table, relay) = rig();
    assert!(table.insert(0x10_0000, 0x1000, Backing::Ram(0x7000), RW));
    assert!(table.insert(0x10_1000, 0x1000, Backing::Ram(0x1_0000), Permissions::READ));
    assert!(table.insert(u64::MAX - 0xfff, 0x1000, Backing::Ram(0), RW));
    let memory = DeviceMemory::mapped(Arc::new(table));
    let view = memory.view();
    let at = GuestAddress;
    view.write_obj(0x1122_3344u32, at(0x10_0ff8)).unwrap();
    assert_eq!(view.read_obj::<u64>(at(0x10_0ffc)).unwrap(), 0);
    assert_eq!(view.load::<u32>(at(0x10_0ff8), Ordering::Relaxed).unwrap(), 0x1122_3344);
    assert_eq!(memory.ram().read_obj::<u32>(at(0x7ff8)).unwrap(), 0x1122_3344);
    view.read_slice(&mut [0; 16], at(u64::MAX - 15)).unwrap();
    assert_eq!(stopped(&relay), []);
    assert!(view.write_obj(1u64, at(0x10_0ffc)).is_err());
    assert!(view.store(1u16, at(0x10_1000), Ordering::Relaxed).is_err());
    assert!(view.read_obj::<u64>(at(0x10_2000)).is_err());
    assert!(view.read_slice(&mut [0; 17], at(u64::MAX - 15)).is_err());
    assert!(!view.check_range(at(0x10_0000), 0x2000, Access::Write));
    assert!(view.check_range(at(0x10_0000), 0x2000, Access::Read));
    let (read, write) = (Permissions::READ, Permissions::WRITE);
    let expected = [(0x10_1000, write), (0x10_1000, write), (0x10_2000, read), (u64::MAX, read), (0x10_1000, write)];
    assert_eq!(stopped(&relay), expected);
}

#[test]
fn unmap_waits_for_an_open_view() {
    let (table, _relay) = rig();
    assert!(table.insert(0, 0x1000, Backing::Ram(0), RW));
    let table = Arc::new(table);
    let memory = DeviceMemory::mapped(table.clone());
    let view = memory.view();
    let (done, is_done) = channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            table.remove(0, 0x1000, |_, _| {}).unwrap();
            done.send(()).unwrap();
        });
        assert!(is_done.recv_timeout(Duration::from_millis(50)).is_err(), "the UNMAP did not wait for the view");
        view.write_obj(1u8, GuestAddress(0)).unwrap();
        drop(view);
        is_done.recv_timeout(Duration::from_secs(60)).unwrap();
    });
    assert!(memory.view().write_obj(1u8, GuestAddress(0)).is_err());
}

/// Owner that ends a cancelled operation on a separate thread, like a completion by the kernel. If `deaf` is true, the owner ignores
/// cancellation.
#[derive(Default)]
struct Disk {
    running: Mutex<Vec<HostIo>>,
    cancelled: Mutex<Vec<u64>>,
    given_up: AtomicBool,
    deaf: bool,
}

impl IoOwner for Disk {
    fn cancel(&self, number: u64) {
        lock(&self.cancelled).push(number);
        if !self.deaf {
            let ended = lock(&self.running).extract_if(.., |io| io.number() == number).collect::<Vec<_>>();
            thread::spawn(move || {
                thread::sleep(Duration::from_millis(10));
                drop(ended);
            });
        }
    }
    fn give_up(&self) {
        self.given_up.store(true, Ordering::SeqCst);
    }
}

impl Disk {
    fn begin(self: &Arc<Self>, memory: &DeviceMemory, parts: &[(u64, usize)]) -> Option<u64> {
        let io = memory.begin_io(parts, Permissions::WRITE, self)?;
        let number = io.number();
        lock(&self.running).push(io);
        Some(number)
    }
}

fn rig_of_two_pages() -> (Arc<DmaTable>, DeviceMemory, FaultRelay) {
    let (table, relay) = rig();
    assert!(table.insert(0x1000, 0x1000, Backing::Ram(0x7000), RW));
    assert!(table.insert(0x2000, 0x1000, Backing::Ram(0x1_0000), RW));
    let table = Arc::new(table);
    (table.clone(), DeviceMemory::mapped(table), relay)
}

#[test]
fn kernel_io_gets_host_ranges_in_order() {
    let (table, memory, relay) = rig_of_two_pages();
    let disk = Arc::new(Disk::default());
    let io = memory.begin_io(&[(0x1800, 0x1000), (0x1000, 1), (0x1000, 0)], RW, &disk).unwrap();
    let address = |gpa| table.ram.get_host_address(GuestAddress(gpa)).unwrap().addr();
    let expected = [(address(0x7800), 0x800), (address(0x1_0000), 0x800), (address(0x7000), 1)];
    assert_eq!(io.ranges().iter().map(|range| (range.address, range.len)).collect::<Vec<_>>(), expected);
    assert!(memory.begin_io(&[(0x1000, 1), (0x2fff, 2)], RW, &disk).is_none());
    assert_eq!(stopped(&relay), [(0x3000, RW)]);
}

#[test]
fn unmap_cancels_kernel_io_and_waits_for_its_end() {
    let (table, memory, _relay) = rig_of_two_pages();
    let disk = Arc::new(Disk::default());
    let other = disk.begin(&memory, &[(0x1000, 16)]).unwrap();
    let number = disk.begin(&memory, &[(0x2ff0, 16)]).unwrap();
    table.remove(0x2000, 0x1000, |_, _| {}).unwrap();
    assert_eq!(*lock(&disk.cancelled), [number], "other operations are not cancelled");
    assert_eq!(lock(&disk.running).iter().map(HostIo::number).collect::<Vec<_>>(), [other]);
    assert!(!disk.given_up.load(Ordering::SeqCst));
    assert!(disk.begin(&memory, &[(0x2000, 1)]).is_none());
    // Break the reference cycle between the disk and its running operation.
    lock(&disk.running).clear();
}

#[test]
fn unmap_with_stuck_kernel_io_fails_and_denies_access() {
    let (table, memory, _relay) = rig_of_two_pages();
    let disk = Arc::new(Disk { deaf: true, ..Disk::default() });
    disk.begin(&memory, &[(0x2000, 16)]).unwrap();
    let remove = || table.remove_within(0x1000, 0x2000, Duration::from_millis(20), |_, _| {});
    assert_eq!(remove(), Err(RemoveError::Busy));
    assert!(disk.given_up.load(Ordering::SeqCst));
    for iova in [0x1000u64, 0x2000] {
        assert!(memory.view().write_obj(1u8, GuestAddress(iova)).is_err(), "{iova:#x} is still accessible");
        assert!(disk.begin(&memory, &[(iova, 1)]).is_none());
    }
    assert_eq!(remove(), Err(RemoveError::Busy), "the UNMAP must not succeed while the operation runs");
    lock(&disk.running).clear();
    assert_eq!(remove(), Ok(()));
    assert_eq!(table.count(), 0);
}

#[test]
fn stuck_operation_delays_only_the_first_unmap_at_any_iova() {
    let (table, memory, _relay) = rig_of_two_pages();
    let disk = Arc::new(Disk { deaf: true, ..Disk::default() });
    disk.begin(&memory, &[(0x1000, 16), (0x2000, 16)]).unwrap();
    let remove = |iova, limit| table.remove_within(iova, 0x1000, limit, |_, _| {});
    assert_eq!(remove(0x1000, Duration::from_millis(20)), Err(RemoveError::Busy));
    let cancelled = lock(&disk.cancelled).len();
    for iova in [0x1000, 0x2000, 0x1000] {
        assert_eq!(remove(iova, Duration::from_secs(3600)), Err(RemoveError::Busy));
    }
    assert_eq!(lock(&disk.cancelled).len(), cancelled, "an operation is cancelled only once");
    lock(&disk.running).clear();
    assert_eq!((remove(0x1000, Duration::ZERO), remove(0x2000, Duration::ZERO)), (Ok(()), Ok(())));
}

#[test]
fn operation_that_outlives_its_table_keeps_a_devices_memory() {
    let (table, _relay, device, mapped) = rig_with_device();
    let slice = device.part(0x1000, 0x1000).unwrap();
    let backing = table.insert_slice(0x1000, &slice, RW).unwrap();
    assert_eq!(backing, Backing::Device { range: device.host().address, offset: 0x1000 });
    let table = Arc::new(table);
    let memory = DeviceMemory::mapped(table.clone());
    let disk = Arc::new(Disk { deaf: true, ..Disk::default() });
    let io = memory.begin_io(&[(0x1800, 16)], RW, &disk).unwrap();
    assert_eq!(io.ranges()[0].address, device.host().address + 0x1800);
    assert_eq!(table.remove_within(0x1000, 0x1000, Duration::ZERO, |_, _| {}), Err(RemoveError::Busy));
    drop((memory, table, device));
    assert!(mapped.upgrade().is_some());
    drop(io);
    assert!(mapped.upgrade().is_none());
}

proptest! {
    /// Compares the table with a model that tracks each page. After any sequence of MAPs and UNMAPs, the table must allow the same
    /// accesses, and an access must read the right bytes.
    #[test]
    fn table_matches_a_page_by_page_model(
        // Pages 8 to 11 are device memory.
        steps in prop::collection::vec((0u64..8, 1u64..4, 0u64..12, 1u32..4, any::<bool>()), 1..30),
        (iova, len, write) in (0u64..0x8000, 0usize..0x3000, any::<bool>()),
    ) {
        let (table, _relay, device, _) = rig_with_device();
        for page in 0..8u8 {
            table.ram.write_slice(&[page + 1; 0x1000], GuestAddress(u64::from(page) << 12)).unwrap();
        }
        for page in 0..4u8 {
            device.pages(usize::from(page) << 12, 0x1000).unwrap().write_slice(&[page + 9; 0x1000], 0).unwrap();
        }
        let mut model: [Option<(u64, u64, Permissions)>; 16] = [None; 16];
        for (page, pages, at, bits, removes) in steps {
            let all = usize::try_from(page).unwrap()..usize::try_from(page + pages).unwrap();
            if removes {
                let starts = model[all.start].is_some_and(|(start, ..)| start == page);
                let ends = model[all.end - 1].is_some() && model[all.end].is_none_or(|(start, ..)| start == page + pages);
                let whole = starts && ends && model[all.clone()].iter().all(Option::is_some);
                prop_assert_eq!(remove(&table, page << 12, pages << 12).is_some(), whole);
                if whole {
                    model[all].fill(None);
                }
            } else if at + pages <= if at < 8 { 8 } else { 12 } {
                let permissions = Permissions::from_bits_truncate(bits);
                let free = model[all.clone()].iter().all(Option::is_none);
                let len = usize::try_from(pages << 12).unwrap();
                let slice = match at.checked_sub(8) {
                    None => table.ram.get_slice(GuestAddress(at << 12), len).unwrap(),
                    Some(at) => device.part(usize::try_from(at << 12).unwrap(), len).unwrap(),
                };
                prop_assert_eq!(table.insert_slice(page << 12, &slice, permissions).is_ok(), free);
                if free {
                    for (step, place) in model[all].iter_mut().enumerate() {
                        *place = Some((page, at + step as u64, permissions));
                    }
                }
            }
        }
        let access = if write { Permissions::WRITE } else { Permissions::READ };
        let page = |at: u64| model[usize::try_from(at >> 12).unwrap()];
        let allowed = (iova..iova + len as u64).all(|at| page(at).is_some_and(|(.., has)| has.contains(access)));
        let mut data = vec![0; len];
        if write {
            prop_assert_eq!(table.write(iova, &data), allowed);
        } else {
            prop_assert_eq!(table.read(iova, &mut data), allowed);
            if allowed {
                let right = |(byte, at): (&u8, u64)| u64::from(*byte) == page(at).unwrap().1 + 1;
                prop_assert!(data.iter().zip(iova..).all(right));
            }
        }
    }
}
