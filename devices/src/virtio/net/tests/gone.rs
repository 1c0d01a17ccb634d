// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Test of a host interface that is deleted while the device is in use. A file of `/dev/net/tun` without an interface behaves like a file
//! of a deleted interface. Reads and writes of the file fail with EBADFD, and `poll` reports an error.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::thread;
use std::time::Duration;

use super::harness::{BUFFERS, Harness, RECEIVE, TRANSMIT, frame};
use crate::pci::PciDevice;
use crate::virtio::test_driver::{WRITE, wait_until};

fn gone() -> Option<File> {
    match OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun") {
        Ok(file) => Some(file),
        Err(error) => {
            eprintln!("not tested: /dev/net/tun: {error}");
            None
        }
    }
}

#[test]
fn vanished_interface_ends_reads_and_drops_guest_packets() {
    let Some(file) = gone() else { return };
    let mut harness = Harness::on_file(file);
    harness.start(true);
    for index in 0..4 {
        harness.add(RECEIVE, &[(BUFFERS + 0x800 * index, 2048, WRITE)]);
    }
    harness.ring(RECEIVE);
    wait_until(|| harness.device.counters().host_errors == 1);
    for count in 1..=200 {
        harness.send(&frame(100));
        harness.wait_used(TRANSMIT, count);
    }
    // Wait longer than the delay between a failed read from the host interface and the next read.
    thread::sleep(Duration::from_millis(1500));
    let counters = harness.device.counters();
    assert_eq!((counters.host_errors, counters.tx_dropped, counters.tx_frames), (1, 200, 0));
    assert_eq!(harness.used(RECEIVE), 0);

    harness.function.pause();
    harness.function.save().unwrap();
    harness.function.resume();
    harness.send(&frame(100));
    harness.wait_used(TRANSMIT, 201);
    harness.function.reset().unwrap();
    assert_eq!(harness.status(), 0);
}
