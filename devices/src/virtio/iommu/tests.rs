// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the whole device. The tests act as the driver, and use the PCI function, the engine, the window memory, and a mapper that
//! records its calls.

mod devices;
mod faults;
mod hostile;
mod interrupt;
mod polling;
mod rings;
mod state;
mod violations;
mod windows;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use iommu_bounce::spec::{MAX_MAP_RANGES, MAX_REQUEST, Status, feature};
use iommu_bounce::test_utils::{MapperProbe, RecordingMapper, attach, map, map_list, probe, unmap, window_add};
use iommu_bounce::{DmaMapper, EngineConfig, Limits, MapError, MapperLimits, Permissions, UnmapError, WindowConfig};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, VolatileSlice};

use super::{IommuHandle, IommuParams, IommuStatus, RingFeatures, WindowRegion, create};
use crate::pci::PciDevice;
use crate::pci::regs::{COMMAND, COMMAND_BUS_MASTER, COMMAND_MEMORY};
use crate::ram::Ram;
use crate::virtio::VirtioPciDevice;
use crate::virtio::byte_driver::set_up;
use crate::virtio::test_support::{FakeMsi, FakeSlots};

const RAM: usize = 4 << 20;
const CHUNK: u64 = 2 << 20;
/// Maximum size of one host mapping in bytes. The engine splits larger mappings.
const PIECE: u64 = 1 << 20;
const APERTURE: u64 = 0xd000_0000;
const BAR: u64 = 0x80_0000_0000;
const ENDPOINT: u32 = 0x28;
const NEEDS_RESET: u8 = 64;

/// Offsets in BAR 0.
const STATUS: u64 = 20;
const DEVICE_CONFIG: u64 = 0x2000;
const NOTIFY: u64 = 0x3000;

/// Size and addresses of the driver's request queue.
const QUEUE_SIZE: u16 = 16;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const BUFFERS: u64 = 0x10_0000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Descriptor: address, length, flags and next.
type Descriptor = (u64, u32, u16, u16);

struct Guest {
    memory: Arc<Ram>,
    function: Arc<VirtioPciDevice>,
    handle: Arc<IommuHandle>,
    slots: Arc<FakeSlots>,
    msi: Arc<FakeMsi>,
    mapper: MapperProbe,
    available: u16,
    /// True if the driver has accepted `EVENT_IDX`.
    event_idx: bool,
}

fn params(memory: &Arc<Ram>, msi: &Arc<FakeMsi>, slots: &Arc<FakeSlots>, windows: bool) -> IommuParams {
    let aperture = APERTURE..=APERTURE + 16 * CHUNK - 1;
    let window = windows.then_some(WindowConfig { aperture, budget: 4 * CHUNK, threshold: 0, threshold_write: 0 });
    IommuParams {
        id: "_iommu".into(),
        memory: memory.clone(),
        msi: msi.clone(),
        engine: EngineConfig {
            window,
            limits: Limits { max_step: PIECE, ..Limits::default() },
            ..EngineConfig::default()
        },
        windows: windows.then(|| WindowRegion {
            size: 8 * CHUNK,
            chunk_size: CHUNK,
            hugepages: false,
            slots: slots.clone(),
        }),
        poll: false,
        rings: RingFeatures { indirect_desc: true, event_idx: true },
        devices: None,
        mmio: false,
        observer: None,
    }
}

impl Guest {
    /// Returns a device with one endpoint and no driver.
    fn new(windows: bool) -> Self {
        Self::with(windows, false)
    }

    /// Does the same as [`new`](Self::new). If `poll` is true, a thread may poll for requests.
    fn with(windows: bool, poll: bool) -> Self {
        Self::made(windows, poll, &[(0, RAM)])
    }

    /// Returns a device without windows, for a VM with RAM at these addresses.
    fn of(ram: &[(u64, usize)]) -> Self {
        Self::made(false, false, ram)
    }

    fn made(windows: bool, poll: bool, ram: &[(u64, usize)]) -> Self {
        let ranges: Vec<_> = ram.iter().map(|(at, len)| (GuestAddress(*at), *len)).collect();
        let memory = Arc::new(Ram::from_ranges(&ranges).unwrap());
        let (msi, slots) = (Arc::new(FakeMsi::default()), Arc::new(FakeSlots::default()));
        let params = IommuParams { poll, ..params(&memory, &msi, &slots, windows) };
        let (function, handle) = create(params).unwrap();
        let mapper = RecordingMapper::new();
        let probe = mapper.probe();
        handle.add_endpoint(ENDPOINT, Box::new(mapper)).unwrap();
        if windows {
            function.bar_moved(2, BAR).unwrap();
        }
        function.write_config(COMMAND, &(COMMAND_BUS_MASTER | COMMAND_MEMORY).to_le_bytes());
        Self { memory, function, handle, slots, msi, mapper: probe, available: 0, event_idx: false }
    }

    /// Returns a device with a running driver that has accepted `features`.
    fn running(features: u64) -> Self {
        let mut guest = Self::new(features & feature::ANY_BOUNCE_WINDOW != 0);
        guest.start(features);
        guest
    }

    fn start(&mut self, features: u64) {
        self.start_with(features, None);
    }

    /// Does the same as [`start`](Self::start), with the request queue's rings at `rings`.
    fn start_in(&mut self, features: u64, rings: [u64; 3]) {
        self.start_all(features, rings, None);
    }

    /// Does the same as [`start`](Self::start). If `events` contains ring addresses, the driver also sets up an event queue of size 4
    /// there.
    fn start_with(&mut self, features: u64, events: Option<[u64; 3]>) {
        self.start_all(features, [DESCRIPTORS, AVAILABLE, USED], events);
    }

    fn start_all(&mut self, features: u64, rings: [u64; 3], events: Option<[u64; 3]>) {
        self.available = 0;
        self.event_idx = features & EVENT_IDX != 0;
        self.memory.write_slice(&[0; 0x100], GuestAddress(AVAILABLE)).unwrap();
        self.memory.write_slice(&[0; 0x100], GuestAddress(USED)).unwrap();
        // The driver wants no interrupts, like Linux's driver.
        self.memory.write_obj(1u16, GuestAddress(AVAILABLE)).unwrap();
        // Select the request queue, and set its MSI-X vector to 1.
        self.write(22, &0u16.to_le_bytes());
        self.write(26, &1u16.to_le_bytes());
        let events = events.map(|rings| (1, 4, rings));
        set_up(&self.function, features, [(0, QUEUE_SIZE, rings)].into_iter().chain(events));
        assert_eq!(self.status(), 15);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.function.write_bar(0, offset, data);
    }
    fn status(&self) -> u8 {
        let mut status = [0];
        self.function.read_bar(0, STATUS, &mut status);
        status[0]
    }
    fn config_u64(&self, offset: u64) -> u64 {
        let mut data = [0; 8];
        self.function.read_bar(0, DEVICE_CONFIG + offset, &mut data);
        u64::from_le_bytes(data)
    }
    /// Enables MSI-X vector 1, the vector of the request queue.
    fn enable_vector(&self) {
        self.function.write_bar(0, 0x4000 + 16, &0xfee0_0000u64.to_le_bytes());
        self.function.write_bar(0, 0x4000 + 28, &[0; 4]);
        for offset in (0x40..0x100u16).step_by(4) {
            let mut header = [0; 4];
            self.function.read_config(offset, &mut header);
            if header[0] == crate::pci::regs::CAP_MSIX {
                self.function.write_config(offset + 2, &crate::pci::CONTROL_ENABLE.to_le_bytes());
                break;
            }
        }
    }
    fn kick(&self) {
        self.write(NOTIFY, &[0, 0]);
    }
    fn describe(&self, index: u16, (address, len, flags, next): Descriptor) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.memory.write_slice(&bytes, GuestAddress(DESCRIPTORS + 16 * u64::from(index))).unwrap();
    }
    fn make_available(&mut self, head: u16) {
        let place = AVAILABLE + 4 + 2 * u64::from(self.available % QUEUE_SIZE);
        self.memory.write_obj(head, GuestAddress(place)).unwrap();
        self.available = self.available.wrapping_add(1);
        self.memory.write_obj(self.available, GuestAddress(AVAILABLE + 2)).unwrap();
    }
    fn used_index(&self) -> u16 {
        self.memory.read_obj(GuestAddress(USED + 2)).unwrap()
    }
    /// Returns the head index and length of the last used element.
    fn last_used(&self) -> (u32, u32) {
        let index = u64::from(self.used_index().wrapping_sub(1) % QUEUE_SIZE);
        let element = GuestAddress(USED + 4 + 8 * index);
        (
            self.memory.read_obj(element).unwrap(),
            self.memory.read_obj(element.0.checked_add(4).map(GuestAddress).unwrap()).unwrap(),
        )
    }

    /// Sends a request. `pieces` contains the sizes of the readable buffers, and `replies` contains the sizes of the writable buffers.
    /// Returns the used length and the content of the writable buffers.
    fn send_split(&mut self, request: &[u8], pieces: &[u32], replies: &[u32]) -> (u32, Vec<u8>) {
        self.memory.write_slice(request, GuestAddress(BUFFERS)).unwrap();
        let len: u32 = replies.iter().sum();
        // Each writable buffer is in its own page, so that a write beyond the buffer is detected.
        self.memory.write_slice(&vec![0xcc; 0x1000 * (replies.len() + 1)], GuestAddress(2 * BUFFERS)).unwrap();
        let readable = pieces.iter().scan(BUFFERS, |at, len| {
            *at += u64::from(*len);
            Some((*at - u64::from(*len), *len, 0))
        });
        let writable = replies.iter().zip(0u64..).map(|(len, page)| (2 * BUFFERS + 0x1000 * page, *len, WRITE));
        let all: Vec<_> = readable.chain(writable).collect();
        for (index, (address, len, flags)) in (0u16..).zip(&all) {
            let more = usize::from(index) + 1 < all.len();
            self.describe(index, (*address, *len, flags | if more { NEXT } else { 0 }, index + 1));
        }
        let before = self.used_index();
        self.make_available(0);
        self.kick();
        assert_eq!(self.used_index(), before.wrapping_add(1), "the request was not answered");
        let (head, used) = self.last_used();
        assert_eq!(head, 0);
        assert!(used <= len);
        let mut reply = Vec::new();
        for (page, len) in (0u64..).zip(replies) {
            let mut piece = vec![0; usize::try_from(*len).unwrap()];
            let mut behind = [0; 1];
            let address = 2 * BUFFERS + 0x1000 * page;
            self.memory.read_slice(&mut piece, GuestAddress(address)).unwrap();
            self.memory.read_slice(&mut behind, GuestAddress(address + u64::from(*len))).unwrap();
            assert_eq!(behind, [0xcc], "written beyond a buffer");
            reply.extend(piece);
        }
        (used, reply)
    }

    fn send(&mut self, request: &[u8], reply: u32) -> (u32, Vec<u8>) {
        self.send_split(request, &[u32::try_from(request.len()).unwrap()], &[reply])
    }

    /// Sends a request whose writable part is only a tail. Returns the status.
    fn simple(&mut self, request: &[u8]) -> u8 {
        let (used, reply) = self.send(request, 4);
        assert_eq!(used, 4);
        reply[0]
    }
}

const OK: u8 = Status::Ok as u8;
const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const BASIC: u64 = feature::INPUT_RANGE | feature::DOMAIN_RANGE | feature::MAP_UNMAP | feature::PROBE;

#[test]
fn longest_map_list_is_served_in_one_buffer_or_in_several() {
    let mut guest = Guest::running(BASIC | feature::MAP_LIST);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    let ranges = vec![(0x8000, 0x1000); MAX_MAP_RANGES];
    let request = map_list(1, 0x10_0000, 1, &ranges);
    assert_eq!(request.len(), MAX_REQUEST);
    for pieces in [&[4120][..], &[24, 4096], &[1000, 1, 3119]] {
        let (used, reply) = guest.send_split(&request, pieces, &[4]);
        assert_eq!((used, reply[0]), (4, OK), "{pieces:?}");
        assert!(guest.mapper.translate(0x1f_ffff).is_some(), "the last range is not mapped");
        assert_eq!(guest.handle.counters().mapped_bytes, 0x10_0000);
        assert_eq!(guest.simple(&unmap(1, 0x10_0000, 0x1f_ffff)), OK);
    }
    let too_long = map_list(1, 0x10_0000, 1, &vec![(0x8000, 0x1000); MAX_MAP_RANGES + 1]);
    assert_eq!(guest.simple(&too_long), Status::Inval as u8);
    assert_eq!(guest.simple(&request[..request.len() - 1]), Status::Inval as u8);
    assert!(guest.mapper.is_empty());
}

#[test]
fn guest_maps_and_unmaps_through_the_queue() {
    let mut guest = Guest::running(BASIC);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    assert_eq!(guest.simple(&map(1, 0x1000, 0x2fff, 0x8000, 1)), OK);
    let (_, permissions) = guest.mapper.translate(0x2000).unwrap();
    assert_eq!(permissions, Permissions::READ);
    assert_eq!(guest.handle.counters().mapped_bytes, 0x2000);
    assert_eq!(guest.simple(&unmap(1, 0x1000, 0x2fff)), OK);
    assert!(guest.mapper.is_empty());
}

#[test]
fn withdrawn_ram_is_unmapped_and_cannot_be_mapped_again() {
    const LATER: u64 = 1 << 32;
    let mut guest = Guest::of(&[(0, RAM), (LATER, RAM)]);
    guest.start(BASIC);
    let memory = guest.memory.clone();
    let region = memory.iter().last().unwrap();
    for request in [attach(ENDPOINT, 1), map(1, 0, 0xfff, LATER, 3), map(1, 0x1000, 0x1fff, 0x8000, 3)] {
        assert_eq!(guest.simple(&request), OK);
    }
    assert!(memory.withdraw(GuestAddress(LATER)) && guest.handle.take_ram(region));
    assert_eq!(guest.mapper.mappings().into_keys().collect::<Vec<_>>(), [0x1000]);
    assert_eq!(guest.simple(&map(1, 0, 0xfff, LATER, 3)), Status::Inval as u8, "the address is no longer RAM");
}

/// Mapper that calls `status_soon` during each map call.
struct Asking {
    device: Weak<IommuHandle>,
    refused: Arc<AtomicUsize>,
    mapper: RecordingMapper,
}

impl DmaMapper for Asking {
    fn map(&mut self, iova: u64, memory: VolatileSlice<'_>, permissions: Permissions) -> Result<(), MapError> {
        if self.device.upgrade().unwrap().status_soon().is_none() {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        self.mapper.map(iova, memory, permissions)
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError> {
        self.mapper.unmap(iova, len)
    }

    fn keeps_page_tables(&self) -> bool {
        self.mapper.keeps_page_tables()
    }

    fn limits(&self) -> MapperLimits {
        self.mapper.limits()
    }
}

#[test]
fn status_soon_fails_only_during_a_mapping() {
    for features in [BASIC, BASIC | feature::BOUNCE_WINDOW] {
        let mut guest = Guest::running(features);
        let (device, refused) = (Arc::downgrade(&guest.handle), Arc::new(AtomicUsize::new(0)));
        let asking = Asking { device, refused: refused.clone(), mapper: RecordingMapper::new() };
        guest.handle.add_endpoint(ENDPOINT + 8, Box::new(asking)).unwrap();
        assert_eq!(guest.simple(&attach(ENDPOINT + 8, 1)), OK);
        assert_eq!(guest.simple(&map(1, 0x1000, 0x2fff, 0x8000, 1)), OK);
        assert_eq!(refused.load(Ordering::Relaxed), 1);
        // The thread that allocates window memory ahead of requests sometimes holds the lock, so retry. The thread also changes the number
        // of allocated bytes, so do not compare this number.
        let soon = (0..1_000_000).find_map(|_| {
            thread::yield_now();
            guest.handle.status_soon()
        });
        let (soon, status) = (soon.unwrap(), guest.handle.status());
        assert_eq!(soon.counters.mapped_bytes, 0x2000);
        let soon = IommuStatus { held_window_bytes: status.held_window_bytes, ..soon };
        assert_eq!(format!("{soon:?}"), format!("{status:?}"));
    }
}

#[test]
fn request_may_be_split_any_way() {
    let mut guest = Guest::running(BASIC);
    let request = attach(ENDPOINT, 7);
    let pieces: [&[u32]; 4] = [&[20], &[4, 16], &[0, 1, 0, 18, 1], &[1, 1, 1, 1, 1, 1, 1, 1, 1, 11]];
    for pieces in pieces {
        for replies in [&[4u32] as &[u32], &[1, 3], &[0, 1, 1, 0, 2]] {
            let (used, reply) = guest.send_split(&request, pieces, replies);
            assert_eq!((used, reply.as_slice()), (4, &[0, 0, 0, 0][..]), "{pieces:?} {replies:?}");
        }
    }
    assert_eq!(guest.handle.counters().requests.attach, 12);
}

#[test]
fn probe_answers_the_whole_writable_part() {
    let mut guest = Guest::running(BASIC);
    let (used, reply) = guest.send_split(&probe(ENDPOINT), &[4, 68], &[100, 412, 4]);
    assert_eq!(used, 516);
    assert_eq!(reply[512..], [OK, 0, 0, 0]);
    assert_ne!(reply[..4], [0; 4], "no property");
}

#[test]
fn request_of_the_wrong_length_does_no_harm() {
    let mut guest = Guest::running(BASIC);
    let mut long = attach(ENDPOINT, 1);
    long.resize(0x2000, 0);
    let (used, reply) = guest.send(&long, 4);
    assert_eq!((used, reply[0]), (4, OK), "bytes after a request are ignored");
    let (_, reply) = guest.send(&attach(ENDPOINT, 1)[..19], 4);
    assert_eq!(reply[0], Status::Inval as u8);
    let (used, _) = guest.send(&[9, 9], 4);
    assert_eq!(used, 0);
    let (used, _) = guest.send(&attach(ENDPOINT, 1), 0);
    assert_eq!(used, 0);
    assert!(guest.handle.counters().requests.invalid >= 3);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
}

#[test]
fn batch_is_served_in_one_notification() {
    let mut guest = Guest::running(BASIC);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    for turn in 0u16..8 {
        let iova = 0x1000 * u64::from(turn);
        let at = BUFFERS + 0x100 * u64::from(turn);
        guest.memory.write_slice(&map(1, iova, iova + 0xfff, 0x8000, 3), GuestAddress(at)).unwrap();
        guest.describe(2 * turn, (at, 36, NEXT, 2 * turn + 1));
        guest.describe(2 * turn + 1, (at + 0x80, 4, WRITE, 0));
        guest.make_available(2 * turn);
    }
    let before = guest.used_index();
    guest.kick();
    assert_eq!(guest.used_index().wrapping_sub(before), 8);
    assert_eq!(guest.mapper.mappings().len(), 8);
    assert_eq!(guest.last_used(), (14, 4));
}

/// Sends several requests with one notification. Each request has its own 0x100 bytes of memory. Returns the statuses.
fn batch(guest: &mut Guest, requests: &[Vec<u8>]) -> Vec<u8> {
    for (turn, request) in (0u16..).zip(requests) {
        let at = BUFFERS + 0x100 * u64::from(turn);
        guest.memory.write_slice(request, GuestAddress(at)).unwrap();
        guest.memory.write_slice(&[0xcc; 8], GuestAddress(at + 0x80)).unwrap();
        let len = u32::try_from(request.len()).unwrap();
        guest.describe(2 * turn, (at, len, NEXT, 2 * turn + 1));
        guest.describe(2 * turn + 1, (at + 0x80, 4, WRITE, 0));
        guest.make_available(2 * turn);
    }
    let before = guest.used_index();
    guest.kick();
    let count = u16::try_from(requests.len()).unwrap();
    assert_eq!(guest.used_index().wrapping_sub(before), count);
    let status = |turn: u64| {
        let mut reply = [0; 5];
        guest.memory.read_slice(&mut reply, GuestAddress(BUFFERS + 0x100 * turn + 0x80)).unwrap();
        assert_eq!(reply[1..], [0, 0, 0, 0xcc]);
        reply[0]
    };
    (0..u64::from(count)).map(status).collect()
}

#[test]
fn adjacent_unmaps_in_a_batch_merge_and_answer_in_order() {
    let mut guest = Guest::running(BASIC);
    let page = |page: u64| (0x1000 * page, 0x1000 * page + 0xfff);
    let maps = (0..6).map(|n| map(1, page(n).0, page(n).1, 0x8000, 3));
    let statuses = batch(&mut guest, &[attach(ENDPOINT, 1)].into_iter().chain(maps).collect::<Vec<_>>());
    assert_eq!(statuses, [OK; 7]);
    // Pages 3 and 4 are adjacent, but the MAP comes between their UNMAPs. So the engine merges only the UNMAPs of pages 5 and 4.
    let one = |n| unmap(1, page(n).0, page(n).1);
    let requests = [one(3), one(0), map(1, 0x10_0000, 0x10_0fff, 0x8000, 3), one(9), one(5), one(4), one(0x100)];
    assert_eq!(batch(&mut guest, &requests), [OK; 7]);
    assert_eq!(guest.last_used(), (12, 4));
    let counters = guest.handle.counters();
    assert_eq!((counters.host_unmaps, counters.merged_unmaps), (4, 1));
    assert_eq!(guest.mapper.mappings().keys().copied().collect::<Vec<_>>(), [0x1000, 0x2000]);
    assert_eq!(batch(&mut guest, &[one(1), unmap(7, 0, 0xfff), one(2)]), [OK, Status::NoEnt as u8, OK]);
    assert!(guest.mapper.is_empty());
}

#[test]
fn unmaps_in_front_of_a_broken_chain_are_served() {
    let mut guest = Guest::running(BASIC);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    assert_eq!(guest.simple(&map(1, 0, 0xfff, 0x8000, 3)), OK);
    guest.memory.write_slice(&unmap(1, 0, 0xfff), GuestAddress(BUFFERS)).unwrap();
    guest.describe(0, (BUFFERS, 28, NEXT, 1));
    guest.describe(1, (BUFFERS + 0x80, 4, WRITE, 0));
    guest.make_available(0);
    guest.describe(2, (BUFFERS, 28, NEXT, 2));
    guest.make_available(2);
    let before = guest.used_index();
    guest.kick();
    assert_ne!(guest.status() & NEEDS_RESET, 0);
    assert_eq!(guest.used_index().wrapping_sub(before), 1);
    assert!(guest.mapper.is_empty());
}

#[test]
fn unmap_reply_may_be_split_but_must_be_in_memory() {
    let mut guest = Guest::running(BASIC);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    let request = unmap(1, 0, 0xfff);
    for replies in [&[4u32] as &[u32], &[1, 3], &[0, 4], &[9]] {
        let (used, reply) = guest.send_split(&request, &[28], replies);
        assert_eq!((used, &reply[..4]), (4, &[0, 0, 0, 0][..]), "{replies:?}");
    }
    guest.memory.write_slice(&request, GuestAddress(BUFFERS)).unwrap();
    guest.describe(0, (BUFFERS, 28, NEXT, 1));
    guest.describe(1, (RAM as u64 - 3, 4, WRITE, 0));
    guest.make_available(0);
    guest.kick();
    assert_ne!(guest.status() & NEEDS_RESET, 0);
}

#[test]
fn interrupt_comes_only_if_the_driver_wants_it() {
    let mut guest = Guest::running(BASIC);
    let vectors = guest.msi.vectors();
    guest.enable_vector();
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    assert_eq!(vectors.raised(1), 0);
    guest.memory.write_obj(0u16, GuestAddress(AVAILABLE)).unwrap();
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    assert_eq!(vectors.raised(1), 1);
    guest.kick();
    assert_eq!(vectors.raised(1), 1, "nothing was used");
}

#[test]
fn reset_unmaps_everything() {
    let mut guest = Guest::running(BASIC);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    assert_eq!(guest.simple(&map(1, 0, 0xfff, 0x8000, 3)), OK);
    guest.write(STATUS, &[0]);
    assert!(guest.mapper.is_empty());
    guest.kick();
    guest.start(BASIC);
    assert_eq!(guest.simple(&map(1, 0, 0xfff, 0x8000, 3)), Status::NoEnt as u8);
}

#[test]
fn plain_device_offers_no_window() {
    let guest = Guest::running(BASIC);
    guest.write(0, &0u32.to_le_bytes());
    let mut features = [0; 4];
    guest.function.read_bar(0, 4, &mut features);
    assert_eq!(
        u64::from(u32::from_le_bytes(features)),
        BASIC | feature::BYPASS_CONFIG | feature::MAP_LIST | INDIRECT_DESC | EVENT_IDX
    );
    assert!(guest.function.bars().iter().all(|bar| bar.index < 2), "no BAR for a shared region");
    assert_eq!(guest.config_u64(40), 0);
    assert!(guest.handle.set_budget(CHUNK).is_err());
    assert!(guest.handle.set_threshold(1).is_err());
    assert!(guest.handle.set_threshold_write(1).is_err());
    assert_eq!(guest.handle.held_window_bytes(), 0);
}

#[test]
fn driver_writes_bypass_and_nothing_else() {
    let guest = Guest::running(BASIC | feature::BYPASS_CONFIG);
    let before = guest.config_u64(0);
    guest.write(DEVICE_CONFIG, &[0xff; 8]);
    assert_eq!(guest.config_u64(0), before);
    guest.write(DEVICE_CONFIG + 36, &[1]);
    assert_eq!(guest.config_u64(32) >> 32, 1);
    let ram: Vec<_> = guest.mapper.mappings().iter().map(|(iova, mapping)| (*iova, mapping.len)).collect();
    assert_eq!(ram, (0..RAM as u64).step_by(1 << 20).map(|iova| (iova, PIECE)).collect::<Vec<_>>());
    // The driver may also write `bypass` with an access that covers other fields.
    guest.write(DEVICE_CONFIG + 32, &[0; 8]);
    assert_eq!(guest.config_u64(32) >> 32, 0);
    assert!(guest.mapper.is_empty());
}

#[test]
fn bypass_is_not_writable_without_the_feature() {
    let guest = Guest::running(BASIC);
    guest.write(DEVICE_CONFIG + 36, &[1]);
    assert_eq!(guest.config_u64(32) >> 32, 0);
    assert!(guest.mapper.is_empty());
}
