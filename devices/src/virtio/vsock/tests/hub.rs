// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of connections between host programs and a guest that follows the rules.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use super::guest::{Guest, Ports, ROOM};
use crate::virtio::vsock::connection::MOST_DATA;
use crate::virtio::vsock::credit::BUF_ALLOC;
use crate::virtio::vsock::packet::Header;
use crate::virtio::vsock::spec::{op, shutdown};

const PORTS: Ports = Ports { guest: 1025, host: 52 };

#[test]
fn host_client_is_connected_after_guest_accepts() {
    let mut guest = Guest::new();
    let (ports, mut client) = guest.of_host(1024);
    assert!(ports.host >= 1 << 30);
    client.write_all(b"hello").unwrap();
    assert_eq!(guest.data(), b"hello");
    guest.write(ports, b"world!");
    let mut text = [0; 6];
    client.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"world!");
    let (other, _client) = guest.of_host(1024);
    assert_ne!(other.host, ports.host, "each connection to a port has its own host port");
    assert_eq!(guest.ends.counts.connections.load(Ordering::Relaxed), 2);
}

#[test]
fn client_data_before_the_response_is_kept() {
    let mut guest = Guest::new();
    let mut client = guest.client(7);
    client.write_all(b"early").unwrap();
    let request = guest.expect(op::REQUEST);
    assert!(guest.next().is_none(), "no data is sent before the guest has answered");
    guest.say(Ports { guest: 7, host: request.src_port }, op::RESPONSE);
    assert_eq!(guest.data(), b"early");
}

#[test]
fn client_line_is_handled_once_complete() {
    let mut guest = Guest::new();
    let mut slow = UnixStream::connect(guest.path()).unwrap();
    for byte in b"CONNECT 1024" {
        slow.write_all(&[*byte]).unwrap();
        assert!(guest.next().is_none(), "the guest is not sent a request yet");
    }
    // Another client is connected, although the first client has not finished its line.
    let (_, _other) = guest.of_host(7);
    slow.write_all(b"\nearly").unwrap();
    let request = guest.expect(op::REQUEST);
    assert_eq!(request.dst_port, 1024);
    guest.say(Ports { guest: 1024, host: request.src_port }, op::RESPONSE);
    assert_eq!(guest.data(), b"early");
}

#[test]
fn client_refused_by_the_guest_is_closed() {
    let mut guest = Guest::new();
    let mut client = guest.client(7);
    let request = guest.expect(op::REQUEST);
    guest.say(Ports { guest: 7, host: request.src_port }, op::RST);
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    assert!(guest.next().is_none());
}

#[test]
fn guest_connects_to_the_ports_server() {
    let mut guest = Guest::new();
    let mut served = guest.of_guest(PORTS);
    guest.write(PORTS, b"from the guest");
    let mut text = [0; 14];
    served.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"from the guest");
    served.write_all(b"to the guest").unwrap();
    assert_eq!(guest.data(), b"to the guest");
}

#[test]
fn unserved_port_is_refused() {
    let mut guest = Guest::new();
    guest.say(PORTS, op::REQUEST);
    let reset = guest.expect(op::RST);
    assert_eq!((reset.src_port, reset.dst_port), (PORTS.host, PORTS.guest));
    assert_eq!(guest.ends.counts.refused.load(Ordering::Relaxed), 1);
}

#[test]
fn data_to_the_guest_stays_within_its_credit() {
    let mut guest = Guest::new();
    let mut served = guest.of_guest(PORTS);
    served.set_nonblocking(true).unwrap();
    let block = [7u8; 8192];
    let (mut sent, mut got, mut asked) = (0, 0, 0);
    for _ in 0..1000 {
        sent += served.write(&block).unwrap_or(0);
        match guest.next_with(4000) {
            Some((header, data)) if header.op == op::RW => {
                assert!(data.len() <= 4000);
                got += data.len();
            }
            Some((header, _)) => {
                assert_eq!(header.op, op::CREDIT_REQUEST);
                asked += 1;
            }
            None => {}
        }
    }
    assert_eq!((got, asked), (ROOM as usize, 1));
    // The guest reports that it has read 1000 bytes, and so has room for 1000 bytes.
    guest.send(&Header { fwd_cnt: 1000, ..Guest::header(PORTS, op::CREDIT_UPDATE) }, &[]);
    let (header, data) = guest.next().unwrap();
    assert_eq!((header.op, data.len()), (op::RW, 1000));
    guest.expect(op::CREDIT_REQUEST);
    // From here on, the guest reports after each packet that it has read all data.
    let mut forwarded = ROOM + 1000;
    while got + 1000 < sent {
        guest.send(&Header { fwd_cnt: forwarded, ..Guest::header(PORTS, op::CREDIT_UPDATE) }, &[]);
        let (header, data) = guest.next_with(MOST_DATA).unwrap();
        assert_eq!(header.op, op::RW);
        got += data.len();
        forwarded += header.len;
    }
    assert_eq!(guest.next(), None);
}

#[test]
fn unread_bytes_are_kept_within_the_advertised_credit() {
    let mut guest = Guest::new();
    let mut served = guest.of_guest(PORTS);
    // The guest sends as much as its credit allows, while the host program reads nothing.
    let (mut known, mut sent) = (0u32, 0u32);
    let pattern = |from: u32, len: u32| (from..from + len).map(|n| (n % 251) as u8).collect::<Vec<_>>();
    loop {
        let room = u32::try_from(BUF_ALLOC).unwrap() - (sent - known);
        if room == 0 {
            break;
        }
        let len = room.min(10_000);
        guest.write(PORTS, &pattern(sent, len));
        sent += len;
        while let Some((header, _)) = guest.next() {
            assert_eq!(header.op, op::CREDIT_UPDATE);
            known = header.fwd_cnt;
        }
    }
    // The device reports the bytes in the socket's buffer as forwarded, so the guest could send more than `BUF_ALLOC` bytes.
    assert!(known > 0 && sent as usize == known as usize + BUF_ALLOC);
    let mut got = vec![0; sent as usize];
    let mut done = 0;
    while done < got.len() {
        done += served.read(&mut got[done..]).unwrap();
        guest.turn();
    }
    assert_eq!(got, pattern(0, sent));
    let update = guest.expect(op::CREDIT_UPDATE);
    assert!(update.fwd_cnt > known, "the guest gets more credit");
    known = update.fwd_cnt;
    while let Some((header, _)) = guest.next() {
        known = header.fwd_cnt;
    }
    assert!(sent - known <= u32::try_from(BUF_ALLOC).unwrap() / 2);
}

#[test]
fn credit_request_is_answered() {
    let mut guest = Guest::new();
    let _served = guest.of_guest(PORTS);
    guest.write(PORTS, b"12345");
    assert!(guest.next().is_none());
    guest.say(PORTS, op::CREDIT_REQUEST);
    assert_eq!(guest.expect(op::CREDIT_UPDATE).fwd_cnt, 5);
    assert!(guest.next().is_none());
}

#[test]
fn each_side_may_stop_sending_and_still_receive() {
    let mut guest = Guest::new();
    let mut served = guest.of_guest(PORTS);
    served.write_all(b"question").unwrap();
    served.shutdown(Shutdown::Write).unwrap();
    let (_, data) = guest.next().unwrap();
    assert_eq!(data, b"question");
    assert_eq!(guest.expect(op::SHUTDOWN).flags, shutdown::SEND);
    guest.write(PORTS, b"answer");
    guest.shut(PORTS, shutdown::BOTH);
    guest.expect(op::RST);
    let mut answer = String::new();
    served.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "answer");

    let (ports, mut client) = guest.of_host(9);
    guest.write(ports, b"question");
    guest.shut(ports, shutdown::SEND);
    let mut question = String::new();
    client.read_to_string(&mut question).unwrap();
    assert_eq!(question, "question");
    client.write_all(b"answer").unwrap();
    drop(client);
    assert_eq!(guest.next().unwrap().1, b"answer");
    assert_eq!(guest.expect(op::SHUTDOWN).flags, shutdown::BOTH);
    guest.say(ports, op::RST);
    assert!(guest.next().is_none());
}

#[test]
fn guest_receive_shutdown_reaches_the_host_program() {
    let mut guest = Guest::new();
    let mut served = guest.of_guest(PORTS);
    guest.shut(PORTS, shutdown::RECEIVE);
    assert!(served.write_all(b"x").is_err());
    guest.write(PORTS, b"still");
    served.read_exact(&mut [0; 5]).unwrap();
    drop(served);
    assert_eq!(guest.expect(op::SHUTDOWN).flags, shutdown::BOTH);
}

#[test]
fn host_receive_shutdown_reaches_the_guest() {
    let mut guest = Guest::new();
    let served = guest.of_guest(PORTS);
    served.shutdown(Shutdown::Read).unwrap();
    guest.write(PORTS, b"for nobody");
    assert_eq!(guest.expect(op::SHUTDOWN).flags, shutdown::RECEIVE);
    // Data that the guest sent before it received the shutdown is dropped without an error.
    guest.write(PORTS, b"for nobody");
    (&served).write_all(b"but").unwrap();
    assert_eq!(guest.data(), b"but");
}

#[test]
fn data_sent_before_the_guest_closed_arrives() {
    let mut guest = Guest::new();
    let mut served = guest.of_guest(PORTS);
    let part = vec![1; 60_000];
    let mut sent = 0;
    // Send more than the socket holds, so that the device keeps a part.
    while sent < 300_000 {
        guest.write(PORTS, &part);
        sent += part.len();
        while guest.next().is_some() {}
    }
    guest.shut(PORTS, shutdown::BOTH);
    assert!(guest.next().is_none(), "the reset is sent after all data was forwarded");
    let mut got = 0;
    while got < sent {
        got += served.read(&mut [0; 65536]).unwrap();
        guest.turn();
    }
    assert_eq!(served.read(&mut [0; 8]).unwrap(), 0);
    while let Some((header, _)) = guest.next() {
        assert!(header.op == op::RST || header.op == op::CREDIT_UPDATE, "{header:?}");
    }
}

#[test]
fn host_closed_connection_ends_after_guest_answer() {
    for answer in [op::RST, op::SHUTDOWN] {
        let mut guest = Guest::new();
        let served = guest.of_guest(PORTS);
        drop(served);
        assert_eq!(guest.expect(op::SHUTDOWN).flags, shutdown::BOTH);
        // The guest may have sent this data before it received the shutdown. So the device drops the data without a reset.
        guest.write(PORTS, b"late");
        if answer == op::SHUTDOWN {
            guest.shut(PORTS, shutdown::BOTH);
            guest.expect(op::RST);
        } else {
            guest.say(PORTS, answer);
        }
        assert!(guest.next().is_none());
        // The connection no longer exists, so the device answers the data with a reset.
        guest.write(PORTS, b"later");
        guest.expect(op::RST);
    }
}

#[test]
fn connections_send_in_turns() {
    let mut guest = Guest::new();
    let (first, mut one) = guest.of_host(1);
    let (second, mut two) = guest.of_host(2);
    one.write_all(&[1; 5000]).unwrap();
    two.write_all(&[2; 5000]).unwrap();
    let mut order = Vec::new();
    while let Some((header, _)) = guest.next_with(1000) {
        order.push(header.dst_port);
    }
    assert_eq!(order.len(), 10);
    assert!(order.chunks(2).all(|pair| pair.contains(&first.guest) && pair.contains(&second.guest)), "{order:?}");
}
