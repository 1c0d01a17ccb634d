// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the loss of a server, and of the connection to the next server.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vm_memory::{Bytes, GuestAddress};

use super::super::connection::Times;
use super::super::model::Model;
use super::server::request::*;
use super::server::{Asked, CONFIG, INFLIGHT, MEM_SLOTS, MQ, Manner, REPLY_ACK, Server, Vice};
use super::support::{
    InterruptRecord, RINGS, Running, SHORT, TIMES, address, card, connect, connect_with, fs, ram, reset, start, wait,
};
use crate::virtio::VirtioDevice;

#[test]
fn lost_server_fails_file_system_until_the_next_driver() {
    let Running { server, device, ram, interrupts } = Running::new(Manner::default(), fs(), 2);
    server.take();
    server.close();
    wait(|| !interrupts.failures().is_empty());
    assert_eq!(interrupts.failures(), ["the vhost-user server closed the connection"]);
    server.listen(Manner::default());
    server.wait_for(GET_MAX_MEM_SLOTS);
    wait(|| device.counters().server_connections == 2);
    assert!(server.requests().is_empty(), "the next server gets no queue before the next driver");
    reset(&device, 2);
    start(&device, &ram, &interrupts, 2);
    assert!(server.requests().contains(&SET_VRING_KICK));
    assert_eq!(interrupts.failures().len(), 1);
}

#[test]
fn file_system_started_without_a_server_waits_for_the_next() {
    let server = Server::start(Manner::default());
    let device = connect(&server, fs()).unwrap();
    server.take();
    server.close();
    wait(|| device.counters().server_losses == 1);
    let interrupts = InterruptRecord::with_events(2);
    start(&device, &ram(1), &interrupts, 2);
    server.listen(Manner::default());
    server.wait_for(SET_VRING_KICK);
    assert!(interrupts.failures().is_empty());
}

/// Returns the description of a disk with one queue.
fn disk() -> Model {
    Model::block(1, 64)
}

/// Returns the behaviour of a disk server that offers feature 9 (`VIRTIO_BLK_F_FLUSH`). `account` is [`INFLIGHT`] if the server records
/// requests in flight, and 0 otherwise.
fn disk_server(account: u64) -> Manner {
    Manner {
        protocol: MQ | REPLY_ACK | CONFIG | MEM_SLOTS | account,
        features: 1 << 32 | 1 << 30 | 1 << 9,
        ..Manner::default()
    }
}

fn of(asked: &[Asked], request: u32) -> &Asked {
    asked.iter().find(|one| one.request == request).unwrap()
}

#[test]
fn idle_disk_resumes_on_the_next_server_at_its_used_index() {
    let Running { server, device, ram, interrupts } = Running::new(disk_server(0), disk(), 1);
    ram.write_obj(9u16, GuestAddress(RINGS[1] + 2)).unwrap();
    ram.write_obj(9u16, GuestAddress(RINGS[2] + 2)).unwrap();
    server.take();
    server.close();
    wait(|| device.counters().server_losses == 1);
    server.listen(disk_server(0));
    let asked = server.wait_for(SET_VRING_KICK);
    assert_eq!(of(&asked, SET_VRING_BASE).payload, [0u32, 9].map(u32::to_le_bytes).concat());
    assert_eq!((interrupts.failures(), device.counters().server_connections), (vec![], 2));
}

#[test]
fn busy_disk_reconnects_only_with_an_inflight_buffer() {
    for (account, fails) in [(0, true), (INFLIGHT, false)] {
        let Running { server, device, ram, interrupts } = Running::new(disk_server(account), disk(), 1);
        ram.write_obj(9u16, GuestAddress(RINGS[1] + 2)).unwrap();
        ram.write_obj(7u16, GuestAddress(RINGS[2] + 2)).unwrap();
        server.take();
        server.close();
        wait(|| device.counters().server_losses == 1);
        let reason = "the vhost-user server closed the connection, and did not record its 2 requests in flight, \
                      so no other server can continue them";
        assert_eq!(interrupts.failures(), if fails { vec![reason] } else { vec![] });
        server.listen(disk_server(account));
        if !fails {
            let asked = server.wait_for(SET_VRING_KICK);
            assert_eq!(of(&asked, SET_INFLIGHT_FD).files.len(), 1);
            assert!(asked.iter().all(|one| one.request != GET_INFLIGHT_FD), "the next server gets the existing file");
            assert_eq!(of(&asked, SET_VRING_BASE).payload, [0u32, 7].map(u32::to_le_bytes).concat());
        }
    }
}

#[test]
fn next_server_with_fewer_features_fails_the_disk() {
    let Running { server, device, interrupts, .. } = Running::new(disk_server(0), disk(), 1);
    server.close();
    wait(|| device.counters().server_losses == 1);
    server.listen(Manner { features: 1 << 32 | 1 << 30, ..disk_server(0) });
    wait(|| !interrupts.failures().is_empty());
    assert_eq!(
        interrupts.failures(),
        ["the vhost-user server lacks features that the driver negotiated with the previous server"]
    );
}

#[test]
fn configuration_follows_the_server() {
    let server = Server::start(Manner::default());
    let device = connect(&server, disk()).unwrap();
    let mut config = [0; 60];
    device.read_config(0, &mut config);
    assert_eq!((config[0], config[33], &config[34..37], config[59]), (0, 33, [1, 0, 36].as_slice(), 59));
    let interrupts = InterruptRecord::with_events(1);
    start(&device, &ram(1), &interrupts, 1);
    let asked = server.take();
    device.write_config(32, &[1]);
    let written = server.take();
    assert_eq!((written[0].request, written[0].payload.last()), (SET_CONFIG, Some(&1)));
    for (offset, data) in [(31, [1].as_slice()), (32, &[1, 1]), (33, &[1]), (usize::MAX, &[1]), (32, &[])] {
        device.write_config(offset, data);
    }
    assert!(server.requests().is_empty(), "no other byte can be written");
    let mut channel = UnixStream::from(of(&asked, SET_BACKEND_REQ_FD).files[0].try_clone().unwrap());
    channel.write_all(&[2u32, 1, 0].map(u32::to_le_bytes).concat()).unwrap();
    server.wait_for(GET_CONFIG);
    wait(|| interrupts.changed.load(Ordering::SeqCst) == 1);
}

#[test]
fn server_without_the_config_feature_serves_no_disk() {
    let manner = Manner { protocol: MQ | REPLY_ACK, ..Manner::default() };
    let error = connect(&Server::start(manner), disk()).err().unwrap().to_string();
    assert!(error.ends_with("(it lacks VHOST_USER_PROTOCOL_F_CONFIG): use another server"), "{error}");
}

/// Returns the behaviour of a server that responds to each request in `requests` with the misbehaviour `vice`.
fn at(requests: &[u32], vice: &Vice) -> Manner {
    Manner { vices: requests.iter().map(|request| (*request, vice.clone())).collect(), ..Manner::default() }
}

#[test]
fn slow_next_server_delays_pause_by_at_most_one_operation() {
    let Running { server, device, interrupts, .. } = Running::within(SHORT, Manner::default(), card(1), 2);
    server.close();
    wait(|| device.counters().server_losses == 1);
    server.take();
    // Each answer takes more than 300 ms. The limit for all answers together is 500 ms.
    let slow = [SET_VRING_NUM, SET_VRING_BASE, SET_VRING_ADDR, SET_VRING_CALL];
    server.listen(at(&slow, &Vice::Dribble(Duration::from_millis(15))));
    server.wait_for(SET_VRING_NUM);
    device.pause();
    let asked = server.requests();
    assert!(asked.len() <= 1, "the pause waited for more requests: {asked:?}");
    assert!(interrupts.failures().is_empty(), "{:?}", interrupts.failures());
}

#[test]
fn successive_slow_servers_share_one_connection_time_budget() {
    // Each answer takes more than 60 ms. The first 4 ms of each answer are not charged to the budget of 450 ms.
    let slow = [GET_FEATURES, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_MAX_MEM_SLOTS];
    let manner = at(&slow, &Vice::Dribble(Duration::from_millis(3)));
    let server = Server::start(manner.clone());
    let address = address(&server, card(1), TIMES);
    for number in 1..=10 {
        let _ = address.connect();
        wait(|| server.ended() == number);
        server.listen(manner.clone());
    }
    let asked = server.requests().iter().filter(|request| slow.contains(request)).count();
    // Eight answers use up the budget. After that, the front end sends only one request on each connection, and the connection fails
    // because the answer is late. The budget refills slowly and so allows a few more requests.
    assert!(asked <= 21, "{asked} requests");
}

#[test]
fn reconnect_is_postponed_once_the_time_budget_is_spent() {
    let server = Server::start(Manner::default());
    let times = Times { drain: Duration::from_millis(400), other: Duration::from_millis(600) };
    let device = connect_with(&server, card(1), times).unwrap();
    let interrupts = InterruptRecord::with_events(0);
    start(&device, &ram(1), &interrupts, 2);
    let asked = server.take();
    server.close();
    wait(|| server.ended() == 1);
    // This server never answers, and so spends nearly the whole budget.
    server.listen(at(&[SET_VRING_NUM], &Vice::Silent));
    wait(|| server.ended() == 2);
    server.take();
    server.listen(Manner::default());
    // Write an eventfd of the first server. The eventfd still wakes the front end, but the wake-up must not cause an earlier attempt to
    // connect.
    rustix::io::write(&of(&asked, SET_VRING_CALL).files[0], &1u64.to_ne_bytes()).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    let asked = server.requests();
    assert!(asked.is_empty(), "the next attempt to connect is after five seconds: {asked:?}");
    server.wait_for(SET_OWNER);
    assert!(interrupts.failures().is_empty(), "{:?}", interrupts.failures());
}
