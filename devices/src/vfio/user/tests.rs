// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The client, the device and the mapper in front of servers that behave and servers that do not.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use iommu_bounce::{ChunkStore, DmaMapper, MapError, Permissions, UnmapError};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, VolatileSlice};

use super::client::{Client, open_socket};
use super::connection::{CallError, DmaTarget};
use super::scripted_server::{Asked, Instead, MSI, Server};
use super::wire::{self, ACCESS, Command, Header, Kind, MOST_DATA};
use super::{UserMapper, UserServer};
use crate::dma::{DmaTable, FaultRelay, fault_relay};
use crate::pci::{PciDevice, regs};
use crate::platform::MsiMessage;
use crate::ram::Ram;
use crate::vfio::error::VfioPciError;
use crate::vfio::function::fake::{FakeAllocator, FakeSlots};
use crate::virtio::windows::{WindowMemory, WindowMemoryConfig};

const RW: Permissions = Permissions::READ.union(Permissions::WRITE);
const CHUNK: u64 = 4096;
const ENDPOINT: u32 = 0x18;
/// How long servers may take: long enough for one that behaves on a busy machine.
const LIMIT: Duration = Duration::from_secs(1);

/// Memory that nobody reaches.
struct Nothing;

impl DmaTarget for Nothing {
    fn read(&self, _: u64, _: &mut [u8]) -> bool {
        false
    }
    fn write(&self, _: u64, _: &[u8]) -> bool {
        false
    }
}

fn client(socket: UnixStream) -> Result<Client, VfioPciError> {
    Client::with_limit("/run/x", socket, Arc::new(Nothing), LIMIT)
}

fn refusal(server: (Server, UnixStream)) -> String {
    let (_server, socket) = server;
    let error = client(socket).and_then(|client| client.describe()).unwrap_err().to_string();
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

fn ram() -> Arc<Ram> {
    Arc::new(Ram::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap())
}

/// A server's device behind an IOMMU.
struct Rig {
    server: Server,
    mapper: UserMapper,
    table: Arc<DmaTable>,
    client: Arc<Client>,
    ram: Arc<Ram>,
    relay: FaultRelay,
}

fn rig(server: (Server, UnixStream)) -> Rig {
    let (server, socket) = server;
    let (sender, relay) = fault_relay();
    let ram = ram();
    let table = Arc::new(DmaTable::new("/run/x", ram.clone(), Some((ENDPOINT, sender))));
    let client = Arc::new(Client::with_limit("/run/x", socket, table.clone(), LIMIT).unwrap());
    server.asked();
    Rig { server, mapper: UserMapper::new(client.clone(), table.clone()), table, client, ram, relay }
}

impl Rig {
    fn map(&mut self, iova: u64, gpa: u64, len: usize, permissions: Permissions) -> Result<(), MapError> {
        let slice = self.ram.get_slice(GuestAddress(gpa), len).unwrap();
        self.mapper.map(iova, slice, permissions)
    }

    fn wait_until_gone(&self) -> String {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            match self.client.gone() {
                Some(reason) => return reason,
                None => assert!(Instant::now() < end, "the server is still there"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn read(&self, iova: u64, len: usize) -> Option<Vec<u8>> {
        let (header, answer) = self.server.ask(Command::DmaRead, &wire::dma_access(iova, len));
        match header.kind {
            Kind::Reply { refused: None } => {
                assert_eq!(answer[..ACCESS], wire::dma_access(iova, len));
                Some(answer[ACCESS..].to_vec())
            }
            other => {
                let kind = Kind::Reply { refused: Some(libc::EFAULT.unsigned_abs()) };
                assert_eq!((other, answer.len()), (kind, 0));
                None
            }
        }
    }

    fn write(&self, iova: u64, data: &[u8]) -> bool {
        let mut message = wire::dma_access(iova, data.len());
        message.extend(data);
        let (header, answer) = self.server.ask(Command::DmaWrite, &message);
        let taken = header.kind == Kind::Reply { refused: None };
        assert!(!taken || answer == wire::dma_access(iova, data.len()));
        taken
    }
}

fn commands(asked: &[Asked]) -> Vec<u16> {
    asked.iter().map(|asked| asked.command).collect()
}

// ---- the connection ---------------------------------------------------------------------------------------------

#[test]
fn device_of_a_good_server_is_described() {
    let (_server, socket) = Server::good();
    let client = client(socket).unwrap();
    let description = client.describe().unwrap();
    assert_eq!((description.resets, description.irqs, description.bars[0].size), (true, (1, 0), 1 << 20));
    assert_eq!((description.config.size, description.bars[1].size), (256, 0));
    let mut data = [0; 4];
    client.read_region(0, 0x10, &mut data).unwrap();
    assert_eq!(data, [0x10, 0x11, 0x12, 0x13]);
    client.write_region(wire::CONFIG_REGION, 4, &[6, 0]).unwrap();
    client.read_region(wire::CONFIG_REGION, 4, &mut data[..2]).unwrap();
    assert_eq!(data[..2], [6, 0]);
    assert_eq!(client.abilities().descriptors, 8);
}

#[test]
fn server_that_is_not_there_is_the_users_mistake() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("none");
    let error = open_socket(&path).unwrap_err();
    assert!(error.is_user_error() && error.to_string().contains("start the vfio-user server first"), "{error}");
    // One that listens and takes no connection is noticed by its silence, however many wait already.
    let path = dir.path().join("full");
    let _listener = UnixListener::bind(&path).unwrap();
    let mut waiting = Vec::new();
    let full = loop {
        match open_socket(&path) {
            Ok(socket) => waiting.push(socket),
            Err(error) => break error,
        }
    };
    assert!(full.is_user_error());
    let error = client(waiting.remove(0)).err().unwrap().to_string();
    assert!(error.contains("has not answered VERSION"), "{error}");
}

#[test]
fn wrong_handshakes_are_told_in_one_line() {
    let answer = |payload: &'static [u8]| Server::that(Command::Version, move || Instead::Answer(payload.to_vec()));
    assert!(refusal(answer(&[1, 0, 0, 0])).contains("version 1.0"));
    assert!(refusal(answer(&[])).contains("answers VERSION with an invalid message"));
    assert!(refusal(answer(&[0, 0, 1, 0, b'{', 0])).contains("no JSON"));
    assert!(refusal(answer(&[0; 5000])).contains("answers VERSION with 5000 bytes"));
    assert!(refusal(Server::that(Command::Version, || Instead::Refuse(22))).contains("Invalid argument"));
    assert!(refusal(Server::that(Command::Version, || Instead::Close)).contains("closed the connection"));
    assert!(refusal(Server::that(Command::DeviceInfo, || Instead::Answer(vec![0; 16]))).contains("no PCI function"));
    assert!(refusal(Server::that(Command::DeviceInfo, || Instead::Answer(vec![0; 8]))).contains("GET_INFO"));
    assert!(refusal(Server::that(Command::RegionInfo, || Instead::Answer(vec![9; 32]))).contains("REGION_INFO"));
    assert!(refusal(Server::that(Command::IrqInfo, || Instead::Answer(Vec::new()))).contains("IRQ_INFO"));
}

#[test]
fn server_that_breaks_the_protocol_is_gone() {
    let header = |id, command, kind, payload| Header { id, command, kind, payload }.encode().to_vec();
    let reply = Kind::Reply { refused: None };
    let read = Command::RegionRead.number();
    for (bytes, part) in [
        // An answer to nothing, one to another request, a size that cannot be, a type that is none.
        (header(999, read, reply, 0), "what it was not asked"),
        (header(1, 77, reply, 0), "with an answer to command 77"),
        (header(1, read, reply, 5000), "with 5000 bytes"),
        (vec![1, 0, 9, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], "message of 3 bytes"),
        (vec![1, 0, 9, 0, 255, 255, 255, 255, 1, 0, 0, 0, 0, 0, 0, 0], "message of 4294967295 bytes"),
        (vec![1, 0, 9, 0, 16, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0], "type 9"),
        // The right size, and nothing of what was asked.
        (
            header(1, read, reply, 20).into_iter().chain([0x55; 20]).collect(),
            "answers REGION_READ with an invalid message",
        ),
        (
            header(1, read, reply, 17).into_iter().chain(wire::region_access(0, 0, 4)).chain([1]).collect(),
            "an invalid message",
        ),
    ] {
        let (_server, socket) = Server::that(Command::RegionRead, move || Instead::Bytes(bytes.clone()));
        let client = client(socket).unwrap();
        let mut data = [0xff; 4];
        assert!(matches!(client.read_region(0, 0, &mut data), Err(CallError::Gone)), "{part}");
        let reason = client.gone().unwrap();
        assert!(reason.contains(part), "{reason}");
        assert_eq!(data, [0xff; 4]);
        let start = Instant::now();
        assert!(matches!(client.reset(), Err(CallError::Gone)));
        assert!(start.elapsed() < LIMIT, "nobody waits for who is gone");
    }
}

#[test]
fn silence_and_death_end_every_wait() {
    for (instead, threads, part) in [
        ((|| Instead::Silence) as fn() -> Instead, 4, "has not answered REGION_READ for 1 s"),
        (|| Instead::Close, 4, "closed the connection"),
        // Half an answer.
        (|| Instead::Bytes(vec![1, 0, 9, 0, 36]), 1, "has not answered"),
    ] {
        let (_server, socket) = Server::that(Command::RegionRead, instead);
        let client = client(socket).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| assert!(matches!(client.read_region(0, 0, &mut [0; 4]), Err(CallError::Gone))));
            }
        });
        assert!(client.gone().unwrap().contains(part), "{:?}", client.gone());
    }
}

#[test]
fn server_that_takes_nothing_holds_nobody_up() {
    // It reads nothing, and its socket is full at some time.
    let (socket, _other) = UnixStream::pair().unwrap();
    let connection = super::connection::Connection::new("/run/x", socket, Arc::new(Nothing), LIMIT);
    let connection = connection.unwrap();
    let start = Instant::now();
    let big = vec![0; MOST_DATA];
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| assert!(connection.call(Command::RegionWrite, &big, &[], 0).is_err()));
        }
    });
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn threads_get_each_its_own_answer() {
    let (_server, socket) = Server::good();
    let client = client(socket).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let client = &client;
            scope.spawn(move || {
                for round in 0..100 {
                    let at = thread * 16 + round % 16;
                    let mut data = [0];
                    client.read_region(0, at, &mut data).unwrap();
                    assert_eq!(u64::from(data[0]), at);
                }
            });
        }
    });
}

#[test]
fn unwanted_descriptors_are_not_taken() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (server, socket) = Server::that(Command::RegionRead, || Instead::Silence);
    let _client = client(socket).unwrap();
    let before = open();
    let file = tempfile::tempfile().unwrap();
    let mut message =
        Header { id: 9, command: 99, kind: Kind::Command { no_reply: true }, payload: 0 }.encode().to_vec();
    message.extend(Header::request(5, Command::DmaRead, 0).encode());
    server.send_with(&message, &file);
    // The second one is answered, so both were taken.
    let (header, _) = server.answer();
    assert_eq!((header.id, header.kind), (5, Kind::Reply { refused: Some(libc::EINVAL.unsigned_abs()) }));
    drop(file);
    // Other tests open and close theirs at the same time.
    assert!(open() < before + 64);
}

#[test]
fn commands_that_are_none_are_refused() {
    let rig = rig(Server::good());
    let too_many = wire::dma_access(0, MOST_DATA + 1);
    for (command, payload, error) in [
        (Command::DmaRead, &[][..], libc::EINVAL),
        (Command::DmaRead, &too_many, libc::EINVAL),
        (Command::DmaRead, &[0; ACCESS + 1], libc::EINVAL),
        (Command::DmaWrite, &wire::dma_access(0, 8), libc::EINVAL),
        (Command::Reset, &[], libc::EOPNOTSUPP),
        (Command::Version, &[0; 40], libc::EOPNOTSUPP),
    ] {
        let (header, answer) = rig.server.ask(command, payload);
        let kind = Kind::Reply { refused: Some(error.unsigned_abs()) };
        assert_eq!((header.kind, header.command, answer.len()), (kind, command.number(), 0), "{command:?}");
    }
    assert!(rig.client.gone().is_none());
}

// ---- the mapper -------------------------------------------------------------------------------------------------

#[test]
fn ram_is_announced_without_a_descriptor_and_reached_by_messages() {
    let mut rig = rig(Server::good());
    rig.ram.write_slice(&[1, 2, 3, 4], GuestAddress(0x2ffe)).unwrap();
    rig.map(0x10_0000, 0x2000, 0x1000, RW).unwrap();
    rig.map(0x10_1000, 0x3000, 0x1000, Permissions::READ).unwrap();
    let asked = rig.server.asked();
    assert_eq!(commands(&asked), [2, 2]);
    assert!(asked.iter().all(|asked| asked.descriptors.is_empty()), "{asked:?}");
    let flags = wire::DmaFlags { read: true, write: false };
    assert_eq!(asked[1].payload, wire::dma_map(flags, 0, 0x10_1000, 0x1000));
    assert_eq!(rig.read(0x10_0ffe, 4), Some(vec![1, 2, 3, 4]));
    assert!(rig.write(0x10_0000, &[9; 16]));
    assert_eq!(rig.ram.read_obj::<u8>(GuestAddress(0x200f)).unwrap(), 9);
    assert!(!rig.write(0x10_1000, &[9]));
    assert_eq!(rig.read(0x2000, 4), None, "a guest-physical address is none of its addresses");
    let faults: Vec<_> = rig.relay.take().0.iter().map(|fault| (fault.endpoint, fault.iova, fault.access)).collect();
    assert_eq!(faults, [(ENDPOINT, 0x10_1000, Permissions::WRITE), (ENDPOINT, 0x2000, Permissions::READ)]);
    rig.mapper.unmap(0x10_0000, 0x2000).unwrap();
    let asked = rig.server.asked();
    let unmaps: Vec<_> = asked.iter().map(|asked| asked.payload.clone()).collect();
    assert_eq!(
        unmaps,
        [wire::dma_unmap(0x10_0000, 0x1000), wire::dma_unmap(0x10_1000, 0x1000)],
        "each as it was mapped"
    );
    assert_eq!(rig.read(0x10_0000, 1), None);
}

#[test]
fn refused_map_is_an_error_and_leaves_nothing() {
    for (errno, exists, full) in
        [(libc::EEXIST, true, false), (libc::ENOMEM, false, true), (libc::EINVAL, false, false), (0, false, false)]
    {
        let mut rig = rig(Server::that(Command::DmaMap, move || Instead::Refuse(errno.unsigned_abs())));
        let error = rig.map(0x1000, 0x1000, 0x1000, RW).unwrap_err();
        assert_eq!(matches!(error, MapError::Exists), exists, "{error}");
        assert_eq!(matches!(error, MapError::NoResources), full, "{error}");
        assert!(rig.client.gone().is_none());
        assert_eq!(rig.read(0x1000, 1), None);
        assert!(matches!(rig.mapper.unmap(0x1000, 0x1000), Err(UnmapError::NotMapped)));
    }
}

#[test]
fn server_that_keeps_what_is_unmapped_is_given_up() {
    let mut rig = rig(Server::that(Command::DmaUnmap, || Instead::Refuse(16)));
    rig.map(0x1000, 0x1000, 0x1000, RW).unwrap();
    rig.mapper.unmap(0x1000, 0x1000).unwrap();
    assert!(rig.client.gone().unwrap().contains("does not take DMA_UNMAP"));
    assert!(!rig.table.read(0x1000, &mut [0]));
}

#[test]
fn domain_goes_on_when_a_server_is_gone() {
    let mut rig = rig(Server::that(Command::Reset, || Instead::Close));
    rig.map(0x1000, 0x1000, 0x1000, RW).unwrap();
    let _ = rig.client.reset();
    rig.wait_until_gone();
    rig.map(0x2000, 0x2000, 0x1000, RW).unwrap();
    assert!(matches!(rig.map(0x2000, 0x3000, 0x1000, RW), Err(MapError::Exists)));
    rig.mapper.unmap(0x1000, 0x2000).unwrap();
    assert!(matches!(rig.mapper.unmap(0x1000, 0x1000), Err(UnmapError::NotMapped)));
}

#[test]
fn map_in_the_middle_of_which_a_server_dies_fails() {
    let mut rig = rig(Server::that(Command::DmaMap, || Instead::Close));
    assert!(matches!(rig.map(0x1000, 0x1000, 0x1000, RW), Err(MapError::Host(_))));
    assert!(matches!(rig.mapper.unmap(0x1000, 0x1000), Err(UnmapError::NotMapped)));
}

#[test]
fn servers_limits_are_kept_and_told() {
    let mut rig = rig(Server::good());
    let limits = rig.mapper.limits();
    assert_eq!((limits.page_size_mask, limits.max_mappings), (!0xfff, Some(6)));
    for page in 0..6 {
        rig.map(page << 12, page << 12, 0x1000, RW).unwrap();
    }
    assert!(matches!(rig.map(0x6000, 0x6000, 0x1000, RW), Err(MapError::NoResources)));
    rig.mapper.unmap(0x5000, 0x1000).unwrap();
    rig.map(0x6000, 0x6000, 0x1000, RW).unwrap();
}

#[test]
fn memory_of_other_devices_is_not_mapped() {
    let mut rig = rig(Server::good());
    let mut registers = [0u8; 4096];
    assert!(matches!(rig.mapper.map(0, VolatileSlice::from(&mut registers[..]), RW), Err(MapError::Host(_))));
    assert!(rig.server.asked().is_empty());
}

fn windows() -> (Arc<WindowMemory>, Arc<FakeSlots>) {
    let slots = Arc::new(FakeSlots::default());
    let config = WindowMemoryConfig {
        region_size: 8 * CHUNK,
        chunk_size: CHUNK,
        budget: 8 * CHUNK,
        hugepages: false,
        slots: slots.clone(),
    };
    let windows = Arc::new(WindowMemory::new(&config).unwrap());
    windows.moved(0x40_0000_0000).unwrap();
    (windows, slots)
}

#[test]
fn chunks_go_with_descriptors_of_their_own_and_their_permissions() {
    let mut rig = rig(Server::good());
    let (windows, _slots) = windows();
    rig.table.set_windows(windows.clone());
    let mut store = windows.store();
    let kinds = [RW, Permissions::READ, Permissions::WRITE];
    let mut chunks = Vec::new();
    for (iova, permissions) in (0u64..).step_by(4096).zip(kinds) {
        let index = store.back().unwrap();
        rig.mapper.map(iova, store.memory(index).unwrap(), permissions).unwrap();
        chunks.push(index);
    }
    let asked = rig.server.asked();
    assert_eq!(asked.iter().map(|asked| asked.descriptors.len()).collect::<Vec<_>>(), [1, 1, 0]);
    let file = |place: usize| File::from(asked[place].descriptors[0].try_clone().unwrap());
    let (both, read) = (file(0), file(1));
    assert!([&both, &read].into_iter().all(|file| file.metadata().unwrap().len() == CHUNK && file.set_len(0).is_err()));
    both.write_all_at(&[7; 8], 0).unwrap();
    assert_eq!(store.memory(chunks[0]).unwrap().read_obj::<u64>(0).unwrap(), 0x0707_0707_0707_0707);
    store.memory(chunks[1]).unwrap().write_obj(0x1122u16, 4094).unwrap();
    let mut bytes = [0; 2];
    read.read_exact_at(&mut bytes, 4094).unwrap();
    assert_eq!(bytes, [0x22, 0x11]);
    assert!(read.write_at(&[1], 0).is_err());
    assert!(vm_memory::MmapRegion::<()>::from_file(FileOffset::new(read, 0), 4096).is_err(), "mapped for writing");
    // By messages, all are reached as they are mapped.
    assert_eq!(rig.read(0xffe, 4), Some(vec![0; 4]));
    assert!(rig.write(0x2000, &[3; 4]) && !rig.write(0x1000, &[3; 4]));
    assert_eq!(rig.read(0x2000, 4), None);
    assert_eq!(store.memory(chunks[2]).unwrap().read_obj::<u8>(3).unwrap(), 3);
    // What was handed out is not kept for another guest, and its memory goes with it.
    assert!(store.park(chunks[0]).is_err() && store.park(chunks[1]).is_err());
    assert!(store.park(chunks[2]).is_ok());
    rig.mapper.unmap(0, 4096).unwrap();
    store.release(chunks[0]).unwrap();
    assert_eq!(rig.read(0, 1), None);
    let again = store.back().unwrap();
    both.write_all_at(&[9; 8], 0).unwrap();
    assert_eq!(store.memory(again).unwrap().read_obj::<u64>(0).unwrap(), 0, "a chunk that nobody had");
}

// ---- the device -------------------------------------------------------------------------------------------------

struct Machine {
    server: Server,
    device: crate::vfio::VfioPciDevice,
    msi: FakeAllocator,
}

fn machine(server: (Server, UnixStream)) -> Result<Machine, VfioPciError> {
    let (server, socket) = server;
    let host = UserServer::start("/run/x", socket, ram(), None)?;
    let (msi, slots) = (FakeAllocator::default(), Arc::new(FakeSlots::default()));
    let device = host.function("user0", &msi, slots)?;
    server.asked();
    Ok(Machine { server, device, msi })
}

#[test]
fn device_is_served_by_the_front_end_of_vfio() {
    let Machine { server, device, msi } = machine(Server::good()).unwrap();
    let mut data = [0; 4];
    device.read_config(0, &mut data);
    assert_eq!(data, 0x11e8_1234u32.to_le_bytes());
    assert_eq!(device.bars().iter().map(|bar| (bar.index, bar.size)).collect::<Vec<_>>(), [(0, 1 << 20)]);
    device.read_bar(0, 0x40, &mut data);
    assert_eq!(data, [0x40, 0x41, 0x42, 0x43]);
    server.asked();
    // As a driver turns its MSI on.
    device.write_config(MSI + 4, &0xfee0_0000u32.to_le_bytes());
    device.write_config(MSI + 12, &[0x31, 0]);
    device.write_config(MSI + 2, &[1, 0]);
    let asked = server.asked();
    let irqs: Vec<_> = asked.iter().filter(|asked| asked.command == 8).collect();
    assert_eq!((irqs.len(), irqs[0].descriptors.len()), (1, 1));
    assert_eq!(irqs[0].payload, wire::enable_irqs(wire::MSI_IRQS, 0, 1));
    let vectors = msi.0.lock().unwrap()[0].clone();
    assert_eq!(vectors.routes.lock().unwrap()[0], Some(MsiMessage { address: 0xfee0_0000, data: 0x31 }));
    // What the server writes to the event arrives.
    let event = File::from(irqs[0].descriptors[0].try_clone().unwrap());
    event
        .write_at(&1u64.to_ne_bytes(), 0)
        .or_else(|_| std::io::Write::write(&mut &event, &1u64.to_ne_bytes()))
        .unwrap();
    let mut count = [0; 8];
    (&event).read_exact(&mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
    device.write_config(regs::COMMAND, &[6, 0]);
    device.reset().unwrap();
    let asked = server.asked();
    assert!(commands(&asked).ends_with(&[8, 13, 10]), "interrupts off, reset, quiet: {:?}", commands(&asked));
}

#[test]
fn device_whose_server_dies_reads_as_all_ones() {
    let reads = Arc::new(AtomicUsize::new(0));
    let seen = reads.clone();
    let dies = move |header: &Header, payload: &[u8]| {
        let bar = header.command == Command::RegionRead.number() && payload[8] == 0;
        (bar && seen.fetch_add(1, Ordering::Relaxed) == 2).then_some(Instead::Close)
    };
    let Machine { server: _server, device, .. } = machine(Server::start(Box::new(dies))).unwrap();
    let mut data = [0; 8];
    for _ in 0..2 {
        device.read_bar(0, 0, &mut data);
        assert_eq!(data, [0, 1, 2, 3, 4, 5, 6, 7]);
    }
    device.read_bar(0, 0, &mut data);
    assert_eq!(data, [0xff; 8]);
    let mut id = [0; 4];
    device.read_config(0, &mut id);
    assert_eq!(id, [0xff; 4]);
    device.write_bar(0, 0, &[1; 8]);
    device.write_config(MSI + 2, &[1, 0]);
    device.write_config(regs::COMMAND, &[6, 0]);
    device.reset().unwrap();
    device.read_bar(0, 0, &mut data);
    assert_eq!(data, [0xff; 8]);
    assert_eq!(reads.load(Ordering::Relaxed), 3);
}

#[test]
fn refused_accesses_read_as_all_ones_and_the_device_goes_on() {
    let refuses = |header: &Header, payload: &[u8]| {
        let read = header.command == Command::RegionRead.number() || header.command == Command::RegionWrite.number();
        (read && payload[8] == 0 && payload[0] == 0x80).then_some(Instead::Refuse(5))
    };
    let Machine { server: _server, device, .. } = machine(Server::start(Box::new(refuses))).unwrap();
    let mut data = [0; 4];
    device.read_bar(0, 0x80, &mut data);
    assert_eq!(data, [0xff; 4]);
    device.write_bar(0, 0x80, &data);
    device.read_bar(0, 0x40, &mut data);
    assert_eq!(data, [0x40, 0x41, 0x42, 0x43]);
}

#[test]
fn impossible_devices_are_refused() {
    let region = |index: u32, size: u64| {
        move |header: &Header, payload: &[u8]| {
            let hit = header.command == Command::RegionInfo.number() && payload[8] == index.to_le_bytes()[0];
            let mut answer: Vec<u8> = [32u32, 3, index, 0].iter().flat_map(|field| field.to_ne_bytes()).collect();
            answer.extend(size.to_ne_bytes());
            answer.extend([0; 8]);
            hit.then_some(Instead::Answer(answer))
        }
    };
    for rule in [region(7, 64), region(7, 0), region(0, 0x1001), region(5, u64::MAX)] {
        let error = machine(Server::start(Box::new(rule))).err().unwrap();
        assert!(!error.is_user_error(), "{error}");
    }
    // A size beyond what there is is cut.
    assert!(machine(Server::start(Box::new(region(7, u64::MAX)))).is_ok());
    let error = machine(Server::that(Command::Reset, || Instead::Refuse(1))).err().unwrap().to_string();
    assert!(error.contains("does not reset the device"), "{error}");
}

#[test]
fn all_ram_goes_to_a_server_without_an_iommu() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(0x8000).unwrap();
    let place = |offset| Some(FileOffset::new(file.try_clone().unwrap(), offset));
    let ranges = [(GuestAddress(0), 0x4000, place(0)), (GuestAddress(0x10_0000), 0x4000, place(0x4000))];
    let ram = Arc::new(Ram::from_ranges_with_files(ranges).unwrap());
    let (server, socket) = Server::good();
    let host = UserServer::start("/run/x", socket, ram.clone(), None).unwrap();
    server.asked();
    host.share_ram().unwrap();
    let asked = server.asked();
    let flags = wire::DmaFlags { read: true, write: true };
    let wanted = [wire::dma_map(flags, 0, 0, 0x4000), wire::dma_map(flags, 0x4000, 0x10_0000, 0x4000)];
    assert_eq!(asked.iter().map(|asked| asked.payload.clone()).collect::<Vec<_>>(), wanted);
    assert!(asked.iter().all(|asked| asked.descriptors.len() == 1));
    // It may use messages all the same.
    ram.write_slice(&[6; 4], GuestAddress(0x10_0000)).unwrap();
    let (_, answer) = server.ask(Command::DmaRead, &wire::dma_access(0x10_0000, 4));
    assert_eq!(answer[ACCESS..], [6; 4]);
    // Private memory cannot be given to anybody.
    let (_server, socket) = Server::good();
    let host = UserServer::start("/run/x", socket, super::tests::ram(), None).unwrap();
    assert!(host.share_ram().is_err());
}
