// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests with servers that refuse, send wrong answers, do not answer, or close the connection. The front end must never wait long for a
//! server, and must check all answers.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::super::model::Model;
use super::server::request::*;
use super::server::{CONFIG, MQ, Manner, REPLY_ACK, Server, Vice, message};
use super::support::{InterruptRecord, Running, TIMES, connect_briefly, fs, ram, reset, start, wait};
use crate::peer_timeouts::Operation;
use crate::virtio::VirtioDevice;

fn with(request: u32, vice: Vice) -> Manner {
    Manner { vices: [(request, vice)].into(), ..Manner::default() }
}

/// Returns the error of a failed connection.
fn refused(manner: Manner) -> String {
    connect_briefly(&Server::start(manner), fs()).err().expect("a device was created").to_string()
}

#[test]
fn server_that_lacks_what_the_device_needs_is_refused() {
    let legacy = Manner { features: 1 << 30, ..Manner::default() };
    assert_eq!(
        refused(legacy),
        "the vhost-user server supports only legacy drivers (it lacks VIRTIO_F_VERSION_1): use another server"
    );
    let few = Manner { queues: 1, ..Manner::default() };
    assert_eq!(
        refused(few),
        "the vhost-user server has 1 of the 2 queues that the device needs; reduce num_queues, or use a server with more queues"
    );
}

#[test]
fn missing_socket_is_reported_with_its_error() {
    let server = Server::start(Manner::default());
    std::fs::remove_file(server.socket()).unwrap();
    let start = Instant::now();
    let error = connect_briefly(&server, fs()).err().unwrap().to_string();
    assert!(error.starts_with("cannot connect to the vhost-user server: No such file"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(60));
}

#[test]
fn server_that_misbehaves_at_connect_yields_no_device() {
    for (request, vice, reason) in [
        (GET_FEATURES, Vice::Silent, "did not complete GET_FEATURES in time (limit: 200 ms)"),
        (GET_FEATURES, Vice::Close, "closed the connection during GET_FEATURES"),
        (
            GET_QUEUE_NUM,
            Vice::Answer(message(GET_QUEUE_NUM, &u64::MAX.to_le_bytes())),
            "sent an invalid answer to GET_QUEUE_NUM",
        ),
        (GET_FEATURES, Vice::Answer(message(SET_OWNER, &[0; 8])), "sent an invalid answer to GET_FEATURES"),
        (GET_FEATURES, Vice::Answer(vec![0xff; 20]), "sent an invalid answer to GET_FEATURES"),
        // This answer is only part of a message.
        (GET_FEATURES, Vice::Answer(message(GET_FEATURES, &[0; 8])[..15].to_vec()), "did not complete GET_FEATURES"),
    ] {
        let error = refused(with(request, vice));
        assert!(error.starts_with(&format!("the vhost-user server {reason}")), "{error}");
    }
}

#[test]
fn server_that_refuses_a_queue_fails_the_device_and_stays() {
    let Running { server: _server, device, interrupts, .. } =
        Running::briefly(with(SET_VRING_ADDR, Vice::Refuse), fs(), 2);
    assert_eq!(
        interrupts.failures(),
        ["the vhost-user server refused the request SET_VRING_ADDR; see the server's log"]
    );
    assert_eq!((device.counters().server_refusals, device.counters().server_losses), (1, 0));
    reset(&device, 2);
}

#[test]
fn silent_server_does_not_block_calls_for_long() {
    for request in [SET_FEATURES, SET_MEM_TABLE, SET_VRING_KICK, GET_VRING_BASE] {
        let server = Server::start(with(request, Vice::Silent));
        let device = connect_briefly(&server, fs()).unwrap();
        let (ram, interrupts, begin) = (ram(1), InterruptRecord::with_events(2), Instant::now());
        start(&device, &ram, &interrupts, 2);
        device.pause();
        device.resume();
        assert!(begin.elapsed() < Duration::from_secs(60), "{request}: several calls waited");
        wait(|| device.counters().server_losses == 1);
        reset(&device, 2);
        drop(device);
    }
}

#[test]
fn answers_sent_byte_by_byte_are_accepted() {
    let all = [GET_FEATURES, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, SET_MEM_TABLE, SET_VRING_KICK, GET_VRING_BASE];
    let vices = all.map(|request| (request, Vice::Dribble(Duration::ZERO))).into();
    let Running { server: _server, device, interrupts, .. } =
        Running::briefly(Manner { vices, ..Manner::default() }, fs(), 2);
    device.pause();
    device.resume();
    reset(&device, 2);
    assert_eq!((interrupts.failures(), device.counters().server_losses), (Vec::new(), 0));
}

#[test]
fn server_dribbling_bytes_is_dropped_within_the_time_limit() {
    // Each of the answer's 20 bytes arrives in time, but the whole answer takes three times the limit.
    let slow = Vice::Dribble(TIMES.other * 3 / 20);
    let begin = Instant::now();
    let error = refused(with(GET_FEATURES, slow.clone()));
    assert_eq!(
        error,
        "the vhost-user server did not complete GET_FEATURES in time (limit: 200 ms); see the server's log"
    );
    let Running { server: _server, device, interrupts, .. } = Running::briefly(with(SET_VRING_KICK, slow), fs(), 2);
    wait(|| !interrupts.failures().is_empty());
    assert_eq!(
        interrupts.failures(),
        ["the vhost-user server did not complete SET_VRING_KICK in time (limit: 200 ms)"]
    );
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    wait(|| device.counters().server_losses == 1);
    reset(&device, 2);
}

#[test]
fn server_slow_at_every_request_is_limited_per_operation() {
    // Each of the sixteen requests takes more than 60 ms. The limit is 200 ms for a single request, and also 200 ms for all requests of the
    // operation together.
    let all =
        [SET_FEATURES, SET_MEM_TABLE, SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, SET_VRING_KICK, SET_VRING_CALL];
    let vices = all.map(|request| (request, Vice::Dribble(Duration::from_millis(3)))).into();
    let server = Server::start(Manner { vices, ..Manner::default() });
    let device = connect_briefly(&server, fs()).unwrap();
    let (ram, interrupts) = (ram(1), InterruptRecord::with_events(2));
    server.take();
    let operation = Operation::begin();
    start(&device, &ram, &interrupts, 2);
    drop(operation);
    wait(|| device.counters().server_losses == 1);
    let asked = server.requests();
    assert!(asked.len() <= 5, "{asked:?}");
}

#[test]
fn server_flooding_config_changes_does_not_hold_up_pauses() {
    // Each answer takes about 50 ms. Answers that are so fast are not charged to the budget.
    let Running { server, device, .. } =
        Running::new(with(GET_CONFIG, Vice::Dribble(Duration::from_micros(500))), Model::block(1, 64), 1);
    let asked = server.take();
    let given = asked.iter().find(|one| one.request == SET_BACKEND_REQ_FD).unwrap();
    let mut channel = UnixStream::from(given.files[0].try_clone().unwrap());
    channel.write_all(&[2u32, 1, 0].map(u32::to_le_bytes).concat().repeat(2000)).unwrap();
    let mut waited = 0;
    for _ in 0..8 {
        server.wait_for(GET_CONFIG);
        device.pause();
        let asked = server.requests();
        let before = asked.iter().take_while(|request| **request != GET_VRING_BASE);
        waited += before.filter(|request| **request == GET_CONFIG).count();
        device.resume();
    }
    // `waited` counts the requests that the front end sent after a pause began, and before the pause stopped the queue.
    assert!(waited <= 16, "{waited} more answers were waited for at 8 pauses");
}

#[test]
fn kick_eventfd_made_blocking_by_the_server_blocks_no_call() {
    let server = Server::start(Manner::default());
    let device = connect_briefly(&server, fs()).unwrap();
    let interrupts = InterruptRecord::with_events(0);
    start(&device, &ram(1), &interrupts, 2);
    let asked = server.take();
    for one in asked.iter().filter(|one| [SET_VRING_KICK, SET_VRING_CALL].contains(&one.request)) {
        rustix::fs::fcntl_setfl(&one.files[0], rustix::fs::OFlags::empty()).unwrap();
    }
    let kicks: Vec<_> = asked.iter().filter(|one| one.request == SET_VRING_KICK).collect();
    wait(|| rustix::io::read(&kicks[0].files[0], &mut [0; 8]).is_ok());
    rustix::io::write(&kicks[0].files[0], &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let begin = Instant::now();
    device.notify(0).unwrap();
    device.notify(0).unwrap();
    device.pause();
    device.resume();
    reset(&device, 2);
    drop(device);
    assert!(begin.elapsed() < Duration::from_secs(10));
}

#[test]
fn silent_server_of_a_device_with_running_queues_fails_it() {
    let Running { server: _server, device, interrupts, .. } =
        Running::briefly(with(GET_VRING_BASE, Vice::Silent), fs(), 2);
    device.pause();
    wait(|| !interrupts.failures().is_empty());
    assert_eq!(
        interrupts.failures(),
        ["the vhost-user server did not complete GET_VRING_BASE in time (limit: 300 ms)"]
    );
}

#[test]
fn impossible_ring_position_ends_the_connection() {
    let Running { server: _server, device, interrupts, .. } =
        Running::briefly(Manner { base: 0x1_0000, ..Manner::default() }, fs(), 1);
    device.pause();
    wait(|| device.counters().server_losses == 1);
    assert_eq!(
        interrupts.failures(),
        ["the vhost-user server answered GET_VRING_BASE with 65536, but the maximum is 65535"]
    );
}

#[test]
fn server_without_protocol_features_works() {
    let manner = Manner { features: 1 << 32, protocol: 0, ..Manner::default() };
    let server = Server::start(manner);
    let device = connect_briefly(&server, fs()).unwrap();
    assert_eq!(server.requests(), [SET_OWNER, GET_FEATURES]);
    let interrupts = InterruptRecord::with_events(2);
    start(&device, &ram(1), &interrupts, 1);
    // The server does not acknowledge requests. The answer to GET_VRING_BASE shows that the server has received all earlier requests.
    device.pause();
    let asked = server.requests();
    assert!(!asked.contains(&SET_VRING_ENABLE) && asked.last() == Some(&GET_VRING_BASE), "{asked:?}");
    assert!(interrupts.failures().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn any_answer_is_taken_or_ends_the_connection(
        at in prop::sample::select(vec![
            GET_FEATURES, GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_MAX_MEM_SLOTS, SET_FEATURES,
            SET_MEM_TABLE, SET_VRING_NUM, SET_VRING_KICK, GET_VRING_BASE,
        ]),
        proper in any::<bool>(),
        bytes in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let answer = if proper { message(at, &bytes) } else { bytes };
        let protocol = MQ | REPLY_ACK | CONFIG | super::server::MEM_SLOTS;
        let server = Server::start(Manner { protocol, ..with(at, Vice::Answer(answer)) });
        let begin = Instant::now();
        if let Ok(device) = connect_briefly(&server, fs()) {
            let interrupts = InterruptRecord::with_events(2);
            start(&device, &ram(1), &interrupts, 2);
            device.pause();
            device.resume();
            reset(&device, 2);
        }
        prop_assert!(begin.elapsed() < Duration::from_secs(10));
    }
}
