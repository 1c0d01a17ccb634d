// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Benchmark of disk reads. The benchmark measures the CPU time that a thread needs to serve requests.

use std::collections::BTreeMap;
use std::env::temp_dir;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, open};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::counters::Counts;
use super::disk::Disk;
use super::image::disk_image::Image;
use super::io::engine::IoMode;
use super::queue::requests::Requests;
use super::spec::{ID_BYTES, request, status};
use crate::ram::Ram;
use crate::scheduling::cpu_time;
use crate::virtio::byte_driver::{queue_at, silent_driver};
use crate::virtio::{Driver, LastRequests};
use crate::worker::{Orders, Task};

/// Queue size. A request takes three descriptors.
const SIZE: u16 = 256;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
/// Addresses of the request headers and of the status bytes. Each request has one header and one status byte.
const HEADERS: u64 = 0x4000;
const STATUSES: u64 = 0x6000;
const DATA: u64 = 0x10_0000;
/// Number of bytes that a request reads.
const BYTES: u32 = 4096;
/// Maximum number of requests that are in the queue at the same time.
const MOST: u16 = 64;

/// A disk whose image is in the host's page cache, and a driver that reads from the disk.
pub struct ReadLoad {
    ram: Arc<Ram>,
    requests: Requests,
    orders: Orders,
    added: u16,
    _doorbell: EventFd,
}

impl ReadLoad {
    /// Creates the disk and its driver. The disk uses io_uring if the host supports io_uring.
    ///
    /// # Panics
    /// The process runs out of memory or file descriptors.
    pub fn new() -> Self {
        let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), 2 << 20)]).expect("the range is valid"));
        let put =
            |place: u64, bytes: &[u8]| ram.write_slice(bytes, GuestAddress(place)).expect("the address is in RAM");
        for number in 0..MOST {
            let at = u64::from(number);
            let parts = [(HEADERS + 16 * at, 16, 1), (DATA + u64::from(BYTES) * at, BYTES, 3), (STATUSES + at, 1, 2)];
            for (part, (address, len, flags)) in (0..).zip(parts) {
                let index = number + MOST * part;
                let place = DESCRIPTORS + 16 * u64::from(index);
                put(place, &address.to_le_bytes());
                put(place + 8, &len.to_le_bytes());
                put(place + 12, &u16::to_le_bytes(flags));
                put(place + 14, &(index + MOST).to_le_bytes());
            }
            put(HEADERS + 16 * at, &request::IN.to_le_bytes());
            put(HEADERS + 16 * at + 8, &(8 * at).to_le_bytes());
        }
        for place in 0..SIZE {
            put(AVAILABLE + 4 + 2 * u64::from(place), &(place % MOST).to_le_bytes());
        }
        let queue = queue_at(SIZE, [DESCRIPTORS, AVAILABLE, USED]);
        let bytes = u64::from(BYTES) * u64::from(MOST);
        // Do not use a file in memory (tmpfs): Linux 6.18 hands reads of such files to kernel threads.
        let (flags, mode) = (OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
        let file = File::from(open(temp_dir(), flags, mode).expect("an unnamed file can be created"));
        file.write_all_at(&vec![7; bytes.try_into().expect("the length fits into usize")], 0)
            .expect("there is enough disk space");
        let disk = Disk {
            id: "disk".into(),
            image: Arc::new(Image::made_up(file, bytes, 1, false)),
            serial: [b'x'; ID_BYTES],
            counts: Counts::default(),
            mode: IoMode::Async,
            limiter: None,
            affinity: BTreeMap::new(),
        };
        let requests = Arc::new(LastRequests::new("load", 1, 1));
        let driver = Driver { requests, ..silent_driver(&ram, 0) };
        let doorbell = EventFd::new(EFD_NONBLOCK).expect("a file descriptor is free");
        let mut requests =
            Requests::new(0, queue, driver, Arc::new(disk), &doorbell).expect("a file descriptor is free");
        requests.begin();
        Self {
            ram,
            requests,
            orders: Orders::none().expect("a file descriptor is free"),
            added: 0,
            _doorbell: doorbell,
        }
    }

    /// Acts as the driver and adds `reads` read requests (at most 64). Then lets the disk serve these requests. Returns the CPU time that
    /// this thread used.
    ///
    /// # Panics
    /// A read fails.
    pub fn turn(&mut self, reads: u16) -> Duration {
        // Sleep, so that the requests arrive after the task has stopped polling. The task then learns that polling does not help, and its
        // polling adds little CPU time to the result.
        sleep(Duration::from_micros(100));
        self.added = self.added.wrapping_add(reads);
        let write =
            |bytes: &[u8], place| self.ram.write_slice(bytes, GuestAddress(place)).expect("the address is in RAM");
        write(&[0xff; MOST as usize], STATUSES);
        write(&self.added.to_le_bytes(), AVAILABLE + 2);
        let began = cpu_time();
        while self.used() != self.added {
            self.requests.run(&self.orders);
        }
        let took = cpu_time() - began;
        let mut statuses = [0xff; MOST as usize];
        self.ram.read_slice(&mut statuses, GuestAddress(STATUSES)).expect("the address is in RAM");
        let answered = statuses.iter().filter(|code| **code == status::OK).count();
        assert_eq!(answered, usize::from(reads));
        took
    }

    fn used(&self) -> u16 {
        self.ram.read_obj(GuestAddress(USED + 2)).expect("the address is in RAM")
    }
}

impl Default for ReadLoad {
    fn default() -> Self {
        Self::new()
    }
}
