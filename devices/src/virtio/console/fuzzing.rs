// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A driver that is written in bytes: for a fuzzer, and for replaying what one found.

use std::io;

use super::device::VirtioConsole;
use super::ends::{MOST_INPUT, Size};
use super::spec::feature;
use super::traffic::QUEUES;
use crate::virtio::byte_driver::{ByteDriver, Layout, split_choice};
use crate::virtio::queue_table::TableTask;
use crate::worker::Task;

/// Fills rings, descriptors and buffers with `bytes` and has them served, piece after piece. The first byte says what the driver is, and
/// each piece is typed at the terminal too, whose size changes with it.
///
/// # Panics
/// The device holds more input than it may, or gives some twice.
pub fn run(bytes: &[u8]) {
    let (first, bytes) = split_choice(bytes);
    let guest = ByteDriver::new(Layout::queues(0x1_0000, 0x1000));
    let console = VirtioConsole::new("fuzz", Box::new(io::sink())).expect("a descriptor");
    let mut traffic = TableTask::new(console.traffic(), guest.driver(feature::SIZE), QUEUES);
    guest.start_queues(&mut traffic, QUEUES, first & 1 != 0);
    let mut typed = 0;
    guest.feed(bytes, |piece, orders| {
        typed += console.receive(piece);
        console.resize(Size { columns: piece[0].into(), rows: 25 });
        traffic.run(orders);
    });
    let waiting = console.waiting();
    assert!(waiting <= MOST_INPUT);
    let got = usize::try_from(console.counters().rx_bytes).expect("it was typed");
    assert!(got + waiting <= typed, "{got} came and {waiting} wait of {typed}");
}
