// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of notifications between a busy driver and the device, and of the turns of a pair's queues.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vm_memory::{Bytes, GuestAddress};

use super::harness::{Host, RECEIVE, TRANSMIT, frame};
use crate::dma::DeviceMemory;
use crate::ram::Ram;
use crate::virtio::Driver;
use crate::virtio::net::counters::Counts;
use crate::virtio::net::link::Link;
use crate::virtio::net::pair::Pair;
use crate::virtio::net::spec::{HEADER_BYTES, MRG_RXBUF};
use crate::virtio::test_driver::WRITE;
use crate::virtio::test_support::BusyDriver;
use crate::worker::{Orders, Task, Wait};

const SIZE: u16 = 128;
const DATA: u64 = 0x8000;

/// Returns a pair, its driver, and the host's end of the socket. In the pair, only queue `queue_index` is started. At each interrupt, the
/// driver adds a buffer for one packet, until it has added `most` buffers.
fn pair(queue_index: u16, most: u16) -> (Pair, Arc<BusyDriver>, UnixDatagram) {
    let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap());
    let queue = BusyDriver::queue(SIZE);
    let packet = [&[0; HEADER_BYTES], frame(100).as_slice()].concat();
    ram.write_slice(&packet, GuestAddress(DATA)).unwrap();
    ram.write_obj(DATA, GuestAddress(0x1000)).unwrap();
    ram.write_obj(u32::try_from(packet.len()).unwrap(), GuestAddress(0x1008)).unwrap();
    ram.write_obj(if queue_index == RECEIVE { WRITE } else { 0 }, GuestAddress(0x100c)).unwrap();
    let (ours, host) = UnixDatagram::pair().unwrap();
    for socket in [&ours, &host] {
        socket.set_nonblocking(true).unwrap();
    }
    let carrier = Box::new(Host::of(File::from(OwnedFd::from(ours))));
    let link = Link {
        id: "net".into(),
        carrier,
        counts: Counts::default(),
        receive_limiter: None,
        transmit_limiter: None,
        gone: AtomicBool::default(),
    };
    let driver = Arc::new(BusyDriver::new(ram.clone(), &queue, most));
    let memory = DeviceMemory::all_ram(ram);
    let mut pair = Pair::new(
        Driver { requests: Arc::default(), memory, interrupt: driver.clone(), features: MRG_RXBUF },
        Arc::new(link),
    );
    pair.put(queue_index, queue);
    (pair, driver, host)
}

/// Returns the number of packets that the host has received.
fn packets(host: &UnixDatagram) -> usize {
    let mut packet = [0; 200];
    std::iter::from_fn(|| host.recv(&mut packet).ok()).inspect(|len| assert_eq!(*len, 112)).count()
}

#[test]
fn busy_transmit_queue_needs_only_one_notification() {
    let (mut pair, driver, _host) = pair(TRANSMIT, SIZE + 2);
    (0..SIZE).for_each(|_| driver.add());
    // The driver is notified after each turn of 64 packets, and adds one packet after each of the first two turns. The host reads no
    // packets. So the socket becomes full, and the device drops the packets that the socket rejects.
    assert_eq!(pair.run(&Orders::none().unwrap()), Wait::Doorbell);
    assert_eq!((driver.used(), driver.counts()), (SIZE + 2, (3, 1)));
    driver.add();
    assert_eq!(driver.counts(), (3, 2));
}

#[test]
fn packets_sent_together_cost_one_interrupt() {
    let (mut pair, driver, host) = pair(TRANSMIT, 0);
    // By default, a socket has room for more than eight packets (`net.unix.max_dgram_qlen`).
    (0..8).for_each(|_| driver.add());
    pair.run(&Orders::none().unwrap());
    assert_eq!((packets(&host), driver.used(), driver.counts()), (8, 8, (1, 1)));
}

#[test]
fn packets_received_together_cost_one_interrupt() {
    let (mut pair, driver, host) = pair(RECEIVE, 0);
    (0..100).for_each(|_| driver.add());
    for _ in 0..8 {
        host.send(&[&[0; HEADER_BYTES], frame(100).as_slice()].concat()).unwrap();
    }
    assert_eq!(pair.run(&Orders::none().unwrap()), Wait::Source);
    assert_eq!((driver.used(), driver.counts().0), (8, 1));
}
