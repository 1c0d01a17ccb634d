// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of pause, saved state, and unmapping of memory that the kernel uses.

use std::fs::File;
use std::io::Write;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use proptest::prelude::*;

use super::harness::*;
use crate::pci::PciDevice;
use crate::platform::DeviceEvent;
use crate::state::DeviceState;
use crate::virtio::VirtioDevice;
use crate::virtio::block::spec::{request, status};
use crate::virtio::test_support::{SOON, set_bus_master};

const BYTES: usize = 1 << 20;

/// Creates a disk whose image is a pipe. Reads wait until a test writes to the pipe.
fn slow(kind: Kind) -> (Harness, File) {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let mut disk = Harness::silent(kind, File::from(reader), 1 << 20);
    disk.start();
    (disk, File::from(writer))
}

/// Creates a disk like [`slow`], with a read under way. Returns the disk, the pipe's writer, and the address of the read's status.
fn reading(kind: Kind) -> (Harness, File, u64) {
    let (mut disk, writer) = slow(kind);
    let first = disk.add(0, request::IN, 0, &[(DATA, 512)]);
    disk.begun();
    assert_eq!((disk.used(0), disk.byte(first)), (1, 0xff));
    (disk, writer, first)
}

/// Writes to the pipe after 50 ms, so that a read of the image ends.
fn end_late(mut writer: File) -> JoinHandle<File> {
    thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        writer.write_all(&[7; 512]).unwrap();
        writer
    })
}

#[test]
fn pause_waits_for_running_requests_and_admits_no_new_ones() {
    for translated in [false, true] {
        let (mut disk, writer, first) = reading(Kind { translated, ..RING });
        let late = end_late(writer);
        disk.function.pause();
        assert_eq!((disk.used(0), disk.byte(first), disk.byte(DATA)), (2, status::OK, 7));
        let mut writer = late.join().unwrap();
        disk.add(0, request::IN, 0, &[(DATA, 512)]);
        disk.ring(0);
        writer.write_all(&[8; 512]).unwrap();
        thread::sleep(Duration::from_millis(20));
        assert_eq!(disk.used(0), 2, "the disk is paused");
        disk.function.resume();
        disk.served(0);
        assert_eq!(disk.byte(DATA), 8);
    }
}

#[test]
fn bus_master_off_waits_for_request_and_admits_no_new_one() {
    for translated in [false, true] {
        let (mut disk, writer, first) = reading(Kind { translated, ..RING });
        let late = end_late(writer);
        set_bus_master(&disk.function, false);
        assert_eq!((disk.used(0), disk.byte(first), disk.byte(DATA)), (2, status::OK, 7));
        let mut writer = late.join().unwrap();
        let second = disk.add(0, request::IN, 0, &[(DATA, 512)]);
        disk.device.notify(0).unwrap();
        writer.write_all(&[8; 512]).unwrap();
        thread::sleep(SOON);
        assert_eq!((disk.used(0), disk.byte(second), disk.byte(DATA)), (2, 0xff, 7));
        set_bus_master(&disk.function, true);
        disk.served(0);
        assert_eq!((disk.byte(second), disk.byte(DATA)), (status::OK, 8));
    }
}

#[test]
fn device_is_reset_while_bus_mastering_is_off() {
    let mut disk = Harness::new(RING, file(&pattern(BYTES, 0)));
    set_bus_master(&disk.function, false);
    disk.add(0, request::IN, 0, &[(DATA, 512)]);
    disk.write(20, &[0]);
    assert_eq!((disk.status(), disk.used(0)), (0, 0));
}

#[test]
fn resize_waits_for_requests_and_notifies_the_driver() {
    let (disk, writer, first) = reading(RING);
    let late = end_late(writer);
    // The resize fails, because the image is a pipe.
    disk.device.resize(2 << 20).unwrap_err();
    assert_eq!((disk.used(0), disk.byte(first)), (2, status::OK));
    late.join().unwrap();
    assert_eq!(u64::from_le_bytes(disk.config(0)), 2048);

    for kind in kinds() {
        let mut disk = Harness::new(kind, file(&pattern(BYTES, 0)));
        let sectors = (BYTES / 512) as u64;
        assert_eq!(disk.call(request::OUT, sectors, &[(DATA, 512)]), status::IOERR);
        let generation = disk.generation();
        disk.device.resize(BYTES as u64 + 512).unwrap();
        assert_eq!((u64::from_le_bytes(disk.config(0)), disk.generation()), (sectors + 1, generation.wrapping_add(1)));
        assert_eq!(disk.call(request::OUT, sectors, &[(DATA, 512)]), status::OK);
        // A resize does not resume a paused disk.
        disk.function.pause();
        disk.device.resize(BYTES as u64).unwrap();
        let refused = disk.add(0, request::OUT, sectors, &[(DATA, 512)]);
        disk.ring(0);
        thread::sleep(Duration::from_millis(5));
        assert_eq!(disk.byte(refused), 0xff);
        disk.function.resume();
        disk.served(0);
        assert_eq!((disk.byte(refused), disk.content.metadata().unwrap().len()), (status::IOERR, BYTES as u64));
    }
}

#[test]
fn resize_waits_for_requests_during_a_reset() {
    let (disk, writer, first) = reading(RING);
    let function = disk.function.clone();
    let reset = thread::spawn(move || function.reset().unwrap());
    thread::sleep(Duration::from_millis(20));
    let late = end_late(writer);
    disk.device.resize(2 << 20).unwrap_err();
    assert_eq!((disk.byte(first), disk.byte(DATA)), (status::OK, 7));
    late.join().unwrap();
    reset.join().unwrap();
}

#[test]
fn unmap_cancels_kernel_io_to_its_range_and_leaves_the_rest() {
    let (mut disk, mut writer, gone) = reading(Kind { translated: true, ..RING });
    let stays = disk.add(0, request::IN, 0, &[(DATA + 0x1000, 512)]);
    disk.begun();
    assert_eq!(disk.used(0), 2);
    disk.unmap(DATA, 0x1000);
    wait_until(|| disk.used(0) == 3);
    assert_eq!((disk.byte(gone), disk.byte(stays)), (status::IOERR, 0xff));
    writer.write_all(&[9; 512]).unwrap();
    disk.served(0);
    assert_eq!((disk.byte(stays), disk.byte(DATA), disk.byte(DATA + 0x1000)), (status::OK, 0, 9));
    assert_eq!(disk.status(), 15);
}

#[test]
fn unmap_ends_requests_of_a_failed_disk() {
    let (mut disk, _writer) = slow(Kind { translated: true, ..RING });
    disk.add(0, request::IN, 0, &[(DATA, 512)]);
    disk.begun();
    // Set the index of the available ring so far ahead that the ring is invalid.
    disk.fill(RINGS[1] + 2, &0x7fffu16.to_le_bytes());
    disk.ring(0);
    disk.broken();
    disk.unmap(DATA, 0x1000);
}

#[test]
fn restored_disk_continues_with_the_next_request() {
    for kind in kinds() {
        let kind = Kind { queues: 2, ..kind };
        let mut old = Harness::new(kind, file(&pattern(BYTES, 0)));
        assert_eq!(old.call(request::IN, 0, &[(DATA, 512)]), status::OK);
        old.function.pause();
        // The request arrives while the device is paused.
        let late = old.add(1, request::IN, 1, &[(DATA, 512)]);
        let content = old.content.try_clone().unwrap();
        let mut new = Harness::silent(kind, content, BYTES as u64);
        new.map_all();
        new.restore_from(&old);
        thread::sleep(Duration::from_millis(5));
        assert_eq!((new.used(0), new.used(1)), (1, 0), "the disk is paused");
        new.function.resume();
        new.served(1);
        assert_eq!((new.byte(late), new.bytes(DATA, 512)), (status::OK, pattern(BYTES, 0)[512..1024].to_vec()));
        assert_eq!(new.recorder.take(), [DeviceEvent::Activated]);
    }
}

/// Returns the state of a disk that has served a request. The RAM of that disk no longer exists.
fn saved() -> DeviceState {
    let mut old = Harness::new(RING, file(&pattern(BYTES, 0)));
    old.call(request::IN, 0, &[(DATA, 512)]);
    old.function.pause();
    old.function.save().unwrap()
}

#[test]
fn state_of_another_disk_is_refused() {
    let state = saved();
    for (pointer, value) in [
        ("/device/payload/sectors", serde_json::json!(1)),
        ("/device/payload/block_size", serde_json::json!(4096)),
        ("/device/kind", serde_json::json!("rng")),
        ("/device/version", serde_json::json!(2)),
        ("/common/queues/0/served", serde_json::Value::Null),
        ("/common/queues/0/size", serde_json::json!(128)),
        ("/common/driver_features", serde_json::json!(1)),
    ] {
        Harness::silent(RING, file(&[]), BYTES as u64).refuses(&state, pointer, &value);
    }
}

proptest! {
    #[test]
    fn device_with_corrupt_state_can_be_reset(changes in changes()) {
        Harness::silent(RING, file(&pattern(BYTES, 0)), BYTES as u64).survives(&saved(), changes);
    }

    #[test]
    fn random_rings_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..0x1200)) {
        crate::virtio::block::fuzzing::run(&bytes);
    }
}
