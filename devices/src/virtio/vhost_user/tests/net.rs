// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of a network card: its queue pairs, and the loss of its server.

use std::sync::Arc;
use std::time::Duration;

use vm_memory::{Bytes, GuestAddress};

use super::super::device::VhostUserDevice;
use super::server::request::*;
use super::server::{Asked, MEM_SLOTS, MQ, Manner, REPLY_ACK, Server, Vice};
use super::support::{InterruptRecord, RINGS, Running, SHORT, card, connect, ram, reset, start, start_as, wait};
use crate::ram::Ram;
use crate::virtio::VirtioDevice;
use crate::virtio::byte_driver::queue_at;

/// Returns the queues that the server was asked to enable (true) or disable (false), in the order of the requests.
fn turned(asked: &[Asked]) -> Vec<(u32, bool)> {
    let word = |one: &Asked, place: usize| u32::from_le_bytes(one.payload[place..place + 4].try_into().unwrap());
    let turns = asked.iter().filter(|one| one.request == SET_VRING_ENABLE);
    turns.map(|one| (word(one, 0), word(one, 4) == 1)).collect()
}

/// Addresses of the control queue: descriptor table, available ring, used ring, command and answer. The other queues do not use these
/// addresses.
const CONTROL: [u64; 5] = [0x4000, 0x4400, 0x4800, 0x4c00, 0x4d00];

fn start_control(device: &VhostUserDevice) {
    start_control_as(device, 4);
}

/// Starts the control queue as queue `index`.
fn start_control_as(device: &VhostUserDevice, index: u16) {
    let [descriptors, available, used, ..] = CONTROL;
    device.start_queue(index, queue_at(64, [descriptors, available, used])).unwrap();
}

/// Sends command number `number` of the driver, which asks for `pairs` queue pairs. Returns the answer.
fn use_pairs(device: &VhostUserDevice, ram: &Arc<Ram>, number: u16, pairs: u16) -> u8 {
    use_pairs_by(4, device, ram, number, pairs)
}

/// Does the same as [`use_pairs`], with queue `index` as the control queue.
fn use_pairs_by(index: u16, device: &VhostUserDevice, ram: &Arc<Ram>, number: u16, pairs: u16) -> u8 {
    let [descriptors, available, used, command, answer] = CONTROL;
    ram.write_slice(&[&[4, 0], &pairs.to_le_bytes()[..]].concat(), GuestAddress(command)).unwrap();
    ram.write_obj(0xffu8, GuestAddress(answer)).unwrap();
    for (place, (address, len, flags)) in [(0, (command, 4u32, 1u16)), (16, (answer, 1, 2))] {
        let descriptor = [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &[1, 0]].concat();
        ram.write_slice(&descriptor, GuestAddress(descriptors + place)).unwrap();
    }
    ram.write_obj(0u16, GuestAddress(available + 4 + 2 * u64::from(number))).unwrap();
    ram.write_obj(number + 1, GuestAddress(available + 2)).unwrap();
    device.notify(index).unwrap();
    wait(|| ram.read_obj::<u16>(GuestAddress(used + 2)).unwrap() == number + 1);
    ram.read_obj(GuestAddress(answer)).unwrap()
}

#[test]
fn control_queue_enables_and_disables_queue_pairs() {
    let server = Server::start(Manner::default());
    let device = connect(&server, card(2)).unwrap();
    assert_eq!(device.queue_sizes(), [64, 64, 64, 64, 64]);
    let (ram, interrupts) = (ram(1), InterruptRecord::with_events(5));
    start(&device, &ram, &interrupts, 4);
    start_control(&device);
    let asked = server.take();
    assert_eq!(turned(&asked), [(0, true), (1, true), (2, false), (3, false)], "a driver begins with one pair");
    assert_eq!(use_pairs(&device, &ram, 0, 2), 0);
    assert_eq!(turned(&server.take()), [(0, true), (1, true), (2, true), (3, true)]);
    for wrong in [0, 3] {
        assert_eq!(use_pairs(&device, &ram, 1 + wrong / 3, wrong), 1, "{wrong} pairs");
    }
    assert!(server.requests().is_empty());

    device.pause();
    server.take();
    assert_eq!(device.queue_state(4).map(|state| state.next_avail), Some(3));
    device.resume();
    assert_eq!(turned(&server.take()), [(0, true), (1, true), (2, true), (3, true)], "the driver still uses two pairs");
    assert_eq!(device.stop_queue(4).map(|state| state.next_used), Some(3));
    reset(&device, 4);
    start(&device, &ram, &interrupts, 4);
    assert_eq!(turned(&server.take())[4..], [(0, true), (1, true), (2, false), (3, false)], "the next driver");
    assert!(interrupts.failures().is_empty());
}

#[test]
fn control_queue_without_mq_has_index_2() {
    const MQ_FEATURE: u64 = 1 << 22;
    let server = Server::start(Manner::default());
    let device = connect(&server, card(2)).unwrap();
    let (ram, interrupts) = (ram(1), InterruptRecord::with_events(5));
    let features = (device.features() | 1 << 32) & !MQ_FEATURE;
    start_as(&device, &ram, &interrupts, 2, features);
    start_control_as(&device, 2);
    assert_eq!(turned(&server.take()), [(0, true), (1, true)]);
    // Without `MQ`, the command is unknown.
    for number in 0..2 {
        assert_eq!(use_pairs_by(2, &device, &ram, number, 1), 1);
    }
    device.pause();
    assert_eq!(device.queue_state(2).map(|state| state.next_avail), Some(2));
    device.resume();
    assert_eq!(turned(&server.take()), [(0, false), (1, false), (0, true), (1, true)], "the server has no other queue");
    assert_eq!(device.stop_queue(2).map(|state| state.next_used), Some(2));
    reset(&device, 2);
    start(&device, &ram, &interrupts, 4);
    assert_eq!(turned(&server.take())[2..], [(0, true), (1, true), (2, false), (3, false)], "the next driver");
    assert!(interrupts.failures().is_empty());
}

#[test]
fn pairs_command_fails_if_the_server_refuses() {
    let refuses = Manner { vices: [(SET_VRING_ENABLE, Vice::Refuse)].into(), ..Manner::default() };
    let Running { server: _server, device, ram, .. } = Running::new(refuses, card(2), 1);
    start_control(&device);
    assert_eq!(use_pairs(&device, &ram, 0, 2), 1);
}

#[test]
fn server_slow_at_each_queue_is_limited_per_control_command() {
    // Each of four requests takes more than 200 ms. The limit for all four requests together is 500 ms.
    let slow =
        Manner { vices: [(SET_VRING_ENABLE, Vice::Dribble(Duration::from_millis(10)))].into(), ..Manner::default() };
    let Running { server, device, ram, .. } = Running::within(SHORT, slow, card(2), 4);
    start_control(&device);
    server.take();
    assert_eq!(use_pairs(&device, &ram, 0, 2), 0, "the next server gets the number of pairs");
    let turned = turned(&server.take());
    assert!(turned.len() <= 3, "{turned:?}");
}

#[test]
fn server_with_one_pair_serves_no_card_with_two() {
    let manner = || Manner { protocol: REPLY_ACK | MEM_SLOTS, ..Manner::default() };
    let error = connect(&Server::start(manner()), card(2)).err().unwrap().to_string();
    assert!(error.ends_with("only one queue pair (it lacks VHOST_USER_PROTOCOL_F_MQ); reduce num_queues"), "{error}");
    assert!(connect(&Server::start(manner()), card(1)).is_ok());
    let few = Manner { queues: 2, protocol: MQ, ..Manner::default() };
    let error = connect(&Server::start(few), card(2)).err().unwrap().to_string();
    assert!(
        error.ends_with(
            "has 2 of the 4 queues that the device needs; reduce num_queues, or use a server with more queues"
        ),
        "{error}"
    );
}

#[test]
fn net_card_continues_from_its_used_index_on_reconnect() {
    let Running { server, device, ram, interrupts } = Running::new(Manner::default(), card(1), 2);
    // The driver has added nine buffers. The server has used seven of these buffers, and still holds two.
    ram.write_obj(9u16, GuestAddress(RINGS[1] + 2)).unwrap();
    ram.write_obj(7u16, GuestAddress(RINGS[2] + 2)).unwrap();
    server.take();
    server.close();
    wait(|| device.counters().server_losses == 1);
    server.listen(Manner::default());
    let asked = server.wait_for(SET_VRING_KICK);
    let base = asked.iter().find(|one| one.request == SET_VRING_BASE).unwrap();
    assert_eq!(base.payload, [0u32, 7].map(u32::to_le_bytes).concat());
    wait(|| device.counters().server_connections == 2);
    assert!(interrupts.failures().is_empty(), "{:?}", interrupts.failures());
}
