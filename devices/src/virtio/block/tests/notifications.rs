// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Test of the notifications between a busy driver and the device.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::harness::{NEXT, WRITE, file, pattern};
use crate::dma::DeviceMemory;
use crate::ram::Ram;
use crate::virtio::Driver;
use crate::virtio::block::counters::Counts;
use crate::virtio::block::disk::Disk;
use crate::virtio::block::queue::requests::Requests;
use crate::virtio::block::spec::{ID_BYTES, request};
use crate::virtio::block::{Image, IoMode};
use crate::virtio::test_support::BusyDriver;
use crate::worker::{Orders, Task, Wait};

const SIZE: u16 = 16;
const DATA: u64 = 0x8000;

#[test]
fn busy_disk_needs_only_one_notification() {
    let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap());
    let queue = BusyDriver::queue(SIZE);
    // The request is a read of one sector.
    ram.write_obj(request::IN, GuestAddress(0x4000)).unwrap();
    for (at, (address, len, flags, next)) in (0x1000..).step_by(16).zip([
        (0x4000u64, 16u32, NEXT, 1u16),
        (DATA, 512, NEXT | WRITE, 2),
        (0x5000, 1, WRITE, 0),
    ]) {
        ram.write_obj(address, GuestAddress(at)).unwrap();
        ram.write_obj(len, GuestAddress(at + 8)).unwrap();
        ram.write_obj(flags, GuestAddress(at + 12)).unwrap();
        ram.write_obj(next, GuestAddress(at + 14)).unwrap();
    }
    let content = pattern(4096, 1);
    let image = Arc::new(Image::made_up(file(&content), 4096, 1, true));
    let disk = Disk {
        id: "disk".into(),
        image,
        serial: [0; ID_BYTES],
        counts: Counts::default(),
        // With plain I/O, each operation has already ended when the call that starts the operation returns.
        mode: IoMode::Plain,
        limiter: None,
        affinity: Default::default(),
    };
    let busy = Arc::new(BusyDriver::new(ram.clone(), &queue, 100));
    let driver = Driver {
        requests: Arc::default(),
        memory: DeviceMemory::all_ram(ram.clone()),
        interrupt: busy.clone(),
        features: u64::MAX,
    };
    let doorbell = EventFd::new(EFD_NONBLOCK).unwrap();
    let mut requests = Requests::new(0, queue, driver, Arc::new(disk), &doorbell).unwrap();
    busy.add();
    assert_eq!(requests.run(&Orders::none().unwrap()), Wait::Doorbell);
    assert_eq!((busy.used(), busy.counts()), (100, (100, 1)));
    let mut data = [0; 512];
    ram.read_slice(&mut data, GuestAddress(DATA)).unwrap();
    assert!(data[..] == content[..512]);
    // The disk has nothing left to do, so the driver must notify it.
    busy.add();
    assert_eq!(busy.counts(), (100, 2));
}
