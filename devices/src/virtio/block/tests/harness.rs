// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A disk device with its PCI transport. The tests act as the driver of the disk.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

use iommu_bounce::{DmaMapper, Permissions};
use vm_memory::{Bytes, GuestAddress};

use crate::rate_limit::{RateLimiter, RateLimits};
use crate::virtio::block::spec::{feature, request, status};
use crate::virtio::block::{BlockParams, Image, IoMode, VirtioBlock, create};
pub(super) use crate::virtio::test_driver::{NEXT, OFFSET, WRITE, changes, wait_until};
use crate::virtio::test_driver::{Rings, TestDriver, TestPlatform};
use crate::virtio::test_support::FakeMsi;

pub(super) const RAM: usize = 0x20_0000;
pub(super) const QUEUE_SIZE: u16 = 64;
/// Address of the data in guest RAM.
pub(super) const DATA: u64 = 0x10_0000;
/// Addresses of the first queue's rings. The next queue's rings follow them.
pub(super) const RINGS: [u64; 3] = [0x1000, 0x2000, 0x3000];
const QUEUES: Rings = Rings { first: RINGS, stride: 0x3000, size: QUEUE_SIZE };
/// Addresses of the first request header and of the first status byte. Each descriptor of each queue has its own header and status byte.
const HEADERS: u64 = 0x2_0000;
const STATUSES: u64 = 0x3_0000;

/// Guest RAM address of the buffer for the disk's serial number.
const NAME: u64 = 0x4_0000;

/// Properties of the disk under test.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) mode: IoMode,
    pub(super) translated: bool,
    /// Alignment of buffers that the kernel uses directly. Data in other buffers is copied.
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

/// Returns all combinations of I/O mode, translation by an IOMMU, and copying of data.
pub(super) fn kinds() -> impl Iterator<Item = Kind> {
    let modes = [PLAIN, RING].into_iter();
    let placed = modes.flat_map(|kind| [false, true].map(|translated| Kind { translated, ..kind }));
    placed.flat_map(|kind| [1, 512].map(|memory| Kind { memory, ..kind }))
}

pub(super) struct Medium {
    /// File of the image. The tests use the file to access the image's content from the host.
    pub(super) content: File,
    kind: Kind,
}

pub(super) type Harness = TestDriver<VirtioBlock, Medium>;

/// Creates a file with these bytes.
pub(super) fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

impl Harness {
    /// Creates a disk with this content, and initialises the disk as a driver does.
    pub(super) fn new(kind: Kind, content: File) -> Self {
        let bytes = content.metadata().unwrap().len();
        let mut harness = Self::silent(kind, content, bytes);
        harness.start();
        harness
    }

    /// Creates a disk like [`new`](Self::new), but without a driver. The image reports `bytes` as its size.
    pub(super) fn silent(kind: Kind, content: File, bytes: u64) -> Self {
        let image = Image::made_up(content.try_clone().unwrap(), bytes, kind.memory, kind.read_only);
        Self::of_image(kind, image, content)
    }

    /// Creates a disk from `image`, without a driver.
    pub(super) fn of_image(kind: Kind, image: Image, content: File) -> Self {
        let platform = TestPlatform::new(RAM, kind.translated);
        let params = BlockParams {
            id: "disk".into(),
            image,
            serial: "a-serial".into(),
            queues: kind.queues,
            queue_size: QUEUE_SIZE,
            mode: kind.mode,
            limiter: kind.limits.map(|limits| Arc::new(RateLimiter::new(limits, Instant::now()))),
            affinity: BTreeMap::new(),
            memory: platform.memory.clone(),
            msi: Arc::new(FakeMsi::default()),
            doorbells: Some(platform.doorbells.clone()),
            observer: Some(platform.recorder.clone()),
        };
        platform.drive(create(params).unwrap(), QUEUES, Medium { content, kind })
    }

    pub(super) fn unmap(&mut self, gpa: u64, len: u64) {
        self.mapper.as_mut().unwrap().unmap(gpa + OFFSET, len).unwrap();
    }

    pub(super) fn features(&self) -> u64 {
        let half = |select: u32| {
            self.write(0, &select.to_le_bytes());
            u64::from(u32::from_le_bytes(self.read(4)))
        };
        half(0) | half(1) << 32
    }

    pub(super) fn map_all(&mut self) {
        self.map(0, DATA, Permissions::READ | Permissions::WRITE);
        // Map page by page, as the guest's virtio-iommu driver does.
        self.map_pages((DATA..RAM as u64).step_by(0x1000));
    }

    /// Initialises the device as a driver does.
    pub(super) fn start(&mut self) {
        self.map_all();
        self.begin_with(RINGS);
    }

    /// Initialises the device with the first queue's rings at `rings`. The rings must already be mapped.
    pub(super) fn begin_with(&mut self, rings: [u64; 3]) {
        // Do not accept EVENT_IDX, because the tests inspect the rings.
        let accepted = self.features() & !self.kind.without & !(1 << 29);
        self.set_up_at(Rings { first: rings, ..QUEUES }, accepted, 0..self.kind.queues);
    }

    /// Adds a request to a queue. `data` has addresses and lengths in guest RAM. Returns the address of the status byte.
    pub(super) fn add(&mut self, queue: u16, kind: u32, sector: u64, data: &[(u64, u32)]) -> u64 {
        let offset = self.offset();
        let number = u64::from(queue) << 8 | u64::from(self.descriptors[usize::from(queue)]);
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

    pub(super) fn byte(&self, address: u64) -> u8 {
        self.ram.read_obj(GuestAddress(address)).unwrap()
    }

    /// Waits until all requests of the first queue have started. None of these requests may end during the call. The device starts requests
    /// in order. So this function adds one more request, which ends immediately, and waits for its answer.
    pub(super) fn begun(&mut self) {
        let before = self.used(0);
        let status = self.add(0, request::GET_ID, 0, &[(NAME, 20)]);
        self.ring(0);
        wait_until(|| self.used(0) != before);
        assert_eq!((self.byte(status), self.used(0)), (status::OK, before.wrapping_add(1)));
    }

    /// Makes a request in the first queue, and returns its status.
    pub(super) fn call(&mut self, kind: u32, sector: u64, data: &[(u64, u32)]) -> u8 {
        let status = self.add(0, kind, sector, data);
        self.ring(0);
        self.served(0);
        self.byte(status)
    }

    /// Makes a discard or write-zeroes request. Each range has a first sector, a number of sectors, and flags.
    pub(super) fn call_ranges(&mut self, kind: u32, ranges: &[(u64, u32, u32)]) -> u8 {
        for (at, (sector, count, flags)) in (DATA..).step_by(16).zip(ranges) {
            self.ram.write_obj(*sector, GuestAddress(at)).unwrap();
            self.ram.write_obj(*count, GuestAddress(at + 8)).unwrap();
            self.ram.write_obj(*flags, GuestAddress(at + 12)).unwrap();
        }
        self.call(kind, 0, &[(DATA, u32::try_from(16 * ranges.len()).unwrap())])
    }

    /// Returns `len` bytes of the image, from `offset` on.
    pub(super) fn image(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.content.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }
}

/// Returns `len` bytes that depend on their position and on `seed`.
pub(super) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at * 7 % 251).unwrap() ^ seed).collect()
}

/// Features that a driver without flush requests does not accept.
pub(super) const NO_FLUSH: u64 = feature::FLUSH;
