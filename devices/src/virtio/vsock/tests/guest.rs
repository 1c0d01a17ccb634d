// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A guest that uses a hub directly, without queues.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use tempfile::TempDir;

use crate::virtio::vsock::connection::MOST_DATA;
use crate::virtio::vsock::counters::Counts;
use crate::virtio::vsock::credit::BUF_ALLOC;
use crate::virtio::vsock::hub::{Ends, Hub};
use crate::virtio::vsock::packet::Header;
use crate::virtio::vsock::spec::{HOST_CID, TYPE_STREAM, op};
use crate::virtio::vsock::unix::Listener;

pub(super) const CID: u64 = 3;
/// Maximum number of connections.
pub(super) const CONNECTIONS: usize = 300;
/// Size of the guest's buffer for a connection, in bytes.
pub(super) const ROOM: u32 = 256 << 10;

pub(super) struct Guest {
    pub(super) hub: Hub,
    pub(super) ends: Arc<Ends>,
    dir: TempDir,
    scratch: Vec<u8>,
}

/// Ports of a connection, as the guest sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ports {
    pub(super) guest: u32,
    pub(super) host: u32,
}

impl Guest {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&dir.path().join("s")).unwrap();
        let ends = Ends { cid: CID, listener, connections: CONNECTIONS, counts: Counts::default() };
        let ends = Arc::new(ends);
        let hub = Hub::new(ends.clone()).unwrap();
        Self { hub, ends, dir, scratch: vec![0; MOST_DATA] }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    /// Starts a host program that serves `port`.
    pub(super) fn serve(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.dir.path().join(format!("s_{port}"))).unwrap()
    }

    /// Starts a host program that connects to the guest's `port`.
    pub(super) fn client(&self, port: u32) -> UnixStream {
        let mut client = UnixStream::connect(self.path()).unwrap();
        client.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        client
    }

    /// Lets the hub handle all events of the host's side.
    pub(super) fn turn(&mut self) {
        while self.hub.notice() | self.hub.accept() {}
        assert!(self.hub.is_bounded());
    }

    /// Returns the next packet, for a buffer with `room` bytes of data.
    pub(super) fn next_with(&mut self, room: usize) -> Option<(Header, Vec<u8>)> {
        self.turn();
        let header = self.hub.next(room, &mut self.scratch)?;
        Some((header, self.scratch[..header.len as usize].to_vec()))
    }

    pub(super) fn next(&mut self) -> Option<(Header, Vec<u8>)> {
        self.next_with(MOST_DATA)
    }

    /// Returns the next packet, which must have the operation `op`.
    pub(super) fn expect(&mut self, op: u16) -> Header {
        let (header, _) =
            self.next().unwrap_or_else(|| panic!("there is no packet, but one with op {op} was expected"));
        assert_eq!((header.op, header.kind, header.dst_cid), (op, TYPE_STREAM, CID), "{header:?}");
        header
    }

    /// Returns the data of all following packets.
    pub(super) fn data(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        while let Some((header, data)) = self.next() {
            assert_eq!(header.op, op::RW, "{header:?}");
            all.extend(data);
        }
        all
    }

    pub(super) fn header(ports: Ports, op: u16) -> Header {
        Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: ports.guest,
            dst_port: ports.host,
            kind: TYPE_STREAM,
            op,
            buf_alloc: ROOM,
            ..Header::default()
        }
    }

    pub(super) fn say(&mut self, ports: Ports, op: u16) {
        self.send(&Self::header(ports, op), &[]);
    }

    pub(super) fn shut(&mut self, ports: Ports, flags: u32) {
        self.send(&Header { flags, ..Self::header(ports, op::SHUTDOWN) }, &[]);
    }

    pub(super) fn write(&mut self, ports: Ports, data: &[u8]) {
        let len = u32::try_from(data.len()).unwrap();
        self.send(&Header { len, ..Self::header(ports, op::RW) }, data);
    }

    /// Passes a packet to the hub, as the device's thread does.
    pub(super) fn send(&mut self, header: &Header, data: &[u8]) {
        self.hub.receive(header, if header.len as usize > BUF_ALLOC { &[] } else { data });
        assert!(self.hub.is_bounded());
    }

    /// Establishes a connection that a host client requests.
    pub(super) fn of_host(&mut self, port: u32) -> (Ports, UnixStream) {
        let mut client = self.client(port);
        let request = self.expect(op::REQUEST);
        assert_eq!((request.src_cid, request.dst_port), (HOST_CID, port));
        let ports = Ports { guest: port, host: request.src_port };
        self.say(ports, op::RESPONSE);
        assert_eq!(line(&mut client), format!("OK {}\n", ports.host));
        (ports, client)
    }

    /// Establishes a connection that the guest requests.
    pub(super) fn of_guest(&mut self, ports: Ports) -> UnixStream {
        let server = self.serve(ports.host);
        self.say(ports, op::REQUEST);
        let response = self.expect(op::RESPONSE);
        assert_eq!((response.src_port, response.dst_port), (ports.host, ports.guest));
        assert!(response.buf_alloc > 0);
        server.accept().unwrap().0
    }
}

/// Reads a line, and no bytes after the line.
pub(super) fn line(stream: &mut UnixStream) -> String {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}
