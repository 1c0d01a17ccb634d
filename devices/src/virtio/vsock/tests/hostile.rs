// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests with guests and host programs that break rules.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use proptest::prelude::*;

use super::guest::{CID, CONNECTIONS, Guest, Ports};
use crate::virtio::vsock::credit::BUF_ALLOC;
use crate::virtio::vsock::hub::MOST_CLIENTS;
use crate::virtio::vsock::packet::Header;
use crate::virtio::vsock::spec::{HOST_CID, PORT_ANY, TYPE_STREAM, op, shutdown};

const PORTS: Ports = Ports { guest: 1025, host: 52 };

#[test]
fn packets_of_unknown_connections_are_reset_but_resets_ignored() {
    let mut guest = Guest::new();
    for op in [0, op::RESPONSE, op::SHUTDOWN, op::RW, op::CREDIT_UPDATE, op::CREDIT_REQUEST, 8, u16::MAX] {
        guest.say(PORTS, op);
        let reset = guest.expect(op::RST);
        assert_eq!((reset.src_port, reset.dst_port), (PORTS.host, PORTS.guest));
    }
    guest.say(PORTS, op::RST);
    assert!(guest.next().is_none());
}

#[test]
fn wrong_type_or_dst_cid_is_reset_and_wrong_source_ignored() {
    let mut guest = Guest::new();
    let _server = guest.serve(PORTS.host);
    guest.send(&Header { kind: 2, ..Guest::header(PORTS, op::REQUEST) }, &[]);
    let (reset, _) = guest.next().unwrap();
    assert_eq!((reset.op, reset.kind), (op::RST, 2));
    guest.send(&Header { dst_cid: 77, ..Guest::header(PORTS, op::REQUEST) }, &[]);
    let reset = guest.expect(op::RST);
    assert_eq!(reset.src_cid, 77);
    // The device does not answer a packet with a wrong source, because the answer would have no valid destination.
    for (src_cid, src_port) in [(CID + 1, 1), (HOST_CID, 1), (u64::MAX, 1), (CID, PORT_ANY)] {
        guest.send(&Header { src_cid, src_port, ..Guest::header(PORTS, op::REQUEST) }, &[]);
        assert!(guest.next().is_none());
    }
}

#[test]
fn forbidden_guest_packet_resets_the_connection() {
    let too_much = u32::try_from(BUF_ALLOC).unwrap() + 1;
    let packet = |op| Guest::header(PORTS, op);
    for (number, bad) in [
        packet(op::REQUEST),
        packet(op::RESPONSE),
        packet(0),
        packet(99),
        Header { len: too_much, ..packet(op::RW) },
        Header { len: u32::MAX, ..packet(op::RW) },
    ]
    .into_iter()
    .enumerate()
    {
        let mut guest = Guest::new();
        let mut served = guest.of_guest(PORTS);
        guest.send(&bad, &[]);
        guest.expect(op::RST);
        assert_eq!(served.read(&mut [0; 8]).unwrap(), 0, "{number}");
        assert_eq!(guest.ends.counts.resets.load(Ordering::Relaxed), 1);
        assert!(guest.next().is_none());
    }
}

#[test]
fn data_after_send_shutdown_is_reset() {
    let mut guest = Guest::new();
    let _served = guest.of_guest(PORTS);
    guest.shut(PORTS, shutdown::SEND | 0xffff_fff0);
    guest.write(PORTS, b"x");
    guest.expect(op::RST);
}

#[test]
fn response_before_the_request_is_reset() {
    let mut guest = Guest::new();
    let mut client = guest.client(5);
    guest.turn();
    // The guest answers a request that the device has not sent yet. The guest can easily guess the port of this request.
    guest.say(Ports { guest: 5, host: 1 << 30 }, op::RESPONSE);
    guest.expect(op::RST);
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn data_beyond_the_credit_is_reset() {
    let mut guest = Guest::new();
    let _served = guest.of_guest(PORTS);
    let part = vec![0; 64 << 10];
    let mut parts = 0;
    while guest.ends.counts.resets.load(Ordering::Relaxed) == 0 {
        guest.write(PORTS, &part);
        parts += 1;
        assert!(parts < 100, "the amount of kept data is bounded");
    }
}

#[test]
fn number_of_connections_is_bounded() {
    let mut guest = Guest::new();
    let server = guest.serve(52);
    let mut kept = Vec::new();
    for port in 0..u32::try_from(CONNECTIONS).unwrap() + 10 {
        guest.say(Ports { guest: port, host: 52 }, op::REQUEST);
        let (answer, _) = guest.next().unwrap();
        if answer.op == op::RESPONSE {
            kept.push(server.accept().unwrap().0);
        }
    }
    assert_eq!(kept.len(), CONNECTIONS);
    // At the limit, the device refuses a host client too.
    let mut client = guest.client(1);
    guest.turn();
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    drop(kept.pop());
    assert_eq!(guest.expect(op::SHUTDOWN).flags, shutdown::BOTH);
    // The connection counts towards the limit until the guest has answered the shutdown.
    guest.say(Ports { guest: u32::try_from(CONNECTIONS).unwrap() - 1, host: 52 }, op::RST);
    guest.of_host(1);
}

#[test]
fn flood_of_requests_and_resets_takes_no_memory() {
    let mut guest = Guest::new();
    let server = guest.serve(PORTS.host);
    server.set_nonblocking(true).unwrap();
    for _ in 0..10_000 {
        // The guest adds no buffers. `say` checks that all collections are bounded.
        if guest.hub.is_full() {
            break;
        }
        guest.say(PORTS, op::REQUEST);
        guest.say(PORTS, op::RST);
        drop(server.accept());
    }
    let mut asked = 0;
    while !guest.hub.is_full() {
        guest.say(PORTS, op::CREDIT_REQUEST);
        asked += 1;
        assert!(asked < 1000, "the device accepts no more packets than it can answer");
    }
    while guest.next().is_some() {}
    assert!(!guest.hub.is_full());
}

#[test]
fn silent_clients_do_not_block_other_clients() {
    let mut guest = Guest::new();
    let mut silent = Vec::new();
    for _ in 0..MOST_CLIENTS + 5 {
        silent.push(UnixStream::connect(guest.path()).unwrap());
        guest.turn();
    }
    assert_eq!(silent[0].read(&mut [0; 8]).unwrap(), 0, "the first client was closed");
    let (_, _client) = guest.of_host(3);
}

#[test]
fn client_with_invalid_first_line_is_closed() {
    for words in ["GET / HTTP/1.1\n", "CONNECT\n", "CONNECT 99999999999\n", "a line that does not end, and is too long"]
    {
        let mut guest = Guest::new();
        let mut client = UnixStream::connect(guest.path()).unwrap();
        client.write_all(words.as_bytes()).unwrap();
        guest.turn();
        let end = client.read(&mut [0; 8]);
        // If the closed socket has unread data, the client reads a connection reset instead of an end of stream.
        assert!(matches!(end, Ok(0)) || end.is_err(), "{words:?}");
        assert!(guest.next().is_none());
    }
}

#[test]
fn client_that_leaves_early_is_reset_on_the_guest() {
    let mut guest = Guest::new();
    drop(guest.client(4));
    assert!(guest.next().is_none(), "the guest was not sent a request yet");
    let client = guest.client(4);
    let request = guest.expect(op::REQUEST);
    drop(client);
    let reset = guest.expect(op::RST);
    assert_eq!((reset.src_port, reset.dst_port), (request.src_port, 4));
}

/// Random action of the guest or of a host program.
#[derive(Clone, Debug)]
enum Act {
    Packet { op: u16, port: u32, host: u32, len: u32, flags: u32, fwd_cnt: u32, kind: u16 },
    Take,
    Client { port: u32, words: bool },
    Write(usize),
    Read(usize),
    Close(usize),
}

fn act() -> impl Strategy<Value = Act> {
    let ports = prop_oneof![3 => 0u32..3, 1 => (1u32 << 30)..(1 << 30) + 3];
    let lens = prop_oneof![0u32..9, Just(65536), Just(200_000), any::<u32>()];
    prop_oneof![
        6 => (0u16..9, 0u32..3, ports, lens, 0u32..4, any::<u32>(), prop_oneof![9 => Just(TYPE_STREAM), 1 => any::<u16>()])
            .prop_map(|(op, port, host, len, flags, fwd_cnt, kind)| Act::Packet { op, port, host, len, flags, fwd_cnt, kind }),
        4 => Just(Act::Take),
        1 => (0u32..3, any::<bool>()).prop_map(|(port, words)| Act::Client { port, words }),
        1 => any::<usize>().prop_map(Act::Write),
        1 => any::<usize>().prop_map(Act::Read),
        1 => any::<usize>().prop_map(Act::Close),
    ]
}

proptest! {
    #[test]
    fn random_sequence_of_actions_does_no_harm(acts in prop::collection::vec(act(), 1..200)) {
        let mut guest = Guest::new();
        let servers = [guest.serve(0), guest.serve(1)];
        servers.iter().for_each(|server| server.set_nonblocking(true).unwrap());
        let mut peers: Vec<UnixStream> = Vec::new();
        for act in acts {
            for (peer, _) in servers.iter().filter_map(|server| server.accept().ok()) {
                peer.set_nonblocking(true).unwrap();
                peers.push(peer);
            }
            let count = peers.len().max(1);
            match act {
                Act::Packet { op, port, host, len, flags, fwd_cnt, kind } => {
                    let ports = Ports { guest: port, host };
                    let header = Header { len, flags, fwd_cnt, kind, ..Guest::header(ports, op) };
                    guest.send(&header, &vec![0; (len as usize).min(BUF_ALLOC)]);
                }
                Act::Take => drop(guest.next_with(777)),
                Act::Client { port, words } => {
                    let mut client = UnixStream::connect(guest.path()).unwrap();
                    client.set_nonblocking(true).unwrap();
                    if words {
                        client.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
                    }
                    peers.push(client);
                    guest.turn();
                }
                // The write may fail: a peer may have closed its socket, or its socket may be full.
                Act::Write(which) => drop(peers.get(which % count).map(|mut peer| peer.write(&[1; 3000]))),
                Act::Read(which) => drop(peers.get(which % count).map(|mut peer| peer.read(&mut [0; 3000]))),
                Act::Close(which) => drop((which % count < peers.len()).then(|| peers.swap_remove(which % count))),
            }
        }
        // The device must become idle after any sequence of actions.
        for _ in 0..10_000 {
            if guest.next().is_none() {
                break;
            }
        }
        prop_assert!(guest.next().is_none());
    }

    #[test]
    fn random_rings_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..0x3000)) {
        crate::virtio::vsock::fuzzing::run(&bytes);
    }
}
