// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of a device behind the virtio-iommu: the server asks for translations, and drops translations after an UNMAP.

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
use super::support::{InterruptRecord, TIMES, ram, reset, start_queue, wait};
use crate::dma::{DeviceMemory, DmaTable, FaultRelay, Stopped, fault_relay};
use crate::guest_visible::test_support::showing;
use crate::host_range::test_support::range;
use crate::host_range::{DeviceContent, DeviceRange, FilePlace};
use crate::ram::Ram;
use crate::virtio::test_support::FakeSlots;
use crate::virtio::{Driver, VirtioDevice};
use crate::windows::{WindowMemory, WindowMemoryConfig};

const ENDPOINT: u32 = 24;
const READ_WRITE: Permissions = Permissions::READ.union(Permissions::WRITE);
/// IOVA at which the tests map memory.
const IOVA: u64 = 0x7000_0000;

fn manner() -> Manner {
    Manner {
        features: 1 << 33 | 1 << 32 | 1 << 30,
        protocol: MQ | REPLY_ACK | MEM_SLOTS | BACKEND_REQ,
        ..Manner::default()
    }
}

/// Network card behind the virtio-iommu.
struct Card {
    server: Server,
    device: VhostUserDevice,
    mapper: VhostUserMapper,
    ram: Arc<Ram>,
    interrupts: Arc<InterruptRecord>,
    faults: FaultRelay,
    /// The server's end of the channel on which the server sends requests.
    channel: UnixStream,
}

fn connect(server: &Server, table: Arc<DmaTable>, times: Times) -> Result<VhostUserDevice, ServerError> {
    let net = ServedNet { mac: [2; 6], mtu: None, pairs: 1, queue_size: 64, csum: true, tso: true, uso: true };
    let address = Address::new("d".into(), server.socket(), Model::net(&net), times, true);
    VhostUserDevice::connect(address, Some(table))
}

fn channel(asked: &[Asked]) -> UnixStream {
    let given = asked.iter().find(|one| one.request == SET_BACKEND_REQ_FD).expect("the server gets a channel");
    let channel = UnixStream::from(given.files[0].try_clone().unwrap());
    channel.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    channel
}

impl Card {
    /// Returns a card whose driver is ready. The IOVAs of the rings are equal to their guest-physical addresses.
    fn new(manner: Manner) -> Self {
        Self::with_times(manner, Times::default())
    }

    /// Does the same as [`new`](Self::new), with these time limits for the server.
    fn with_times(manner: Manner, times: Times) -> Self {
        let (server, ram, (sender, faults)) = (Server::start(manner), ram(1), fault_relay());
        let table = Arc::new(DmaTable::new("d", ram.clone(), Some((ENDPOINT, sender))));
        let device = connect(&server, table.clone(), times).unwrap();
        let mapper = device.mapper(table.clone());
        let (channel, interrupts) = (channel(&server.take()), InterruptRecord::with_events(2));
        let mut card = Self { server, device, mapper, ram, interrupts, faults, channel };
        card.map(0, 0, 0x1_0000, READ_WRITE);
        let features = card.device.features() | 1 << 33 | 1 << 32;
        let driver = Driver {
            requests: Arc::default(),
            memory: DeviceMemory::mapped(table),
            interrupt: card.interrupts.clone(),
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

    /// Sends a message about an access as the server. `access` is 1 for a read, 2 for a write, and 3 for both. `kind` is 1 for a miss, and
    /// 4 for a denied access. Returns true if the front end answers that the request succeeded.
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

/// Returns the translation messages to the server: first IOVA, size, address, permissions and kind (2 update, 3 invalidate).
fn translations(asked: &[Asked]) -> Vec<(u64, u64, u64, u8, u8)> {
    let interrupts = asked.iter().filter(|one| one.request == IOTLB_MSG);
    interrupts.map(|one| (one.number(0), one.number(8), one.number(16), one.payload[24], one.payload[25])).collect()
}

#[test]
fn server_that_cannot_translate_is_refused_with_what_it_lacks() {
    let all = manner().protocol;
    for (features, protocol, reason) in [
        (1 << 32 | 1 << 30, all, "does not support iommu=on (it lacks VIRTIO_F_ACCESS_PLATFORM)"),
        (manner().features, all & !BACKEND_REQ, "(it lacks VHOST_USER_PROTOCOL_F_BACKEND_REQ)"),
        (manner().features, all & !REPLY_ACK, "(it lacks VHOST_USER_PROTOCOL_F_REPLY_ACK)"),
        (manner().features, all & !MEM_SLOTS, "(it lacks VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS)"),
    ] {
        let server = Server::start(Manner { features, protocol, ..Manner::default() });
        let table = Arc::new(DmaTable::new("d", ram(1), None));
        let error = connect(&server, table, Times::default()).err().unwrap().to_string();
        assert!(error.ends_with(&format!("{reason}: set iommu=off, or use another server")), "{error}");
    }
}

#[test]
fn mapping_is_sent_on_a_miss_and_invalidated_by_unmap() {
    let mut card = Card::new(manner());
    card.map(IOVA, 0x8000, 0x2000, Permissions::WRITE);
    let asked = card.server.take();
    let accepted = asked.iter().find(|one| one.request == SET_FEATURES).unwrap().number(0);
    assert_eq!(accepted & 1 << 33, 1 << 33);
    assert_eq!(translations(&asked), [], "the server gets a translation only after a miss");

    assert!(card.ask(IOVA + 0x1234, 2, 1));
    card.mapper.unmap(IOVA, 0x2000).unwrap();
    let whole = (IOVA, 0x2000);
    let wanted = [(whole.0, whole.1, 0x8000, 2, 2), (whole.0, whole.1, 0, 0, 3)];
    assert_eq!(translations(&card.server.wait_for(IOTLB_MSG)), wanted);
    assert!(!card.ask(IOVA, 2, 1));
    assert_eq!(translations(&card.server.take()), []);

    // The server has no translation, so there is nothing to invalidate.
    card.map(IOVA, 0x8000, 0x1000, Permissions::READ);
    card.mapper.unmap(IOVA, 0x1000).unwrap();
    assert_eq!(translations(&card.server.take()), []);
    assert!(matches!(card.mapper.unmap(IOVA, 0x1000), Err(UnmapError::NotMapped)));
    assert!(card.interrupts.failures().is_empty());
}

/// Size of a chunk in bytes.
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
    assert!(address >= 1 << 52, "the address is above all RAM");
    assert!(card.ask(IOVA + 1, 3, 1));
    assert_eq!(translations(&card.server.wait_for(IOTLB_MSG)), [(IOVA, CHUNK, address, 3, 2)]);

    // The server supports only two regions, and already has RAM and one chunk. So a second chunk cannot be mapped.
    let other = store.back().unwrap();
    let refused = card.mapper.map(IOVA + CHUNK, store.memory(other).unwrap(), READ_WRITE);
    assert!(matches!(refused, Err(MapError::NoResources)), "{refused:?}");
    assert!(card.server.requests().is_empty());
    assert!(!card.ask(IOVA + CHUNK, 1, 1));

    // The next server receives the mapped chunk.
    card.server.close();
    wait(|| card.device.counters().server_losses == 1);
    card.server.listen(manner());
    let asked = card.server.wait_for(SET_VRING_KICK);
    assert_eq!(asked.iter().find(|one| one.request == ADD_MEM_REG).unwrap().number(8), address);
    card.mapper.unmap(IOVA, CHUNK).unwrap();
    assert_eq!(card.server.requests().last(), Some(&REM_MEM_REG), "the next server has no translation to invalidate");
    assert!(card.interrupts.failures().is_empty());
}

#[test]
fn write_only_chunk_is_a_server_region_too() {
    let mut card = Card::new(manner());
    let windows = windows();
    card.mapper.connect(Some(&windows), None);
    let mut store = windows.store();
    let index = store.back().unwrap();
    card.server.take();
    card.mapper.map(IOVA, store.memory(index).unwrap(), Permissions::WRITE).unwrap();
    let address = card.server.wait_for(ADD_MEM_REG)[0].number(8);
    assert!(!card.ask(IOVA, 1, 1), "the mapping allows only writes");
    assert!(card.ask(IOVA, 2, 1));
    assert_eq!(translations(&card.server.wait_for(IOTLB_MSG)), [(IOVA, CHUNK, address, 2, 2)]);
}

/// Makes a range of device memory with this content visible to the guest.
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
    assert!(address >= 1 << 57, "the address is above all RAM and chunks");
    assert!(card.ask(IOVA + 0x1008, 3, 1));
    let interrupts = [(IOVA + 0x1000, 0x1000, address + 0x3000, 3, 2)];
    assert_eq!(translations(&card.server.wait_for(IOTLB_MSG)), interrupts);
    card.mapper.unmap(IOVA, 0x1000).unwrap();
    assert!(card.server.requests().is_empty());
    card.mapper.unmap(IOVA + 0x1000, 0x1000).unwrap();
    assert_eq!(card.server.requests(), [IOTLB_MSG, REM_MEM_REG]);
    assert!(!card.ask(IOVA, 1, 1));
}

#[test]
fn unshareable_memory_is_mapped_without_access() {
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
        assert!(!card.ask(IOVA + 8, 2, 1), "the mapping allows only reads");
        assert!(!card.ask(IOVA + 0x1000, 1, 1), "nothing is mapped");
        assert!(card.ask(IOVA + 0x3000, 1, 4), "the server denied the access by itself");
    }
    let wanted =
        [(IOVA + 8, Permissions::WRITE), (IOVA + 0x1000, Permissions::READ), (IOVA + 0x3000, Permissions::READ)];
    assert_eq!(card.faults(), wanted);
    for page in 0..1000 {
        assert!(!card.ask(IOVA + 0x10_0000 + page * 0x1000, 1, 1));
    }
    assert!(card.faults().len() < 64, "the number of reports is limited");
}

#[test]
fn failed_iotlb_invalidation_fails_the_unmap_and_the_device() {
    let refuses = message_of(IOTLB_MSG, &1u64.to_le_bytes());
    for (vice, reason) in [
        (Vice::Silent, "did not complete IOTLB_MSG (invalidate) in time"),
        (Vice::Answer(refuses), "refused the request IOTLB_MSG (invalidate)"),
        (Vice::Answer(vec![0xff; 20]), "sent an invalid answer to IOTLB_MSG (invalidate)"),
    ] {
        // For a server that answers, use the long limits, because the machine may be busy.
        let times = if matches!(vice, Vice::Silent) { TIMES } else { Times::default() };
        let mut card = Card::with_times(Manner { vices: [(IOTLB_MSG, vice)].into(), ..manner() }, times);
        card.map(IOVA, 0x8000, 0x1000, READ_WRITE);
        // The front end does not request an answer to the update. So the front end reports success for the miss, although the server
        // misbehaves at the update.
        assert!(card.ask(IOVA, 1, 1));
        let begin = Instant::now();
        let outcome = card.mapper.unmap(IOVA, 0x1000);
        assert!(matches!(outcome, Err(UnmapError::Host(_))), "{outcome:?}");
        assert!(begin.elapsed() < Duration::from_secs(60), "the UNMAP waited too long for the server");
        let failures = card.interrupts.failures();
        let wanted = format!(
            "the vhost-user server did not drop its translation of memory that the guest unmapped: the vhost-user server {reason}"
        );
        assert!(failures.len() == 1 && failures[0].starts_with(&wanted), "{failures:?}");
        wait(|| card.device.counters().server_losses == 1);
        // The connection has ended, so no server has the translation any more. Therefore the UNMAP succeeds.
        card.mapper.unmap(IOVA, 0x1000).unwrap();
    }
}

#[test]
fn unmap_succeeds_after_server_loss_and_next_iotlb_is_empty() {
    let mut card = Card::new(Manner { vices: [(IOTLB_MSG, Vice::Close)].into(), ..manner() });
    card.map(IOVA, 0x8000, 0x1000, READ_WRITE);
    card.map(IOVA + 0x1000, 0x9000, 0x1000, READ_WRITE);
    // The front end answers this miss with an update. At the update, the server closes the connection.
    let _ = card.channel.write_all(&message(IOVA, 1, 1));
    wait(|| card.device.counters().server_losses == 1);
    card.mapper.unmap(IOVA, 0x1000).unwrap();
    card.server.take();
    card.server.listen(manner());
    card.channel = channel(&card.server.wait_for(SET_VRING_KICK));
    wait(|| card.device.counters().server_connections == 2);
    card.mapper.unmap(IOVA + 0x1000, 0x1000).unwrap();
    assert_eq!(translations(&card.server.take()), []);
    assert!(card.ask(0x1000, 1, 1), "the rings are still mapped");
    assert!(card.interrupts.failures().is_empty(), "{:?}", card.interrupts.failures());
}

#[test]
fn server_flooding_misses_does_not_hold_up_unmaps() {
    let mut card = Card::new(manner());
    let mut flood = card.channel.try_clone().unwrap();
    flood.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
    let flooding = std::thread::spawn(move || {
        let asked = message(0x1000, 1, 1).repeat(1000);
        // The server does not read the answers. So the front end closes the channel, and the loop ends.
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
    // The server wants no answers to these requests. So unread answers cannot make the front end close the channel.
    let mut asked = message(0x1000, 1, 1);
    asked[4] = 1;
    let mut flood = card.channel.try_clone().unwrap();
    while card.device.counters().server_losses == 0 && flood.write_all(&asked).is_ok() {}
    wait(|| card.device.counters().server_losses == 1);
    card.server.close();
}
