// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests with slow, numerous and hostile clients, and with clients that send descriptors.

use std::fs;
use std::io::{BufReader, ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

use crate::http::{LIMIT, receive, send};
use crate::{Carom, wait_for};

/// Sends `bytes` with `count` descriptors in one message.
fn send_with_descriptors(stream: &UnixStream, bytes: &[u8], count: usize) {
    let file = fs::File::open("/dev/null").unwrap();
    let files = vec![file.as_fd(); count];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(count == 0 || control.push(SendAncillaryMessage::ScmRights(&files)));
    let sent = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    assert_eq!(sent, bytes.len());
}

#[test]
fn unused_descriptors_sent_with_requests_are_closed() {
    let carom = Carom::start();
    let stream = carom.connect();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let body = r#"{"desired_vcpus": 1}"#;
    let head = "PUT /api/v1/vm.resize HTTP/1.1\r\nHost: localhost\r\n";
    let length = format!("Content-Length: {}\r\n\r\n", body.len());
    send_with_descriptors(&stream, format!("{head}{length}{body}").as_bytes(), 1);
    assert_eq!(receive(&mut reader).0, 404);
    let before = carom.descriptors();
    for round in 0..10_000 {
        // The descriptors are sent with the whole request, with its head, or with a part of the head.
        let parts: &[&str] = match round % 3 {
            0 => &[&format!("{head}{length}{body}")],
            1 => &[&format!("{head}{length}"), body],
            _ => &[head, &length, body],
        };
        for (place, part) in parts.iter().enumerate() {
            send_with_descriptors(&stream, part.as_bytes(), if place == 0 { 1 + round % 4 } else { 0 });
        }
        assert_eq!(receive(&mut reader).0, 404, "{round}");
    }
    assert_eq!(carom.descriptors(), before);
}

#[test]
fn excess_descriptors_of_a_request_are_refused_and_closed() {
    let carom = Carom::start();
    let stream = carom.connect();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let request = b"PUT /api/v1/vm.boot HTTP/1.1\r\nHost: localhost\r\n\r\n";
    send_with_descriptors(&stream, request, 0);
    assert_eq!(receive(&mut reader).0, 404);
    let before = carom.descriptors();
    send_with_descriptors(&stream, request, 253);
    let (status, body) = receive(&mut reader);
    assert_eq!(status, 400);
    assert!(String::from_utf8(body).unwrap().contains("at most 64"));
    send_with_descriptors(&stream, request, 64);
    assert_eq!(receive(&mut reader).0, 404);
    assert_eq!(carom.descriptors(), before);
}

#[test]
fn slow_and_half_open_clients_block_no_others() {
    let carom = Carom::start();
    let mut held = Vec::new();
    for head in [
        &b""[..],
        b"GET /api/v1/vmm.pi",
        b"PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{\"payload\":",
    ] {
        for _ in 0..40 {
            let mut stream = carom.connect();
            stream.write_all(head).unwrap();
            held.push(stream);
        }
    }
    // This client disconnects before the server sends the answer.
    drop(carom.connect().write_all(b"GET /api/v1/vm.info HTTP/1.1\r\nHost: x\r\n\r\n"));
    for _ in 0..50 {
        assert_eq!(carom.request("GET", "vmm.ping", None).0, 200);
    }
    // The slow clients do not delay the end of the program either.
    let mut carom = carom;
    let start = Instant::now();
    assert_eq!(carom.put("vmm.shutdown").0, 204);
    assert!(carom.wait().success());
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

#[test]
fn clients_beyond_the_limit_get_429_until_others_leave() {
    let carom = Carom::start();
    let mut held: Vec<_> = (0..256).map(|_| carom.connect()).collect();
    let start = Instant::now();
    loop {
        let mut stream = carom.connect();
        let mut text = String::new();
        // The server may not have counted the previous clients yet. In that case, the server accepts this client and sends no response.
        stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        if stream.read_to_string(&mut text).is_ok() && text.starts_with("HTTP/1.1 429") {
            let body = text.split("\r\n\r\n").nth(1).unwrap();
            assert_eq!(
                serde_json::from_str::<Value>(body).unwrap(),
                json!(["too many clients are connected: try again later"])
            );
            break;
        }
        assert!(start.elapsed() < LIMIT, "{text}");
        held.push(stream);
    }
    drop(held);
    wait_for(|| {
        let mut stream = carom.connect();
        let _ = stream.write_all(b"GET /api/v1/vmm.ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text.starts_with("HTTP/1.1 200").then_some(())
    });
}

#[test]
fn oversized_bodies_and_nonsense_are_refused() {
    let carom = Carom::start();
    let mut stream = carom.connect();
    let head = format!("PUT /api/v1/vm.create HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", 3 << 20);
    stream.write_all(head.as_bytes()).unwrap();
    // The server may close the connection before it has read everything.
    let _ = stream.write_all(&vec![b' '; 3 << 20]);
    assert_eq!(receive(&mut BufReader::new(&stream)).0, 400);
    for nonsense in [&b"\x16\x03\x01\x02\x00"[..], b"GET\r\n\r\n", b"\r\n\r\n\r\n", &[b'A'; 200_000]] {
        let mut stream = carom.connect();
        let _ = stream.write_all(nonsense);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
    }
    assert_eq!(carom.request("GET", "vmm.ping", None).0, 200);
}

#[test]
fn many_clients_at_once_are_all_answered() {
    let carom = Carom::start();
    let config = json!({"payload": {"kernel": "/k"}});
    assert_eq!(carom.request("PUT", "vm.create", Some(&config)).0, 204);
    thread::scope(|scope| {
        for _ in 0..64 {
            scope.spawn(|| {
                let mut stream = carom.connect();
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                for _ in 0..50 {
                    send(&mut stream, "GET", "vm.info", None);
                    assert_eq!(receive(&mut reader).0, 200);
                }
            });
        }
    });
}

#[test]
fn client_that_does_not_read_its_answers_is_cut_off() {
    let carom = Carom::start();
    let mut greedy = carom.connect();
    let start = Instant::now();
    // The document is long, so the answers soon fill the kernel's buffer. Then the server reads no more requests, and further requests fill
    // the buffer of the other direction.
    let request = b"GET /api/v1/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n";
    greedy.set_write_timeout(Some(LIMIT * 2)).unwrap();
    let error = loop {
        if let Err(error) = greedy.write_all(request) {
            break error;
        }
        assert!(start.elapsed() < LIMIT * 2);
    };
    assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{error}");
    assert_eq!(carom.request("GET", "vmm.ping", None).0, 200);
}
