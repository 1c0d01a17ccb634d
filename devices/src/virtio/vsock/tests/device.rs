// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the device with its queues and its thread.

use std::io::{Read, Write};

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::guest::{CID, Guest, Ports};
use super::harness::{CHAINS, Harness, RAM};
use crate::pci::PciDevice;
use crate::platform::DeviceEvent;
use crate::virtio::VirtioDevice;
use crate::virtio::test_driver::{NEXT, Part, WRITE, changes, wait_until};
use crate::virtio::test_support::{SOON, set_bus_master};
use crate::virtio::vsock::packet::Header;
use crate::virtio::vsock::spec::{DEVICE_TYPE, op, queue, shutdown};

const PORTS: Ports = Ports { guest: 1025, host: 52 };
#[test]
fn driver_finds_device_and_cid() {
    let harness = Harness::new(false);
    harness.check_id(DEVICE_TYPE);
    assert_eq!(u64::from_le_bytes(harness.config(0)), CID);
    // Bytes beyond the configuration read as zero.
    assert_eq!(u64::from_le_bytes(harness.config(6)), 0);
}

#[test]
fn data_moves_both_ways_with_and_without_iommu() {
    for translated in [false, true] {
        let mut harness = Harness::started(translated);
        harness.give_all();
        let (ports, mut client) = harness.connected(1024);
        let sent: Vec<u8> = (0..100_000u32).map(|n| (n % 241) as u8).collect();
        client.write_all(&sent).unwrap();
        let mut got = Vec::new();
        while got.len() < sent.len() {
            let (header, data) = harness.receive();
            assert_eq!((header.op, header.src_port), (op::RW, ports.host));
            got.extend(data);
        }
        assert_eq!(got, sent);
        let mut got = vec![0; sent.len()];
        for part in sent.chunks(20_000) {
            harness.write_data(ports, part);
        }
        client.read_exact(&mut got).unwrap();
        assert_eq!(got, sent);
        // Wait, because the device counts data only after it has passed the data to the client.
        wait_until(|| harness.device.counters().tx_bytes == 100_000);
        let counters = harness.device.counters();
        assert_eq!((counters.connections, counters.tx_bytes, counters.rx_bytes), (1, 100_000, 100_000));
        assert_eq!((counters.refused, counters.resets), (0, 0));
    }
}

#[test]
fn guest_reaches_programs_of_the_host() {
    let mut harness = Harness::started(false);
    harness.give_all();
    let server = harness.serve(PORTS.host);
    harness.say(PORTS, op::REQUEST);
    assert_eq!(harness.receive().0.op, op::RESPONSE);
    let (mut served, _) = server.accept().unwrap();
    harness.write_data(PORTS, b"hello");
    harness.send(&Header { flags: shutdown::BOTH, ..Guest::header(PORTS, op::SHUTDOWN) }, &[]);
    assert_eq!(harness.receive().0.op, op::RST);
    let mut text = String::new();
    served.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
}

#[test]
fn no_packet_moves_while_bus_mastering_is_off() {
    for translated in [false, true] {
        let mut harness = Harness::started(translated);
        harness.give_all();
        set_bus_master(&harness.function, false);
        let _client = harness.client(3);
        let place = harness.place(queue::TX);
        harness.ram.write_slice(&Guest::header(PORTS, op::RW).encode(), GuestAddress(place)).unwrap();
        let at = place + harness.offset();
        harness.add(queue::TX, &[(at, 44, 0)]);
        harness.device.notify(queue::TX).unwrap();
        std::thread::sleep(SOON);
        assert_eq!([queue::RX, queue::TX].map(|queue| harness.used(queue)), [0, 0]);
        set_bus_master(&harness.function, true);
        harness.wait_used(queue::TX);
        let mut ops = [harness.receive().0.op, harness.receive().0.op];
        ops.sort_unstable();
        assert_eq!(ops, [op::REQUEST, op::RST], "the request of the client, and the reset for the guest's packet");
    }
}

#[test]
fn packets_wait_for_receive_buffers() {
    let mut harness = Harness::started(false);
    let mut client = harness.client(3);
    client.write_all(b"x").unwrap();
    harness.looked();
    assert_eq!(harness.used(queue::RX), 0);
    harness.give();
    assert_eq!(harness.receive().0.op, op::REQUEST);
}

#[test]
fn packets_wait_when_too_many_resets_are_pending() {
    let mut harness = Harness::started(false);
    // The device answers each packet with a reset.
    for _ in 0..256 {
        harness.say(PORTS, op::RW);
    }
    let before = harness.used(queue::TX);
    let place = harness.place(queue::TX);
    harness.ram.write_slice(&Guest::header(PORTS, op::RW).encode(), GuestAddress(place)).unwrap();
    harness.add(queue::TX, &[(place, 44, 0)]);
    std::thread::sleep(SOON);
    assert_eq!(harness.used(queue::TX), before);
    harness.give();
    assert_eq!(harness.receive().0.op, op::RST);
    harness.wait_used(queue::TX);
}

#[test]
fn doorbells_of_all_queues_are_connected() {
    let mut harness = Harness::started(false);
    assert_eq!(harness.doorbells.count(), 3);
    harness.stop();
    assert_eq!(harness.doorbells.count(), 0);
}

#[test]
fn broken_rule_fails_the_device_until_reset() {
    let header = Header { len: 100, ..Guest::header(PORTS, op::RW) }.encode();
    let bad: [(u16, &[Part]); 11] = [
        (queue::TX, &[(0x8_0000, 43, 0)]),
        (queue::TX, &[(0x8_0000, 0, 0)]),
        (queue::TX, &[(0x8_0000, 44 + 99, 0)]),
        (queue::TX, &[(0x8_0000, 200, WRITE)]),
        (queue::TX, &[(0x8_0000, 44, NEXT), (0x9_0000, 100, WRITE)]),
        (queue::TX, &[(RAM as u64 - 10, 200, 0)]),
        (queue::TX, &[(0x8_0000, 44, NEXT), (1 << 40, 100, 0)]),
        (queue::TX, &[(u64::MAX - 4, 200, 0)]),
        (queue::RX, &[(0x8_0000, 44, WRITE)]),
        (queue::RX, &[(0x8_0000, 4000, 0)]),
        (queue::RX, &[(RAM as u64 - 10, 4000, WRITE)]),
    ];
    for (queue, parts) in bad {
        let mut harness = Harness::started(false);
        let server = harness.serve(PORTS.host);
        harness.give();
        harness.say(PORTS, op::REQUEST);
        harness.wait_used(queue::RX);
        let (mut served, _) = server.accept().unwrap();
        served.write_all(b"for a buffer").unwrap();
        harness.ram.write_slice(&header, GuestAddress(0x8_0000)).unwrap();
        harness.add(queue, parts);
        harness.broken();
        // The connected program notices that the connection has ended.
        assert!(matches!(served.read(&mut [0; 8]), Ok(0) | Err(_)));
        harness.stop();
        assert_eq!(harness.recorder.take(), [DeviceEvent::Activated, DeviceEvent::Failed, DeviceEvent::Reset]);
        harness.start();
        harness.give_all();
        harness.connected(9);
    }
}

#[test]
fn access_that_is_not_mapped_is_reported() {
    let mut harness = Harness::started(true);
    // The address of this buffer is a guest-physical address, which is not mapped as an IOVA.
    harness.add(queue::TX, &[(0x8_0000, 44, 0)]);
    harness.broken();
    assert_eq!(harness.relay.take().0[0].iova, 0x8_0000);
}

#[test]
fn reset_ends_connections_and_new_driver_gets_clients() {
    let mut harness = Harness::started(false);
    harness.give_all();
    let (_, mut client) = harness.connected(1);
    harness.stop();
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    // This client connects while the device has no driver, so the client waits for the next driver.
    let mut early = harness.client(2);
    harness.start();
    harness.give_all();
    let (request, _) = harness.receive();
    assert_eq!((request.op, request.dst_port), (op::REQUEST, 2));
    harness.say(Ports { guest: 2, host: request.src_port }, op::RESPONSE);
    early.read_exact(&mut [0; 3]).unwrap();
}

#[test]
fn paused_device_moves_no_data_until_resumed() {
    let mut harness = Harness::started(false);
    harness.give_all();
    let (ports, mut client) = harness.connected(1);
    harness.function.pause();
    let before = harness.used(queue::RX);
    client.write_all(b"later").unwrap();
    std::thread::sleep(SOON);
    assert_eq!(harness.used(queue::RX), before);
    harness.function.resume();
    assert_eq!(harness.receive().1, b"later");
    harness.write_data(ports, b"x");
    client.read_exact(&mut [0]).unwrap();
}

#[test]
fn restored_guest_gets_transport_reset_before_new_connections() {
    for translated in [false, true] {
        let mut old = Harness::started(translated);
        old.give_all();
        let (ports, _client) = old.connected(1);
        let place = old.place(queue::EVENT) + old.offset();
        old.function.pause();
        let mut new = Harness::restored(&old);
        let mut client = new.client(2);
        new.function.resume();
        let before = new.used(queue::RX);
        new.looked();
        assert_eq!(new.used(queue::RX), before, "the guest was not notified yet");
        new.add(queue::EVENT, &[(place, 4, WRITE)]);
        assert_eq!(new.wait_used(queue::EVENT).1, 4);
        let event: u32 = new.ram.read_obj(GuestAddress(place - new.offset())).unwrap();
        assert_eq!(event, 0);
        let (request, _) = new.receive();
        assert_eq!((request.op, request.dst_port), (op::REQUEST, 2));
        assert_ne!(request.src_port, ports.host, "the guest may still know the old port");
        // The old connection no longer exists, so the device answers its data with a reset.
        new.write_data(ports, b"x");
        assert_eq!(new.receive().0.op, op::RST);
        new.say(Ports { guest: 2, host: request.src_port }, op::RST);
        assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    }
}

#[test]
fn restored_guest_without_event_queue_gets_new_connections() {
    let mut old = Harness::new(false);
    old.set_up(0, 0..2);
    old.give_all();
    let (ports, _client) = old.connected(1);
    old.function.pause();
    let mut new = Harness::restored(&old);
    new.function.resume();
    let (other, mut client) = new.connected(2);
    assert_ne!(other.host, ports.host, "the guest may still know the old port");
    client.write_all(b"hello").unwrap();
    assert_eq!(new.receive().1, b"hello");
    // The device could not notify the guest. The guest receives a reset when it uses the old connection.
    new.write_data(ports, b"x");
    assert_eq!(new.receive().0.op, op::RST);
}

#[test]
fn foreign_state_is_rejected() {
    let mut old = Harness::started(false);
    old.give_all();
    old.function.pause();
    let state = old.function.save().unwrap();
    for (pointer, value) in [
        ("/device/kind", serde_json::json!("rng")),
        ("/device/version", serde_json::json!(2)),
        ("/device/payload", serde_json::json!({"cid": 3})),
        ("/common/queues", serde_json::json!([])),
    ] {
        Harness::new(false).refuses(&state, pointer, &value);
    }
}

proptest! {
    #[test]
    fn device_with_corrupt_state_can_be_reset(changes in changes()) {
        let mut old = Harness::started(false);
        (0..CHAINS).for_each(|_| old.give());
        old.function.pause();
        Harness::new(false).survives(&old.function.save().unwrap(), changes);
    }
}
