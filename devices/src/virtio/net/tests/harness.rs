// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A driver of the device, and the other end of its interface.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use iommu_bounce::{DmaMapper, Permissions};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use crate::dma::{DeviceMemory, DmaTable, FaultRelay, TableMapper, fault_relay};
use crate::pci::PciDevice;
use crate::pci::regs::{COMMAND, COMMAND_BUS_MASTER, COMMAND_IO, COMMAND_MEMORY};
use crate::platform::test_support::Witness;
use crate::ram::Ram;
use crate::rate_limit::RateLimits;
use crate::sync::lock;
use crate::virtio::VirtioPciDevice;
use crate::virtio::net::spec::{CSUM, CTRL_VQ, GUEST_CSUM, GUEST_TSO4, HEADER_BYTES, MAC, MQ, MRG_RXBUF};
use crate::virtio::net::{Carrier, NetParams, NetTraits, Offloads, VirtioNet, create};
use crate::virtio::test_support::{FakeDoorbells, FakeMsi};

pub(super) const MAC_ADDRESS: [u8; 6] = [2, 0, 0, 0, 0, 7];
/// Elements of each queue.
pub(super) const QUEUE: u16 = 16;
/// How far IOVAs are from guest-physical addresses where the device is behind an IOMMU.
pub(super) const OFFSET: u64 = 0x1000_0000;
/// Buffers of the tests.
pub(super) const BUFFERS: u64 = 0x8_0000;
pub(super) const RECEIVE: u16 = 0;
pub(super) const TRANSMIT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const NEXT: u16 = 1;
const NOTIFY_PORT: u64 = 0xc000;
const VERSION_1: u64 = 1 << 32;
const ACCESS_PLATFORM: u64 = 1 << 33;

/// Sockets for pairs of queues, and what the device asked for.
pub(super) struct Host {
    files: Vec<File>,
    asked: Arc<Mutex<Asked>>,
}

/// What the device asked of the host last.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) offloads: Offloads,
    pub(super) pairs: u16,
    /// The host refuses from now on.
    pub(super) refuses: bool,
}

impl Host {
    /// One pair, whose packets go to `file` and come from there.
    pub(super) fn of(file: File) -> Self {
        Self { files: vec![file], asked: Arc::default() }
    }
}

impl Carrier for Host {
    fn file(&self, pair: u16) -> &File {
        &self.files[usize::from(pair)]
    }

    fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        lock(&self.asked).offloads = offloads;
        Ok(())
    }

    fn set_pairs(&self, pairs: u16) -> io::Result<()> {
        let mut asked = lock(&self.asked);
        if asked.refuses {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        asked.pairs = pairs;
        Ok(())
    }
}

pub(super) struct Harness {
    pub(super) ram: Arc<Ram>,
    pub(super) function: Arc<VirtioPciDevice>,
    pub(super) device: Arc<VirtioNet>,
    pub(super) witness: Arc<Witness>,
    pub(super) relay: FaultRelay,
    /// The other ends of the interface.
    pub(super) host: Vec<UnixDatagram>,
    pub(super) asked: Arc<Mutex<Asked>>,
    mapper: Option<TableMapper>,
    /// Descriptors and elements that were put into each queue.
    descriptors: [u16; 5],
    pub(super) added: [u16; 5],
}

/// Descriptors, available ring and used ring of a queue.
pub(super) fn rings(queue: u16) -> [u64; 3] {
    let base = 0x1_0000 + 0x4000 * u64::from(queue);
    [base, base + 0x1000, base + 0x2000]
}

impl Harness {
    pub(super) fn new(pairs: u16, translated: bool) -> Self {
        Self::limited(pairs, translated, None)
    }

    /// The same, with a limit on the rate.
    pub(super) fn limited(pairs: u16, translated: bool, limits: Option<RateLimits>) -> Self {
        let (mut files, mut host) = (Vec::new(), Vec::new());
        for _ in 0..pairs {
            let (ours, theirs) = UnixDatagram::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            theirs.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            files.push(File::from(OwnedFd::from(ours)));
            host.push(theirs);
        }
        Self::on(files, host, translated, limits)
    }

    /// A device of one pair on a file of the host's.
    pub(super) fn on_file(file: File) -> Self {
        Self::on(vec![file], Vec::new(), false, None)
    }

    fn on(files: Vec<File>, host: Vec<UnixDatagram>, translated: bool, limits: Option<RateLimits>) -> Self {
        let pairs = u16::try_from(files.len()).unwrap();
        let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap());
        let (sender, relay) = fault_relay();
        let table = translated.then(|| Arc::new(DmaTable::new("net", ram.clone(), Some((8, sender)))));
        let memory = table.clone().map_or_else(|| DeviceMemory::all_ram(ram.clone()), DeviceMemory::mapped);
        let witness = Arc::new(Witness::default());
        let asked = Arc::new(Mutex::default());
        let traits = NetTraits {
            mac: MAC_ADDRESS,
            mtu: 1500,
            pairs,
            queue_size: QUEUE,
            csum: true,
            tso: true,
            uso: false,
            merges: true,
        };
        let params = NetParams {
            id: "_net0".into(),
            carrier: Box::new(Host { files, asked: asked.clone() }),
            traits,
            limits,
            memory,
            msi: Arc::new(FakeMsi::default()),
            doorbells: Some(Arc::new(FakeDoorbells::default())),
            observer: Some(witness.clone()),
        };
        let (function, device) = create(params).unwrap();
        let command = COMMAND_BUS_MASTER | COMMAND_MEMORY | COMMAND_IO;
        function.assign_bar(1, NOTIFY_PORT);
        function.write_config(COMMAND, &command.to_le_bytes());
        function.bar_moved(1, NOTIFY_PORT).unwrap();
        let mapper = table.map(TableMapper::new);
        Self { ram, function, device, witness, relay, host, asked, mapper, descriptors: [0; 5], added: [0; 5] }
    }

    pub(super) fn offset(&self) -> u64 {
        if self.mapper.is_some() { OFFSET } else { 0 }
    }

    fn map(&mut self, gpa: u64, len: u64) {
        let slice = self.ram.get_slice(GuestAddress(gpa), usize::try_from(len).unwrap()).unwrap();
        if let Some(mapper) = &mut self.mapper {
            mapper.map(gpa + OFFSET, slice, Permissions::READ | Permissions::WRITE).unwrap();
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

    /// Sets the device up as a driver does, with buffers that may come in several, or not.
    pub(super) fn start(&mut self, merges: bool) {
        let queues = if self.host.len() > 1 { 2 * self.host.len() + 1 } else { 2 };
        let queues: Vec<u16> = (0..u16::try_from(queues).unwrap()).collect();
        for queue in &queues {
            for ring in rings(*queue) {
                self.map(ring, 0x1000);
            }
        }
        self.map(BUFFERS, 0x4_0000);
        let mut features = MAC | CSUM | GUEST_CSUM | GUEST_TSO4;
        features |= if merges { MRG_RXBUF } else { 0 };
        features |= if self.host.len() > 1 { MQ | CTRL_VQ } else { 0 };
        self.start_with(features, &queues);
    }

    /// The same with these features and queues. Their memory is mapped.
    pub(super) fn start_with(&mut self, features: u64, queues: &[u16]) {
        let mut features = features | VERSION_1;
        features |= if self.mapper.is_some() { ACCESS_PLATFORM } else { 0 };
        self.write(20, &[1]);
        self.write(20, &[3]);
        for (select, half) in features.to_le_bytes().chunks(4).enumerate() {
            self.write(8, &u32::try_from(select).unwrap().to_le_bytes());
            self.write(12, half);
        }
        self.write(20, &[11]);
        assert_eq!(self.status(), 11, "features are accepted");
        for queue in queues.iter().copied() {
            self.write(22, &queue.to_le_bytes());
            self.write(24, &QUEUE.to_le_bytes());
            for (place, ring) in [32, 40, 48].into_iter().zip(rings(queue)) {
                self.write(place, &(ring + self.offset()).to_le_bytes());
            }
            self.write(28, &1u16.to_le_bytes());
        }
        self.write(20, &[15]);
    }

    /// Puts a chain of buffers into a queue.
    pub(super) fn add(&mut self, queue: u16, buffers: &[(u64, u32, u16)]) {
        let place = usize::from(queue);
        let [table, available, _] = rings(queue);
        let first = self.descriptors[place] % QUEUE;
        for (index, (address, len, flags)) in buffers.iter().enumerate() {
            let slot = self.descriptors[place] % QUEUE;
            self.descriptors[place] += 1;
            let next = if index + 1 < buffers.len() { NEXT } else { 0 };
            let descriptor = GuestAddress(table + 16 * u64::from(slot));
            self.ram.write_obj(*address, descriptor).unwrap();
            self.ram.write_obj(*len, GuestAddress(descriptor.0 + 8)).unwrap();
            self.ram.write_obj(*flags | next, GuestAddress(descriptor.0 + 12)).unwrap();
            self.ram.write_obj((slot + 1) % QUEUE, GuestAddress(descriptor.0 + 14)).unwrap();
        }
        let element = u64::from(self.added[place] % QUEUE);
        self.ram.write_obj(first, GuestAddress(available + 4 + 2 * element)).unwrap();
        self.added[place] += 1;
        self.ram.write_obj(self.added[place], GuestAddress(available + 2)).unwrap();
    }

    pub(super) fn ring(&self, queue: u16) {
        self.function.write_bar(1, 4 * u64::from(queue), &queue.to_le_bytes());
    }

    pub(super) fn used(&self, queue: u16) -> u16 {
        self.ram.read_obj(GuestAddress(rings(queue)[2] + 2)).unwrap()
    }

    /// Bytes that were written to the buffers of a used element.
    pub(super) fn used_len(&self, queue: u16, element: u16) -> u32 {
        let place = rings(queue)[2] + 4 + 8 * u64::from(element % QUEUE) + 4;
        self.ram.read_obj(GuestAddress(place)).unwrap()
    }

    pub(super) fn wait_used(&self, queue: u16, count: u16) {
        wait_until(|| self.used(queue) == count);
    }

    pub(super) fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    /// Has the host give a packet.
    pub(super) fn give(&self, pair: usize, frame: &[u8]) {
        self.host[pair].send(&[&[0; HEADER_BYTES], frame].concat()).unwrap();
    }

    /// Sends a packet as the guest.
    pub(super) fn send(&mut self, frame: &[u8]) {
        let packet = [&[0; HEADER_BYTES], frame].concat();
        let place = BUFFERS + 0x2_0000;
        self.ram.write_slice(&packet, GuestAddress(place)).unwrap();
        let len = u32::try_from(packet.len()).unwrap();
        let place = place + self.offset();
        // The header has a buffer of its own, as old drivers have it.
        self.add(TRANSMIT, &[(place, 12, 0), (place + 12, len - 12, 0)]);
        self.ring(TRANSMIT);
    }
}

pub(super) fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A frame of so many bytes.
pub(super) fn frame(len: usize) -> Vec<u8> {
    (0..len).map(|index| u8::try_from(index % 251).unwrap()).collect()
}
