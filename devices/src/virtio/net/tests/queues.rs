// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of several pairs of queues, and of saved state.

use vm_memory::{Bytes, GuestAddress};

use super::harness::{BUFFERS, Harness, MAC_ADDRESS, RECEIVE, TRANSMIT, frame};
use crate::pci::PciDevice;
use crate::state::DeviceState;
use crate::sync::lock;
use crate::virtio::VirtioDevice;
use crate::virtio::net::Offloads;
use crate::virtio::net::spec::{CONFIG_BYTES, CTRL_ERR, CTRL_MQ, CTRL_OK, CTRL_VQ, MAC};
use crate::virtio::test_driver::{WRITE, wait_until};
use crate::virtio::test_support::SOON;

/// Sends a command to queue 4: the control queue of a device with two pairs. Returns the answer.
fn set_pairs(harness: &mut Harness, command: &[u8]) -> u8 {
    control(harness, 4, command)
}

/// Sends a command to the control queue `queue`, and returns the answer.
fn control(harness: &mut Harness, queue: u16, command: &[u8]) -> u8 {
    let place = BUFFERS + 0x3_0000;
    harness.ram.write_slice(command, GuestAddress(place)).unwrap();
    harness.ram.write_obj(0xffu8, GuestAddress(place + 16)).unwrap();
    let len = u32::try_from(command.len()).unwrap();
    harness.add(queue, &[(place, 2.min(len), 0), (place + 2, len.saturating_sub(2), 0), (place + 16, 1, WRITE)]);
    harness.ring(queue);
    harness.wait_used(queue, harness.added[usize::from(queue)]);
    harness.bytes(place + 16, 1)[0]
}

#[test]
fn configuration_has_mac_pairs_and_mtu() {
    let harness = Harness::new(2, false);
    let mut config = [0; CONFIG_BYTES];
    harness.device.read_config(0, &mut config);
    assert_eq!(config[..6], MAC_ADDRESS);
    assert_eq!(config[8..], [2, 0, 0xdc, 5]);
    assert_eq!(harness.device.queue_sizes(), [16, 16, 16, 16, 64]);
    assert_eq!(Harness::new(1, false).device.queue_sizes(), [16, 16]);
}

#[test]
fn queue_pair_count_is_validated_and_passed_to_the_host() {
    let mut harness = Harness::new(2, false);
    harness.start(true);
    assert_eq!(lock(&harness.requested).pairs, 1);
    let tso4 = Offloads { csum: true, tso4: true, ..Offloads::default() };
    assert_eq!(lock(&harness.requested).offloads, tso4);
    assert_eq!(set_pairs(&mut harness, &[CTRL_MQ, 0, 2, 0]), CTRL_OK);
    assert_eq!(lock(&harness.requested).pairs, 2);
    for wrong in [&[CTRL_MQ, 0, 3, 0][..], &[CTRL_MQ, 0, 0, 0], &[CTRL_MQ, 1, 1, 0], &[CTRL_MQ, 0, 1], &[9, 0, 1, 0]] {
        assert_eq!(set_pairs(&mut harness, wrong), CTRL_ERR);
    }
    lock(&harness.requested).refuses = true;
    assert_eq!(set_pairs(&mut harness, &[CTRL_MQ, 0, 1, 0]), CTRL_ERR);
    lock(&harness.requested).refuses = false;
    assert_eq!(lock(&harness.requested).pairs, 2);

    // A packet of the second pair uses a buffer of this pair, not of the first pair.
    harness.add(2, &[(BUFFERS, 2048, WRITE)]);
    harness.ring(2);
    harness.give(1, &frame(100));
    harness.wait_used(2, 1);
    assert_eq!(harness.used(RECEIVE), 0);

    harness.write(20, &[0]);
    let requested = lock(&harness.requested);
    assert_eq!((requested.pairs, requested.offloads), (1, Offloads::default()));
}

#[test]
fn control_queue_without_mq_has_index_2() {
    for pairs in [2, 3] {
        let mut harness = Harness::new(pairs, false);
        harness.set_up(MAC | CTRL_VQ, 0..3);
        // Because the driver did not accept MQ, the device rejects the command. The device keeps working.
        assert_eq!(control(&mut harness, 2, &[CTRL_MQ, 0, 1, 0]), CTRL_ERR);
        assert_eq!(harness.status(), 15);
        harness.add(RECEIVE, &[(BUFFERS, 2048, WRITE)]);
        harness.ring(RECEIVE);
        harness.give(0, &frame(100));
        harness.wait_used(RECEIVE, 1);

        harness.function.pause();
        let state = harness.function.save().unwrap();
        let served = harness.device.queue_state(2).unwrap();
        assert_eq!((served.next_avail, served.next_used), (1, 1));
        let other = Harness::new(pairs, false);
        other.function.restore(&state).unwrap();
        assert_eq!(other.device.queue_state(2), Some(served));
        harness.function.resume();
        assert_eq!(control(&mut harness, 2, &[CTRL_MQ, 0, 1, 0]), CTRL_ERR);
        // A reset deletes the queue's state.
        harness.write(20, &[0]);
        assert_eq!(harness.device.queue_state(2), None);
    }
}

#[test]
fn unexpected_queues_do_no_harm() {
    let mut harness = Harness::new(2, false);
    harness.set_up(MAC | CTRL_VQ, 0..5);
    harness.function.pause();
    for queue in 0..5 {
        assert!(harness.device.queue_state(queue).is_some(), "{queue}");
        harness.ring(queue);
    }
    harness.function.resume();
    assert_eq!(control(&mut harness, 4, &[CTRL_MQ, 0, 1, 0]), CTRL_ERR);
    harness.write(20, &[0]);
    assert_eq!(harness.status(), 0);
}

#[test]
fn paused_device_moves_no_packets_until_resumed() {
    let mut harness = Harness::new(1, false);
    harness.start(true);
    harness.function.pause();
    harness.add(RECEIVE, &[(BUFFERS, 2048, WRITE)]);
    harness.ring(RECEIVE);
    harness.give(0, &frame(100));
    harness.send(&frame(60));
    std::thread::sleep(SOON);
    assert_eq!((harness.used(RECEIVE), harness.used(TRANSMIT)), (0, 0));
    harness.function.resume();
    harness.wait_used(RECEIVE, 1);
    harness.wait_used(TRANSMIT, 1);
}

#[test]
fn restored_device_keeps_its_pairs_and_refuses_foreign_state() {
    let mut harness = Harness::new(2, false);
    harness.start(true);
    assert_eq!(set_pairs(&mut harness, &[CTRL_MQ, 0, 2, 0]), CTRL_OK);
    harness.function.pause();
    let state = harness.device.save().unwrap();
    wait_until(|| harness.device.queue_state(0).is_some());
    lock(&harness.requested).pairs = 1;
    harness.device.restore(&state).unwrap();
    assert_eq!(lock(&harness.requested).pairs, 2);

    for (field, value) in
        [("mac", serde_json::json!([2, 0, 0, 0, 0, 8])), ("mtu", 9000.into()), ("pairs", 0.into()), ("pairs", 3.into())]
    {
        let mut other = serde_json::to_value(&state).unwrap();
        other["payload"][field] = value;
        let other: DeviceState = serde_json::from_value(other).unwrap();
        let refused = harness.device.restore(&other).unwrap_err().to_string();
        assert!(refused.contains(field), "{refused}");
    }
}
