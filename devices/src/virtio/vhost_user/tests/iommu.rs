// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A device behind the virtio-iommu: its server asks for translations, and forgets them.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iommu_bounce::{ChunkStore, DmaMapper, MapError, Permissions, UnmapError};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::super::connection::Times;
use super::super::device::VhostUserDevice;
use super::super::error::ServerError;
use super::super::link::Address;
use super::super::mapper::VhostUserMapper;
use super::super::model::Model;
use super::super::net::ServedNet;
use super::server::request::*;
use super::server::{Asked, BACKEND_REQ, MEM_SLOTS, MQ, Manner, REPLY_ACK, Server, Vice, message as message_of};
use super::support::{TIMES, Told, ram, reset, start_queue, wait};
use crate::dma::{DeviceMemory, DmaTable, FaultRelay, Stopped, fault_relay};
use crate::host_range::test_support::range;
use crate::host_range::{DeviceContent, DeviceRange, FilePlace};
use crate::ram::Ram;
use crate::shown::test_support::showing;
use crate::virtio::test_support::FakeSlots;
use crate::virtio::{Driver, VirtioDevice};
use crate::windows::{WindowMemory, WindowMemoryConfig};

const ENDPOINT: u32 = 24;
const READ_WRITE: Permissions = Permissions::READ.union(Permissions::WRITE);
/// Where the tests map something.
const IOVA: u64 = 0x7000_0000;

fn manner() -> Manner {
    Manner {
        features: 1 << 33 | 1 << 32 | 1 << 30,
        protocol: MQ | REPLY_ACK | MEM_SLOTS | BACKEND_REQ,
        ..Manner::default()
    }
}

/// A card behind the virtio-iommu.
struct Card {
    server: Server,
    device: VhostUserDevice,
    mapper: VhostUserMapper,
    ram: Arc<Ram>,
    told: Arc<Told>,
    faults: FaultRelay,
    /// The server's end of the channel for its requests.
    channel: UnixStream,
}

fn connect(server: &Server, table: Arc<DmaTable>, times: Times) -> Result<VhostUserDevice, ServerError> {
    let net = ServedNet { mac: [2; 6], mtu: None, pairs: 1, queue_size: 64, csum: true, tso: true, uso: true };
    let address = Address::new("d".into(), server.socket(), Model::net(&net), times, true);
    VhostUserDevice::connect(address, Some(table))
}

fn channel(asked: &[Asked]) -> UnixStream {
    let given = asked.iter().find(|one| one.request == SET_BACKEND_REQ_FD).expect("it gets a channel");
    let channel = UnixStream::from(given.files[0].try_clone().unwrap());
    channel.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    channel
}

impl Card {
    /// One whose driver has mapped its rings where they are, and is ready.
    fn new(manner: Manner) -> Self {
        Self::with_times(manner, Times::default())
    }

    /// The same, whose server has these times.
    fn with_times(manner: Manner, times: Times) -> Self {
        let (server, ram, (sender, faults)) = (Server::start(manner), ram(1), fault_relay());
        let table = Arc::new(DmaTable::new("d", ram.clone(), Some((ENDPOINT, sender))));
        let device = connect(&server, table.clone(), times).unwrap();
        let mapper = device.mapper(table.clone());
        let (channel, told) = (channel(&server.take()), Told::with_events(2));
        let mut card = Self { server, device, mapper, ram, told, faults, channel };
        card.map(0, 0, 0x1_0000, READ_WRITE);
        let features = card.device.features() | 1 << 33 | 1 << 32;
        let driver = Driver {
            requests: Arc::default(),
            memory: DeviceMemory::mapped(table),
            interrupt: card.told.clone(),
            features,
        };
        card.device.activate(driver);
        (0..2).for_each(|index| start_queue(&card.device, index, 0));
        card
    }

    fn map(&mut self, iova: u64, gpa: u64, len: usize, permissions: Permissions) {
        let slice = self.ram.get_slice(GuestAddress(gpa), len).unwrap();
        self.mapper.map(iova, slice, permissions).unwrap();
    }

    /// Asks for the translation of an access (1 to read, 2 to write), or says (`kind` 4) that it was stopped; whether that was done.
    fn ask(&mut self, iova: u64, access: u8, kind: u8) -> bool {
        self.channel.write_all(&message(iova, access, kind)).unwrap();
        let mut answer = [0; 20];
        self.channel.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..12], [1u32, 5, 8].map(u32::to_le_bytes).concat()[..]);
        answer[12..] == [0; 8]
    }

    fn faults(&self) -> Vec<(u64, Permissions)> {
        let of = |stopped: Stopped| (stopped.iova, stopped.access);
        self.faults.take().0.into_iter().map(of).collect()
    }
}

fn message(iova: u64, access: u8, kind: u8) -> Vec<u8> {
    let rest = [access, kind, 0, 0, 0, 0, 0, 0];
    [&[1u32, 9, 32].map(u32::to_le_bytes).concat(), &iova.to_le_bytes()[..], &[0; 16], &rest].concat()
}

/// What the server was told of translations: first IOVA, bytes, address, permissions and kind (2 to know, 3 to forget).
fn translations(asked: &[Asked]) -> Vec<(u64, u64, u64, u8, u8)> {
    let told = asked.iter().filter(|one| one.request == IOTLB_MSG);
    told.map(|one| (one.number(0), one.number(8), one.number(16), one.payload[24], one.payload[25])).collect()
}

#[test]
fn server_that_cannot_translate_is_refused_with_what_it_lacks() {
    let all = manner().protocol;
    for (features, protocol, reason) in [
        (1 << 32 | 1 << 30, all, "translates no addresses, as iommu=on needs it (VIRTIO_F_ACCESS_PLATFORM)"),
        (manner().features, all & !BACKEND_REQ, "for it (VHOST_USER_PROTOCOL_F_BACKEND_REQ)"),
        (manner().features, all & !REPLY_ACK, "for it (VHOST_USER_PROTOCOL_F_REPLY_ACK)"),
        (manner().features, all & !MEM_SLOTS, "for it (VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS)"),
    ] {
        let server = Server::start(Manner { features, protocol, ..Manner::default() });
        let table = Arc::new(DmaTable::new("d", ram(1), None));
        let error = connect(&server, table, Times::default()).err().unwrap().to_string();
        assert!(error.ends_with(reason), "{error}");
    }
}

#[test]
fn mapping_is_sent_on_a_miss_and_invalidated_by_unmap() {
    let mut card = Card::new(manner());
    card.map(IOVA, 0x8000, 0x2000, Permissions::WRITE);
    let asked = card.server.take();
    let accepted = asked.iter().find(|one| one.request == SET_FEATURES).unwrap().number(0);
    assert_eq!(accepted & 1 << 33, 1 << 33);
    assert_eq!(translations(&asked), [], "nothing is told that nobody asks for");

    assert!(card.ask(IOVA + 0x1234, 2, 1));
    card.mapper.unmap(IOVA, 0x2000).unwrap();
    let whole = (IOVA, 0x2000);
    let wanted = [(whole.0, whole.1, 0x8000, 2, 2), (whole.0, whole.1, 0, 0, 3)];
    assert_eq!(translations(&card.server.wait_for(IOTLB_MSG)), wanted);
    assert!(!card.ask(IOVA, 2, 1));
    assert_eq!(translations(&card.server.take()), []);

    // What the server never knew, it need not forget.
    card.map(IOVA, 0x8000, 0x1000, Permissions::READ);
    card.mapper.unmap(IOVA, 0x1000).unwrap();
    assert_eq!(translations(&card.server.take()), []);
    assert!(matches!(card.mapper.unmap(IOVA, 0x1000), Err(UnmapError::NotMapped)));
    assert!(card.told.failures().is_empty());
}

/// Bytes of a chunk.
const CHUNK: u64 = 4096;

fn windows() -> Arc<WindowMemory> {
    let config = WindowMemoryConfig {
        region_size: 8 * CHUNK,
        chunk_size: CHUNK,
        budget: 8 * CHUNK,
        hugepages: false,
        slots: Arc::new(FakeSlots::default()),
    };
    let windows = WindowMemory::new(&config).unwrap();
    windows.moved(0x40_0000_0000).unwrap();
    Arc::new(windows)
}

#[test]
fn window_chunk_is_a_server_memory_region_while_mapped() {
    let mut card = Card::new(Manner { regions: 2, ..manner() });
    let windows = windows();
    card.mapper.connect(Some(&windows), None);
    let mut store = windows.store();
    let index = store.back().unwrap();
    store.memory(index).unwrap().write_slice(b"of the window", 0).unwrap();
    card.server.take();
    card.mapper.map(IOVA, store.memory(index).unwrap(), READ_WRITE).unwrap();
    let mut asked = card.server.take();
    assert_eq!((asked.len(), asked[0].request), (1, ADD_MEM_REG));
    let (address, len) = (asked[0].number(24), asked[0].number(16));
    assert_eq!((address, len, asked[0].number(32)), (asked[0].number(8), CHUNK, 0));
    let mut bytes = [0; 13];
    File::from(asked[0].files.remove(0)).read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"of the window");
    assert!(address >= 1 << 52, "where no RAM can be");
    assert!(card.ask(IOVA + 1, 3, 1));
    assert_eq!(translations(&card.server.wait_for(IOTLB_MSG)), [(IOVA, CHUNK, address, 3, 2)]);

    // The server takes two regions, and the other one is RAM: the driver does without a second chunk.
    let other = store.back().unwrap();
    let refused = card.mapper.map(IOVA + CHUNK, store.memory(other).unwrap(), READ_WRITE);
    assert!(matches!(refused, Err(MapError::NoResources)), "{refused:?}");
    assert!(card.server.requests().is_empty());
    assert!(!card.ask(IOVA + CHUNK, 1, 1));

    // The next server gets the chunk that is mapped.
    card.server.close();
    wait(|| card.device.counters().server_losses == 1);
    card.server.listen(manner());
    let asked = card.server.wait_for(SET_VRING_KICK);
    assert_eq!(asked.iter().find(|one| one.request == ADD_MEM_REG).unwrap().number(8), address);
    card.mapper.unmap(IOVA, CHUNK).unwrap();
    assert_eq!(card.server.requests().last(), Some(&REM_MEM_REG), "it was told nothing that it would have to forget");
    assert!(card.told.failures().is_empty());
}

#[test]
fn chunk_that_a_device_only_writes_is_a_region_too() {
    let mut card = Card::new(manner());
    let windows = windows();
    card.mapper.connect(Some(&windows), None);
    let mut store = windows.store();
    let index = store.back().unwrap();
    card.server.take();
    card.mapper.map(IOVA, store.memory(index).unwrap(), Permissions::WRITE).unwrap();
    let address = card.server.wait_for(ADD_MEM_REG)[0].number(8);
    assert!(!card.ask(IOVA, 1, 1), "it may only be written");
    assert!(card.ask(IOVA, 2, 1));
    assert_eq!(translations(&card.server.wait_for(IOTLB_MSG)), [(IOVA, CHUNK, address, 2, 2)]);
}

/// Shows a range with this content to the guest.
fn show(card: &Card, content: DeviceContent) -> DeviceRange {
    let (range, _) = range(0x4000, false, content);
    card.mapper.connect(None, Some(&showing(&[&range])));
    range
}

#[test]
fn guest_visible_file_is_a_server_region_while_partly_mapped() {
    let mut card = Card::new(manner());
    let file = Arc::new(tempfile::tempfile().unwrap());
    file.set_len(0x8000).unwrap();
    let place = FilePlace { file, offset: 0x2000 };
    let range = show(&card, DeviceContent::Pages { file: Some(place) });
    card.server.take();
    card.mapper.map(IOVA, range.part(0x1000, 0x1000).unwrap(), READ_WRITE).unwrap();
    card.mapper.map(IOVA + 0x1000, range.part(0x3000, 0x1000).unwrap(), READ_WRITE).unwrap();
    let asked = card.server.take();
    assert_eq!(asked.iter().map(|one| one.request).collect::<Vec<_>>(), [ADD_MEM_REG]);
    let (address, len, offset) = (asked[0].number(24), asked[0].number(16), asked[0].number(32));
    assert_eq!((len, offset, asked[0].files[0].try_clone().is_ok()), (0x4000, 0x2000, true));
    assert!(address >= 1 << 57, "where neither RAM nor a chunk can be");
    assert!(card.ask(IOVA + 0x1008, 3, 1));
    let told = [(IOVA + 0x1000, 0x1000, address + 0x3000, 3, 2)];
    assert_eq!(translations(&card.server.wait_for(IOTLB_MSG)), told);
    card.mapper.unmap(IOVA, 0x1000).unwrap();
    assert!(card.server.requests().is_empty());
    card.mapper.unmap(IOVA + 0x1000, 0x1000).unwrap();
    assert_eq!(card.server.requests(), [IOTLB_MSG, REM_MEM_REG]);
    assert!(!card.ask(IOVA, 1, 1));
}

#[test]
fn memory_that_no_server_can_be_given_is_mapped_without_access() {
    for content in [DeviceContent::Registers, DeviceContent::Pages { file: None }] {
        let mut card = Card::new(manner());
        let range = show(&card, content);
        card.server.take();
        card.mapper.map(IOVA, range.part(0, 0x1000).unwrap(), READ_WRITE).unwrap();
        assert!(!card.ask(IOVA, 1, 1));
        assert_eq!(card.faults(), [(IOVA, Permissions::READ)]);
        card.mapper.unmap(IOVA, 0x1000).unwrap();
        assert!(card.server.requests().is_empty());
    }
}

#[test]
fn file_beyond_the_region_limit_is_mapped_without_access() {
    let mut card = Card::new(Manner { regions: 1, ..manner() });
    let place = FilePlace { file: Arc::new(tempfile::tempfile().unwrap()), offset: 0 };
    let range = show(&card, DeviceContent::Pages { file: Some(place) });
    card.mapper.map(IOVA, range.part(0, 0x1000).unwrap(), READ_WRITE).unwrap();
    assert!(!card.ask(IOVA, 2, 1));
    assert_eq!(card.faults(), [(IOVA, Permissions::WRITE)]);
    card.mapper.unmap(IOVA, 0x1000).unwrap();
}

#[test]
fn denied_access_is_nacked_each_time_and_faults_once() {
    let mut card = Card::new(manner());
    card.map(IOVA, 0x8000, 0x1000, Permissions::READ);
    assert!(card.ask(IOVA, 1, 1));
    for _ in 0..3 {
        assert!(!card.ask(IOVA + 8, 2, 1), "it may only read");
        assert!(!card.ask(IOVA + 0x1000, 1, 1), "nothing is there");
        assert!(card.ask(IOVA + 0x3000, 1, 4), "it was stopped itself");
    }
    let wanted =
        [(IOVA + 8, Permissions::WRITE), (IOVA + 0x1000, Permissions::READ), (IOVA + 0x3000, Permissions::READ)];
    assert_eq!(card.faults(), wanted);
    for page in 0..1000 {
        assert!(!card.ask(IOVA + 0x10_0000 + page * 0x1000, 1, 1));
    }
    assert!(card.faults().len() < 64, "a flood is no news");
}

#[test]
fn failed_iotlb_invalidation_fails_the_unmap_and_the_device() {
    let refuses = message_of(IOTLB_MSG, &1u64.to_le_bytes());
    for (vice, reason) in [
        (Vice::Silent, "takes more than"),
        (Vice::Answer(refuses), "refuses IOTLB_MSG (invalidate)"),
        (Vice::Answer(vec![0xff; 20]), "answers IOTLB_MSG (invalidate) with an invalid message"),
    ] {
        // A server that answers has ample time, as the machine may be busy.
        let times = if matches!(vice, Vice::Silent) { TIMES } else { Times::default() };
        let mut card = Card::with_times(Manner { vices: [(IOTLB_MSG, vice)].into(), ..manner() }, times);
        card.map(IOVA, 0x8000, 0x1000, READ_WRITE);
        // Answered before the update was looked at, which wants no answer.
        assert!(card.ask(IOVA, 1, 1));
        let begin = Instant::now();
        let outcome = card.mapper.unmap(IOVA, 0x1000);
        assert!(matches!(outcome, Err(UnmapError::Host(_))), "{outcome:?}");
        assert!(begin.elapsed() < Duration::from_secs(60), "the server is waited for without an end");
        let failures = card.told.failures();
        let wanted = format!("the vhost-user server does not forget what was unmapped: {reason}");
        assert!(failures.len() == 1 && failures[0].starts_with(&wanted), "{failures:?}");
        wait(|| card.device.counters().server_losses == 1);
        // Nobody is left who knows it.
        card.mapper.unmap(IOVA, 0x1000).unwrap();
    }
}

#[test]
fn unmap_succeeds_after_server_loss_and_next_iotlb_is_empty() {
    let mut card = Card::new(Manner { vices: [(IOTLB_MSG, Vice::Close)].into(), ..manner() });
    card.map(IOVA, 0x8000, 0x1000, READ_WRITE);
    card.map(IOVA + 0x1000, 0x9000, 0x1000, READ_WRITE);
    // It closes the connection at the update.
    let _ = card.channel.write_all(&message(IOVA, 1, 1));
    wait(|| card.device.counters().server_losses == 1);
    card.mapper.unmap(IOVA, 0x1000).unwrap();
    card.server.take();
    card.server.listen(manner());
    card.channel = channel(&card.server.wait_for(SET_VRING_KICK));
    wait(|| card.device.counters().server_connections == 2);
    card.mapper.unmap(IOVA + 0x1000, 0x1000).unwrap();
    assert_eq!(translations(&card.server.take()), []);
    assert!(card.ask(0x1000, 1, 1), "its rings");
    assert!(card.told.failures().is_empty(), "{:?}", card.told.failures());
}

#[test]
fn server_that_asks_without_end_holds_no_unmap_up() {
    let mut card = Card::new(manner());
    let mut flood = card.channel.try_clone().unwrap();
    flood.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
    let flooding = std::thread::spawn(move || {
        let asked = message(0x1000, 1, 1).repeat(1000);
        // Until the front end has enough of it: it closes a channel whose answers nobody reads.
        while flood.write_all(&asked).is_ok() {}
    });
    for number in 0..200 {
        card.map(IOVA + number * 0x1000, 0x8000, 0x1000, READ_WRITE);
        let begin = Instant::now();
        card.mapper.unmap(IOVA + number * 0x1000, 0x1000).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }
    flooding.join().unwrap();
    reset(&card.device, 2);
}

#[test]
fn server_that_does_not_read_translations_is_given_up() {
    let card = Card::new(manner());
    card.server.stop_reading();
    // It wants no answers, so it leaves none unread in the channel either.
    let mut asked = message(0x1000, 1, 1);
    asked[4] = 1;
    let mut flood = card.channel.try_clone().unwrap();
    while card.device.counters().server_losses == 0 && flood.write_all(&asked).is_ok() {}
    wait(|| card.device.counters().server_losses == 1);
    card.server.close();
}
