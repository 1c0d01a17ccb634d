// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Driver that fills its rings, descriptors and buffers with the fuzzer's bytes, for fuzzing and for replaying fuzzer findings.

use std::io;

use super::device::VirtioConsole;
use super::ends::{MOST_INPUT, Size};
use super::spec::feature;
use super::traffic::QUEUES;
use crate::virtio::byte_driver::{ByteDriver, Layout, split_choice};
use crate::virtio::queue_table::TableTask;
use crate::worker::Task;

/// Writes `bytes` to the guest's rings, descriptors and buffers piece by piece. After each piece, the device serves the queues. The lowest
/// bit of the first byte selects whether the queues use EVENT_IDX. Each piece is also passed to the guest as input, and sets the terminal's
/// size.
///
/// # Panics
/// The device keeps more input than allowed, or gives input to the guest twice.
pub fn run(bytes: &[u8]) {
    let (first, bytes) = split_choice(bytes);
    let guest = ByteDriver::new(Layout::queues(0x1_0000, 0x1000));
    let console = VirtioConsole::new("fuzz", Box::new(io::sink())).expect("a file descriptor is free");
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
    let got = usize::try_from(console.counters().rx_bytes).expect("the count fits into usize");
    assert!(got + waiting <= typed, "of {typed} typed bytes, the guest got {got} and {waiting} wait");
}
