// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the TCP address that serves metrics (`--metrics`).

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Child;
use std::thread;
use std::time::Instant;

use crate::http::LIMIT;
use crate::{Carom, program};

/// Starts the program with metrics on a port that the kernel chooses. Returns the process and the address.
fn with_metrics(arguments: &[&str]) -> (Child, SocketAddr) {
    let mut child = program().args(["--metrics", "tcp=127.0.0.1:0", "-v"]).args(arguments).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let address = lines.find_map(|line| {
        let line = line.unwrap();
        line.split_once("http://")?.1.strip_suffix("/metrics")?.parse().ok()
    });
    // Another thread reads the remaining output, so that the output cannot fill the pipe.
    thread::spawn(move || lines.count());
    (child, address.unwrap())
}

/// Sends `request` on a new connection. Returns the answer.
fn exchange(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    // If the server rejects a client before it has read the client's request, the client may get a
    // TCP reset.
    let _ = stream.read_to_string(&mut answer);
    answer
}

/// Starts the program with metrics and the API.
fn start() -> (Carom, SocketAddr) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api.sock");
    let (child, address) = with_metrics(&["--api-socket", &socket.display().to_string()]);
    (Carom::new(child, socket, dir), address)
}

#[test]
fn metrics_address_serves_only_metrics() {
    let (mut carom, address) = start();
    let ask =
        |head: &str| exchange(address, format!("{head} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes());
    let answer = ask("GET /metrics");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("carom_vm_state{state=\"none\"} 1"), "{answer}");
    assert!(ask("PUT /metrics").starts_with("HTTP/1.1 405"));
    for operation in carom_api::operations::all().filter(|operation| operation.name != "/metrics") {
        let answer = ask(&format!("{} {}", operation.verb.name(), operation.path()));
        assert!(answer.starts_with("HTTP/1.1 404") && answer.contains("only /metrics"), "{answer}");
    }
    assert_eq!(carom.put("vmm.shutdown").0, 204);
    assert!(carom.wait().success());
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn metrics_connection_flood_leaves_the_api_reachable() {
    let (mut carom, address) = start();
    // More clients than the limit connect, and half of them send only a part of a request.
    let mut held: Vec<_> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
    held.iter_mut().step_by(2).for_each(|stream| drop(stream.write_all(b"GET /metr")));
    let start = Instant::now();
    while !exchange(address, b"").starts_with("HTTP/1.1 429") {
        assert!(start.elapsed() < LIMIT);
    }
    for _ in 0..50 {
        assert_eq!(carom.request("GET", "vmm.ping", None).0, 200);
    }
    // When these clients disconnect, the server accepts new clients again.
    drop(held);
    while !exchange(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .starts_with("HTTP/1.1 200")
    {
        assert!(start.elapsed() < LIMIT);
    }
    assert_eq!(carom.put("vmm.shutdown").0, 204);
    assert!(carom.wait().success());
}

#[test]
fn unusable_metrics_address_is_reported() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp={}", taken.local_addr().unwrap());
    let output = program().args(["--kernel", "/k", "--metrics", &address]).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.starts_with(&format!("carom: --metrics {address}: ")), "{text}");
}
