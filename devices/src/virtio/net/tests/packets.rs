// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of packets in both directions.

use super::harness::{BUFFERS, Harness, RECEIVE, TRANSMIT, frame};
use crate::virtio::VirtioDevice;
use crate::virtio::net::spec::{DEVICE_TYPE, HEADER_BYTES, MAX_PACKET};
use crate::virtio::test_driver::{WRITE, wait_until};
use crate::virtio::test_support::{SOON, set_bus_master};

#[test]
fn host_packet_reaches_the_guest_with_a_header() {
    for (merges, translated) in [(true, false), (false, false), (true, true), (false, true)] {
        let mut harness = Harness::new(1, translated);
        harness.check_id(DEVICE_TYPE);
        harness.start(merges);
        harness.add(RECEIVE, &[(BUFFERS + harness.offset(), 2048, WRITE)]);
        harness.ring(RECEIVE);
        harness.give(0, &frame(1514));
        harness.wait_used(RECEIVE, 1);
        assert_eq!(harness.used_len(RECEIVE, 0), 1526);
        let bytes = harness.bytes(BUFFERS, 1526);
        assert_eq!(bytes[..HEADER_BYTES], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0], "one buffer");
        assert!(bytes[HEADER_BYTES..] == frame(1514));
        let counters = harness.device.counters();
        assert_eq!((counters.rx_frames, counters.rx_bytes, counters.rx_dropped), (1, 1514, 0));
    }
}

#[test]
fn no_packet_moves_while_bus_mastering_is_off() {
    for translated in [false, true] {
        let mut harness = Harness::new(1, translated);
        harness.start(true);
        harness.add(RECEIVE, &[(BUFFERS + harness.offset(), 2048, WRITE)]);
        harness.ring(RECEIVE);
        set_bus_master(&harness.function, false);
        harness.give(0, &frame(100));
        harness.send(&frame(200));
        harness.device.notify(TRANSMIT).unwrap();
        std::thread::sleep(SOON);
        assert_eq!([RECEIVE, TRANSMIT].map(|queue| harness.used(queue)), [0, 0]);
        assert_eq!(harness.bytes(BUFFERS, 112), [0; 112]);
        assert_eq!(harness.device.counters().tx_frames, 0);
        set_bus_master(&harness.function, true);
        harness.wait_used(RECEIVE, 1);
        harness.wait_used(TRANSMIT, 1);
        assert!(harness.bytes(BUFFERS, 112)[HEADER_BYTES..] == frame(100));
        let mut packet = [0; 300];
        assert_eq!(harness.receive(&mut packet), 212);
    }
}

#[test]
fn large_packet_is_spread_over_several_buffers() {
    let mut harness = Harness::new(1, false);
    harness.start(true);
    for index in 0..4 {
        harness.add(RECEIVE, &[(BUFFERS + 0x1000 * index, 512, WRITE)]);
    }
    harness.ring(RECEIVE);
    harness.give(0, &frame(1400));
    harness.wait_used(RECEIVE, 3);
    let lens: Vec<u32> = (0..3).map(|element| harness.used_len(RECEIVE, element)).collect();
    assert_eq!(lens, [512, 512, 388]);
    let bytes: Vec<u8> = (0..3u16).flat_map(|index| harness.bytes(BUFFERS + 0x1000 * u64::from(index), 512)).collect();
    assert_eq!(bytes[10..12], [3, 0]);
    assert!(bytes[HEADER_BYTES..1412] == frame(1400));
    // The fourth buffer is still available for the next packet.
    harness.give(0, &frame(64));
    harness.wait_used(RECEIVE, 4);
    assert_eq!(harness.used_len(RECEIVE, 3), 76);
}

#[test]
fn packet_waits_for_room_and_later_ones_are_kept() {
    let mut harness = Harness::new(1, false);
    harness.start(true);
    harness.add(RECEIVE, &[(BUFFERS, 512, WRITE)]);
    harness.ring(RECEIVE);
    for len in [1000, 100, 200] {
        harness.give(0, &frame(len));
    }
    // Send two packets, and wait until the thread has sent them. The thread serves the two queues alternately, so it has then also checked
    // for packets from the host.
    for _ in 0..2 {
        harness.send(&frame(60));
        harness.served(TRANSMIT);
    }
    assert_eq!(harness.used(RECEIVE), 0, "the packet needs more room");
    for index in 1..4 {
        harness.add(RECEIVE, &[(BUFFERS + 0x1000 * index, 512, WRITE)]);
        harness.ring(RECEIVE);
    }
    harness.wait_used(RECEIVE, 4);
    harness.add(RECEIVE, &[(BUFFERS + 0x4000, 512, WRITE)]);
    harness.ring(RECEIVE);
    let lens: Vec<u32> = (0..4).map(|element| harness.used_len(RECEIVE, element)).collect();
    assert_eq!(lens, [512, 500, 112, 212]);
    assert_eq!(harness.device.counters().rx_frames, 3);
}

#[test]
fn packet_too_large_for_receive_buffers_is_counted_as_dropped() {
    let mut harness = Harness::new(1, false);
    harness.start(false);
    harness.add(RECEIVE, &[(BUFFERS, 512, WRITE)]);
    harness.ring(RECEIVE);
    harness.give(0, &frame(1000));
    wait_until(|| harness.device.counters().rx_dropped == 1);
    harness.give(0, &frame(100));
    harness.wait_used(RECEIVE, 1);
    assert_eq!(harness.used_len(RECEIVE, 0), 112);

    // The device also drops a packet if the queue is full of buffers and these buffers are together too small.
    let mut harness = Harness::new(1, false);
    harness.start(true);
    for index in 0..16 {
        harness.add(RECEIVE, &[(BUFFERS + 0x100 * index, 64, WRITE)]);
    }
    harness.ring(RECEIVE);
    harness.give(0, &frame(2000));
    wait_until(|| harness.device.counters().rx_dropped == 1);
    harness.give(0, &frame(52));
    harness.wait_used(RECEIVE, 1);
}

#[test]
fn guest_packets_reach_the_host_unchanged() {
    for translated in [false, true] {
        let mut harness = Harness::new(1, translated);
        harness.start(true);
        for (count, len) in (1..).zip([14, 60, 1514, MAX_PACKET]) {
            harness.send(&frame(len));
            let mut packet = vec![0; MAX_PACKET + HEADER_BYTES + 1];
            let got = harness.receive(&mut packet);
            assert!(got == len + HEADER_BYTES && packet[HEADER_BYTES..got] == frame(len));
            harness.wait_used(TRANSMIT, count);
        }
        let counters = harness.device.counters();
        assert_eq!((counters.tx_frames, counters.tx_bytes, counters.tx_dropped), (4, 14 + 60 + 1514 + 65550, 0));
    }
}

#[test]
fn invalid_packet_is_dropped_and_returned_to_driver() {
    let mut harness = Harness::new(1, false);
    harness.start(true);
    for buffers in
        [vec![(BUFFERS, 12u32, 0u16)], vec![(BUFFERS, 25, 0)], vec![(BUFFERS, 0, 0)], vec![(BUFFERS, 0x1_8000, 0)]]
    {
        harness.add(TRANSMIT, &buffers);
    }
    harness.ring(TRANSMIT);
    harness.wait_used(TRANSMIT, 4);
    assert_eq!(harness.device.counters().tx_dropped, 4);
    harness.send(&frame(60));
    assert_eq!(harness.receive(&mut [0; 100]), 72);
}

#[test]
fn closed_interface_drops_packets_and_device_survives() {
    let mut harness = Harness::new(1, false);
    harness.start(true);
    harness.host.clear();
    harness.send(&frame(60));
    harness.wait_used(TRANSMIT, 1);
    assert_eq!((harness.device.counters().tx_dropped, harness.status()), (1, 15));
}

#[test]
fn gpa_buffer_behind_the_iommu_faults_and_needs_a_reset() {
    let mut harness = Harness::new(1, true);
    harness.start(true);
    // The address of this buffer is a guest-physical address, which is not mapped as an IOVA.
    harness.add(RECEIVE, &[(BUFFERS, 2048, WRITE)]);
    harness.ring(RECEIVE);
    harness.give(0, &frame(100));
    harness.broken();
    let (faults, _) = harness.relay.take();
    assert_eq!(faults[0].iova, BUFFERS);
}
