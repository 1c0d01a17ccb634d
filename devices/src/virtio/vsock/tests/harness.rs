// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device behind its transport, with a driver that the tests play.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use iommu_bounce::{DmaMapper, Permissions};
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::guest::{CID, Guest, Ports, line};
use crate::dma::{DeviceMemory, DmaTable, FaultRelay, TableMapper, fault_relay};
use crate::pci::PciDevice;
use crate::pci::regs::{COMMAND, COMMAND_BUS_MASTER, COMMAND_IO, COMMAND_MEMORY};
use crate::platform::test_support::Witness;
use crate::ram::Ram;
use crate::virtio::VirtioPciDevice;
use crate::virtio::test_support::{FakeDoorbells, FakeMsi};
use crate::virtio::vsock::packet::Header;
use crate::virtio::vsock::spec::{HEADER, op, queue};
use crate::virtio::vsock::{Listener, VirtioVsock, VsockParams, create};

pub(super) const RAM: usize = 0x10_0000;
const NOTIFY_PORT: u64 = 0xc000;
/// How far IOVAs are from guest-physical addresses where the device is behind an IOMMU.
const OFFSET: u64 = 0x1000_0000;
/// Rings of the first queue; those of the next one are behind them.
const RINGS: [u64; 3] = [0x1000, 0x2000, 0x3000];
const RINGS_SIZE: u64 = 0x3000;
/// Buffers of the first queue; those of the next one are behind them.
const BUFFERS: u64 = 0x2_0000;
const BUFFERS_SIZE: u64 = 0x2_0000;
/// Bytes of a chain's buffers.
const BUFFER: u64 = 0x8000;
/// Chains that may be under way in a queue, and descriptors of each.
pub(super) const CHAINS: u16 = 4;
const EACH: u16 = 4;

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;

/// A descriptor: address, length, flags.
pub(super) type Part = (u64, u32, u16);

pub(super) struct Harness {
    pub(super) ram: Arc<Ram>,
    pub(super) function: Arc<VirtioPciDevice>,
    pub(super) device: Arc<VirtioVsock>,
    pub(super) witness: Arc<Witness>,
    pub(super) doorbells: Arc<FakeDoorbells>,
    pub(super) relay: FaultRelay,
    mapper: Option<TableMapper>,
    dir: TempDir,
    /// Elements that were put into the available ring, and of the used ring that were looked at, by queue.
    added: [u16; 3],
    seen: [u16; 3],
}

impl Harness {
    pub(super) fn new(translated: bool) -> Self {
        let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), RAM)]).unwrap());
        let (sender, relay) = fault_relay();
        let table = translated.then(|| Arc::new(DmaTable::new("vsock", ram.clone(), Some((8, sender)))));
        let memory = table.clone().map_or_else(|| DeviceMemory::all_ram(ram.clone()), DeviceMemory::mapped);
        let (witness, doorbells) = (Arc::new(Witness::default()), Arc::new(FakeDoorbells::default()));
        let dir = tempfile::tempdir().unwrap();
        let params = VsockParams {
            id: "_vsock".into(),
            cid: u32::try_from(CID).unwrap(),
            listener: Listener::bind(&dir.path().join("s")).unwrap(),
            connections: 16,
            memory,
            msi: Arc::new(FakeMsi::default()),
            doorbells: Some(doorbells.clone()),
            observer: Some(witness.clone()),
        };
        let (function, device) = create(params).unwrap();
        let command = COMMAND_BUS_MASTER | COMMAND_MEMORY | COMMAND_IO;
        function.assign_bar(1, NOTIFY_PORT);
        function.write_config(COMMAND, &command.to_le_bytes());
        function.bar_moved(1, NOTIFY_PORT).unwrap();
        let mapper = table.map(TableMapper::new);
        let (added, seen) = ([0; 3], [0; 3]);
        let mut harness = Self { ram, function, device, witness, doorbells, relay, mapper, dir, added, seen };
        harness.map();
        harness
    }

    /// A device whose driver is ready.
    pub(super) fn started(translated: bool) -> Self {
        let mut harness = Self::new(translated);
        harness.start();
        harness
    }

    pub(super) fn offset(&self) -> u64 {
        if self.mapper.is_some() { OFFSET } else { 0 }
    }

    /// Maps all RAM page by page, so that nothing of it lies together for the device.
    fn map(&mut self) {
        let Some(mapper) = &mut self.mapper else { return };
        for page in (0..RAM as u64).step_by(0x1000) {
            let slice = self.ram.get_slice(GuestAddress(page), 0x1000).unwrap();
            mapper.map(page + OFFSET, slice, Permissions::READ | Permissions::WRITE).unwrap();
        }
    }

    pub(super) fn write(&self, offset: u64, data: &[u8]) {
        self.function.write_bar(0, offset, data);
    }

    pub(super) fn status(&self) -> u8 {
        let mut status = [0];
        self.function.read_bar(0, 20, &mut status);
        status[0]
    }

    /// Sets the device up as a driver does.
    pub(super) fn start(&mut self) {
        self.start_queues(3);
    }

    /// The same with the first queues only.
    pub(super) fn start_queues(&mut self, count: u16) {
        self.write(20, &[1]);
        self.write(20, &[3]);
        let high: u32 = if self.mapper.is_some() { 3 } else { 1 };
        self.write(8, &1u32.to_le_bytes());
        self.write(12, &high.to_le_bytes());
        self.write(20, &[11]);
        assert_eq!(self.status(), 11, "features are accepted");
        for number in 0..count {
            self.write(22, &number.to_le_bytes());
            self.write(24, &(CHAINS * EACH).to_le_bytes());
            for (place, ring) in [32, 40, 48].into_iter().zip(RINGS) {
                let ring = ring + RINGS_SIZE * u64::from(number) + self.offset();
                self.write(place, &ring.to_le_bytes());
            }
            self.write(28, &1u16.to_le_bytes());
        }
        self.write(20, &[15]);
    }

    /// Takes the device away from its driver, with its rings.
    pub(super) fn reset(&mut self) {
        self.write(20, &[0]);
        assert_eq!(self.status(), 0);
        for number in 0..3 {
            for ring in RINGS {
                self.ram.write_slice(&[0; 0x1000], GuestAddress(ring + RINGS_SIZE * number)).unwrap();
            }
        }
        (self.added, self.seen) = ([0; 3], [0; 3]);
    }

    /// Plays the driver of `old` further.
    pub(super) fn continue_from(&mut self, old: &Self) {
        (self.added, self.seen) = (old.added, old.seen);
    }

    /// Puts a chain of these buffers into a queue, and tells of it.
    pub(super) fn add(&mut self, queue: u16, parts: &[Part]) {
        let [table, available, _] = RINGS.map(|ring| ring + RINGS_SIZE * u64::from(queue));
        let number = self.added[usize::from(queue)];
        let head = number % CHAINS * EACH;
        for (index, (address, len, flags)) in (head..).zip(parts) {
            let place = table + 16 * u64::from(index);
            self.ram.write_obj(*address, GuestAddress(place)).unwrap();
            self.ram.write_obj(*len, GuestAddress(place + 8)).unwrap();
            self.ram.write_obj(*flags, GuestAddress(place + 12)).unwrap();
            self.ram.write_obj(index + 1, GuestAddress(place + 14)).unwrap();
        }
        let slot = u64::from(number % (CHAINS * EACH));
        self.ram.write_obj(head, GuestAddress(available + 4 + 2 * slot)).unwrap();
        self.added[usize::from(queue)] = number.wrapping_add(1);
        self.ram.write_obj(number.wrapping_add(1), GuestAddress(available + 2)).unwrap();
        self.ring(queue);
    }

    /// As the host's kernel does it.
    pub(super) fn ring(&self, queue: u16) {
        self.function.write_bar(1, 4 * u64::from(queue), &queue.to_le_bytes());
    }

    /// The buffers of the chain that is added next.
    pub(super) fn place(&self, queue: u16) -> u64 {
        let number = self.added[usize::from(queue)] % CHAINS;
        BUFFERS + BUFFERS_SIZE * u64::from(queue) + BUFFER * u64::from(number)
    }

    /// Gives the device a buffer for packets, in three parts.
    pub(super) fn give(&mut self) {
        let at = self.place(queue::RX) + self.offset();
        self.add(queue::RX, &[(at, 20, WRITE | NEXT), (at + 20, 0x1000, WRITE | NEXT), (at + 0x1014, 0x3000, WRITE)]);
    }

    /// Gives as many as there may be.
    pub(super) fn give_all(&mut self) {
        (0..CHAINS).for_each(|_| self.give());
    }

    pub(super) fn used(&self, queue: u16) -> u16 {
        let ring = RINGS[2] + RINGS_SIZE * u64::from(queue);
        self.ram.read_obj(GuestAddress(ring + 2)).unwrap()
    }

    /// The next used chain of a queue: where its buffers are, and the bytes that were written. Waits for it.
    pub(super) fn wait_used(&mut self, queue: u16) -> (u64, u32) {
        let seen = self.seen[usize::from(queue)];
        wait_until(|| self.used(queue) != seen);
        self.seen[usize::from(queue)] = seen.wrapping_add(1);
        let element = RINGS[2] + RINGS_SIZE * u64::from(queue) + 4 + 8 * u64::from(seen % (CHAINS * EACH));
        let head: u32 = self.ram.read_obj(GuestAddress(element)).unwrap();
        let number = u64::from(head) / u64::from(EACH);
        let len = self.ram.read_obj(GuestAddress(element + 4)).unwrap();
        (BUFFERS + BUFFERS_SIZE * u64::from(queue) + BUFFER * number, len)
    }

    /// The next packet of the device. Another buffer is given for it.
    pub(super) fn receive(&mut self) -> (Header, Vec<u8>) {
        let (place, len) = self.wait_used(queue::RX);
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        self.ram.read_slice(&mut bytes, GuestAddress(place)).unwrap();
        let data = bytes.split_off(HEADER);
        let header = Header::decode(bytes.first_chunk().unwrap());
        assert_eq!(header.len as usize, data.len());
        self.give();
        (header, data)
    }

    /// Sends a packet in three parts and waits until it was taken.
    pub(super) fn send(&mut self, header: &Header, data: &[u8]) {
        let place = self.place(queue::TX);
        let bytes = [&header.encode(), data].concat();
        self.ram.write_slice(&bytes, GuestAddress(place)).unwrap();
        let (at, len) = (place + self.offset(), u32::try_from(bytes.len()).unwrap());
        let (first, second) = (30, (len - 30) / 2);
        self.add(
            queue::TX,
            &[(at, first, NEXT), (at + 30, second, NEXT), (at + 30 + u64::from(second), len - first - second, 0)],
        );
        self.wait_used(queue::TX);
    }

    pub(super) fn say(&mut self, ports: Ports, op: u16) {
        self.send(&Guest::header(ports, op), &[]);
    }

    pub(super) fn write_data(&mut self, ports: Ports, data: &[u8]) {
        let len = u32::try_from(data.len()).unwrap();
        self.send(&Header { len, ..Guest::header(ports, op::RW) }, data);
    }

    /// A program of the host that serves `port`.
    pub(super) fn serve(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.dir.path().join(format!("s_{port}"))).unwrap()
    }

    /// A program of the host that connects to the guest's `port`.
    pub(super) fn client(&self, port: u32) -> UnixStream {
        use std::io::Write;
        let mut client = UnixStream::connect(self.dir.path().join("s")).unwrap();
        client.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        client
    }

    /// The same, connected.
    pub(super) fn connected(&mut self, port: u32) -> (Ports, UnixStream) {
        let mut client = self.client(port);
        let (request, _) = self.receive();
        assert_eq!((request.op, request.dst_port, request.dst_cid), (op::REQUEST, port, CID));
        let ports = Ports { guest: port, host: request.src_port };
        self.say(ports, op::RESPONSE);
        assert_eq!(line(&mut client), format!("OK {}\n", ports.host));
        (ports, client)
    }
}

pub(super) fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    }
}
