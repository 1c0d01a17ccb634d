// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A disk behind its transport, with a driver that the tests play.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iommu_bounce::{DmaMapper, Permissions};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use crate::dma::{DeviceMemory, DmaTable, FaultRelay, TableMapper, fault_relay};
use crate::pci::PciDevice;
use crate::pci::regs::{COMMAND, COMMAND_BUS_MASTER, COMMAND_IO, COMMAND_MEMORY};
use crate::platform::test_support::Witness;
use crate::ram::Ram;
use crate::rate_limit::{RateLimiter, RateLimits};
use crate::virtio::VirtioPciDevice;
use crate::virtio::block::spec::{feature, request, status};
use crate::virtio::block::{BlockParams, Image, IoMode, VirtioBlock, create};
use crate::virtio::test_support::{FakeDoorbells, FakeMsi};

pub(super) const RAM: usize = 0x20_0000;
pub(super) const QUEUE_SIZE: u16 = 64;
/// Where data is, as guest RAM numbers it.
pub(super) const DATA: u64 = 0x10_0000;
/// How far IOVAs are from guest-physical addresses where the device is behind an IOMMU.
pub(super) const OFFSET: u64 = 0x1000_0000;
const NOTIFY_PORT: u64 = 0xc000;
/// Rings of the first queue; those of the next one are behind them.
pub(super) const RINGS: [u64; 3] = [0x1000, 0x2000, 0x3000];
const RINGS_SIZE: u64 = 0x3000;
/// Headers and status bytes, by descriptor.
const HEADERS: u64 = 0x2_0000;
const STATUSES: u64 = 0x3_0000;

/// Where the disk's name goes, in guest RAM.
const NAME: u64 = 0x4_0000;

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;

/// What kind of disk is tested.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) mode: IoMode,
    pub(super) translated: bool,
    /// What buffers must be aligned to, or they are copied.
    pub(super) memory: usize,
    pub(super) read_only: bool,
    pub(super) queues: u16,
    /// Features that the driver does not accept.
    pub(super) without: u64,
    pub(super) limits: Option<RateLimits>,
}

pub(super) const PLAIN: Kind =
    Kind { mode: IoMode::Plain, translated: false, memory: 1, read_only: false, queues: 1, without: 0, limits: None };
pub(super) const RING: Kind = Kind { mode: IoMode::Async, ..PLAIN };

/// All ways by which bytes come from image to guest.
pub(super) fn kinds() -> impl Iterator<Item = Kind> {
    let modes = [PLAIN, RING].into_iter();
    let placed = modes.flat_map(|kind| [false, true].map(|translated| Kind { translated, ..kind }));
    placed.flat_map(|kind| [1, 512].map(|memory| Kind { memory, ..kind }))
}

pub(super) struct Harness {
    pub(super) ram: Arc<Ram>,
    pub(super) function: Arc<VirtioPciDevice>,
    pub(super) device: Arc<VirtioBlock>,
    pub(super) witness: Arc<Witness>,
    pub(super) mapper: Option<TableMapper>,
    pub(super) relay: FaultRelay,
    /// The image, as the host sees it.
    pub(super) content: File,
    kind: Kind,
    /// Elements that were put into the available ring, by queue.
    pub(super) added: Vec<u16>,
    /// The next descriptor, by queue.
    descriptor: Vec<u16>,
}

/// A file of these bytes.
pub(super) fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

impl Harness {
    /// A disk of this content, set up by its driver.
    pub(super) fn new(kind: Kind, content: File) -> Self {
        let bytes = content.metadata().unwrap().len();
        let mut harness = Self::silent(kind, content, bytes);
        harness.start();
        harness
    }

    /// The same before its driver came; the image is said to have so many bytes.
    pub(super) fn silent(kind: Kind, content: File, bytes: u64) -> Self {
        let image = Image::made_up(content.try_clone().unwrap(), bytes, kind.memory, kind.read_only);
        Self::of_image(kind, image, content)
    }

    /// A disk of this image before its driver came.
    pub(super) fn of_image(kind: Kind, image: Image, content: File) -> Self {
        let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), RAM)]).unwrap());
        let (sender, relay) = fault_relay();
        let table = kind.translated.then(|| Arc::new(DmaTable::new("disk", ram.clone(), Some((8, sender)))));
        let memory = table.clone().map_or_else(|| DeviceMemory::all_ram(ram.clone()), DeviceMemory::mapped);
        let witness = Arc::new(Witness::default());
        let params = BlockParams {
            id: "disk".into(),
            image,
            serial: "a-serial".into(),
            queues: kind.queues,
            queue_size: QUEUE_SIZE,
            mode: kind.mode,
            limiter: kind.limits.map(|limits| Arc::new(RateLimiter::new(limits, Instant::now()))),
            affinity: BTreeMap::new(),
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
        let (added, descriptor) = (vec![0; kind.queues.into()], vec![0; kind.queues.into()]);
        let mapper = table.map(TableMapper::new);
        Self { ram, function, device, witness, mapper, relay, content, kind, added, descriptor }
    }

    pub(super) fn offset(&self) -> u64 {
        if self.mapper.is_some() { OFFSET } else { 0 }
    }

    pub(super) fn map(&mut self, gpa: u64, len: u64, permissions: Permissions) {
        let slice = self.ram.get_slice(GuestAddress(gpa), usize::try_from(len).unwrap()).unwrap();
        if let Some(mapper) = &mut self.mapper {
            mapper.map(gpa + OFFSET, slice, permissions).unwrap();
        }
    }

    pub(super) fn unmap(&mut self, gpa: u64, len: u64) {
        self.mapper.as_mut().unwrap().unmap(gpa + OFFSET, len).unwrap();
    }

    pub(super) fn write(&self, offset: u64, data: &[u8]) {
        self.function.write_bar(0, offset, data);
    }

    pub(super) fn status(&self) -> u8 {
        let mut status = [0];
        self.function.read_bar(0, 20, &mut status);
        status[0]
    }

    pub(super) fn generation(&self) -> u8 {
        let mut generation = [0];
        self.function.read_bar(0, 21, &mut generation);
        generation[0]
    }

    /// The device configuration at `offset`.
    pub(super) fn config<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.function.read_bar(0, 0x2000 + offset, &mut bytes);
        bytes
    }

    pub(super) fn features(&self) -> u64 {
        let half = |select: u32| {
            self.write(0, &select.to_le_bytes());
            let mut value = [0; 4];
            self.function.read_bar(0, 4, &mut value);
            u64::from(u32::from_le_bytes(value))
        };
        half(0) | half(1) << 32
    }

    pub(super) fn map_all(&mut self) {
        let all = Permissions::READ | Permissions::WRITE;
        self.map(0, DATA, all);
        // As the guest's driver maps it: page by page.
        for page in (DATA..RAM as u64).step_by(0x1000) {
            self.map(page, 0x1000, all);
        }
    }

    /// Sets the device up as a driver does.
    pub(super) fn start(&mut self) {
        self.map_all();
        self.begin_with(RINGS);
    }

    /// The same with the rings of the first queue at these places, all of which are mapped.
    pub(super) fn begin_with(&mut self, rings: [u64; 3]) {
        let offset = self.offset();
        self.write(20, &[1]);
        self.write(20, &[3]);
        // Without EVENT_IDX: these tests look at the rings.
        let accepted = self.features() & !self.kind.without & !(1 << 29);
        for half in [0u32, 1] {
            self.write(8, &half.to_le_bytes());
            self.write(12, &((accepted >> (32 * half)) & 0xffff_ffff).to_le_bytes()[..4]);
        }
        self.write(20, &[11]);
        assert_eq!(self.status(), 11, "features are accepted");
        for queue in 0..self.kind.queues {
            self.write(22, &queue.to_le_bytes());
            self.write(24, &QUEUE_SIZE.to_le_bytes());
            for (place, ring) in [32, 40, 48].into_iter().zip(rings) {
                self.write(place, &(ring + RINGS_SIZE * u64::from(queue) + offset).to_le_bytes());
            }
            self.write(28, &1u16.to_le_bytes());
        }
        self.write(20, &[15]);
    }

    /// Puts a chain into a queue: addresses as the driver names them, lengths and flags.
    pub(super) fn chain(&mut self, queue: u16, buffers: &[(u64, u32, u16)]) -> u16 {
        let place = usize::from(queue);
        let rings = RINGS.map(|ring| ring + RINGS_SIZE * u64::from(queue));
        let head = self.descriptor[place];
        for (address, len, flags) in buffers {
            let index = self.descriptor[place];
            let at = rings[0] + 16 * u64::from(index);
            self.descriptor[place] = (index + 1) % QUEUE_SIZE;
            self.ram.write_obj(*address, GuestAddress(at)).unwrap();
            self.ram.write_obj(*len, GuestAddress(at + 8)).unwrap();
            self.ram.write_obj(*flags, GuestAddress(at + 12)).unwrap();
            self.ram.write_obj(self.descriptor[place], GuestAddress(at + 14)).unwrap();
        }
        let slot = u64::from(self.added[place] % QUEUE_SIZE);
        self.ram.write_obj(head, GuestAddress(rings[1] + 4 + 2 * slot)).unwrap();
        self.added[place] = self.added[place].wrapping_add(1);
        self.ram.write_obj(self.added[place], GuestAddress(rings[1] + 2)).unwrap();
        head
    }

    /// Puts a request into a queue; `data` are places in guest RAM. Returns where its status comes.
    pub(super) fn add(&mut self, queue: u16, kind: u32, sector: u64, data: &[(u64, u32)]) -> u64 {
        let offset = self.offset();
        let number = u64::from(queue) << 8 | u64::from(self.descriptor[usize::from(queue)]);
        let (header, status) = (HEADERS + 16 * number, STATUSES + number);
        self.ram.write_obj(kind, GuestAddress(header)).unwrap();
        self.ram.write_obj(0u32, GuestAddress(header + 4)).unwrap();
        self.ram.write_obj(sector, GuestAddress(header + 8)).unwrap();
        self.ram.write_obj(0xffu8, GuestAddress(status)).unwrap();
        let writes = matches!(kind, request::IN | request::GET_ID);
        let flags = NEXT | if writes { WRITE } else { 0 };
        let mut chain = vec![(header + offset, 16, NEXT)];
        chain.extend(data.iter().map(|(address, len)| (address + offset, *len, flags)));
        chain.push((status + offset, 1, WRITE));
        self.chain(queue, &chain);
        status
    }

    pub(super) fn ring(&self, queue: u16) {
        self.function.write_bar(1, 4 * u64::from(queue), &queue.to_le_bytes());
    }

    pub(super) fn used(&self, queue: u16) -> u16 {
        self.ram.read_obj(GuestAddress(RINGS[2] + RINGS_SIZE * u64::from(queue) + 2)).unwrap()
    }

    /// The length of the last used element.
    pub(super) fn last_len(&self, queue: u16) -> u32 {
        let slot = u64::from(self.used(queue).wrapping_sub(1) % QUEUE_SIZE);
        self.ram.read_obj(GuestAddress(RINGS[2] + RINGS_SIZE * u64::from(queue) + 4 + 8 * slot + 4)).unwrap()
    }

    /// Waits until all requests are answered.
    pub(super) fn served(&self, queue: u16) {
        wait_until(|| self.used(queue) == self.added[usize::from(queue)]);
    }

    pub(super) fn byte(&self, address: u64) -> u8 {
        self.ram.read_obj(GuestAddress(address)).unwrap()
    }

    /// Waits until all requests of the first queue have begun, none of which ends meanwhile: one that is answered at once comes behind
    /// them.
    pub(super) fn begun(&mut self) {
        let before = self.used(0);
        let status = self.add(0, request::GET_ID, 0, &[(NAME, 20)]);
        self.ring(0);
        wait_until(|| self.used(0) != before);
        assert_eq!((self.byte(status), self.used(0)), (status::OK, before.wrapping_add(1)));
    }

    /// Makes a request in the first queue; returns its status.
    pub(super) fn call(&mut self, kind: u32, sector: u64, data: &[(u64, u32)]) -> u8 {
        let status = self.add(0, kind, sector, data);
        self.ring(0);
        self.served(0);
        self.byte(status)
    }

    /// Makes a discard or a request to write zeroes, of sectors, counts and flags.
    pub(super) fn call_ranges(&mut self, kind: u32, ranges: &[(u64, u32, u32)]) -> u8 {
        for (at, (sector, count, flags)) in (DATA..).step_by(16).zip(ranges) {
            self.ram.write_obj(*sector, GuestAddress(at)).unwrap();
            self.ram.write_obj(*count, GuestAddress(at + 8)).unwrap();
            self.ram.write_obj(*flags, GuestAddress(at + 12)).unwrap();
        }
        self.call(kind, 0, &[(DATA, u32::try_from(16 * ranges.len()).unwrap())])
    }

    pub(super) fn fill(&self, address: u64, bytes: &[u8]) {
        self.ram.write_slice(bytes, GuestAddress(address)).unwrap();
    }

    pub(super) fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    /// Bytes of the image.
    pub(super) fn image(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.content.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }
}

pub(super) fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Bytes that differ from place to place.
pub(super) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at * 7 % 251).unwrap() ^ seed).collect()
}

/// A driver that knows no flushes.
pub(super) const NO_FLUSH: u64 = feature::FLUSH;
