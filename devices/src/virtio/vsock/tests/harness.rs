// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A device with its PCI transport. The tests act as its driver.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

use super::guest::{CID, Guest, Ports, line};
use crate::virtio::test_driver::{NEXT, Part, Rings, TestDriver, TestPlatform, WRITE, wait_until};
use crate::virtio::test_support::FakeMsi;
use crate::virtio::vsock::packet::Header;
use crate::virtio::vsock::spec::{HEADER, op, queue};
use crate::virtio::vsock::{Listener, VirtioVsock, VsockParams, create};

pub(super) const RAM: usize = 0x10_0000;
/// Address of the first queue's buffers. The buffers of the next queue follow these buffers.
const BUFFERS: u64 = 0x2_0000;
const BUFFERS_SIZE: u64 = 0x2_0000;
/// Total size of the buffers of a chain, in bytes.
const BUFFER: u64 = 0x8000;
/// Maximum number of chains in a queue.
pub(super) const CHAINS: u16 = 4;
/// Maximum number of descriptors in a chain.
const EACH: u16 = 4;

const RINGS: Rings = Rings { first: [0x1000, 0x2000, 0x3000], stride: 0x3000, size: CHAINS * EACH };

pub(super) struct Host {
    dir: TempDir,
    /// Number of used elements that were read, by queue.
    seen: [u16; 3],
}

pub(super) type Harness = TestDriver<VirtioVsock, Host>;

impl Harness {
    pub(super) fn new(translated: bool) -> Self {
        let platform = TestPlatform::new(RAM, translated);
        let dir = tempfile::tempdir().unwrap();
        let params = VsockParams {
            id: "_vsock".into(),
            cid: u32::try_from(CID).unwrap(),
            listener: Listener::bind(&dir.path().join("s")).unwrap(),
            connections: 16,
            memory: platform.memory.clone(),
            msi: Arc::new(FakeMsi::default()),
            doorbells: Some(platform.doorbells.clone()),
            observer: Some(platform.recorder.clone()),
        };
        let mut harness = platform.drive(create(params).unwrap(), RINGS, Host { dir, seen: [0; 3] });
        // Map each page separately, so that the device never sees two pages as one range.
        harness.map_pages((0..RAM as u64).step_by(0x1000));
        harness
    }

    /// Creates a device with an initialised driver.
    pub(super) fn started(translated: bool) -> Self {
        let mut harness = Self::new(translated);
        harness.start();
        harness
    }

    /// Initialises the device as a driver does.
    pub(super) fn start(&mut self) {
        self.set_up(0, 0..3);
    }

    /// Resets the device, and clears its rings.
    pub(super) fn stop(&mut self) {
        self.reset(0..3);
        self.seen = [0; 3];
    }

    /// Creates a device with the state and the driver of `old`. The device of `old` must be paused.
    pub(super) fn restored(old: &Self) -> Self {
        let mut new = Self::new(old.mapper.is_some());
        new.restore_from(old);
        new.seen = old.seen;
        new
    }

    /// Adds a chain of buffers to a queue, and notifies the device.
    pub(super) fn add(&mut self, queue: u16, parts: &[Part]) {
        let head = self.added[usize::from(queue)] % CHAINS * EACH;
        self.chain_at(queue, head, parts);
        self.ring(queue);
    }

    /// Returns the address of the buffers of the next chain.
    pub(super) fn place(&self, queue: u16) -> u64 {
        let number = self.added[usize::from(queue)] % CHAINS;
        BUFFERS + BUFFERS_SIZE * u64::from(queue) + BUFFER * u64::from(number)
    }

    /// Adds a receive buffer in three parts.
    pub(super) fn give(&mut self) {
        let at = self.place(queue::RX) + self.offset();
        self.add(queue::RX, &[(at, 20, WRITE | NEXT), (at + 20, 0x1000, WRITE | NEXT), (at + 0x1014, 0x3000, WRITE)]);
    }

    /// Adds the maximum number of receive buffers.
    pub(super) fn give_all(&mut self) {
        (0..CHAINS).for_each(|_| self.give());
    }

    /// Waits for the next used chain of a queue. Returns the address of its buffers, and the number of written bytes.
    pub(super) fn wait_used(&mut self, queue: u16) -> (u64, u32) {
        let seen = self.seen[usize::from(queue)];
        wait_until(|| self.used(queue) != seen);
        self.seen[usize::from(queue)] = seen.wrapping_add(1);
        let (head, len) = self.used_element(queue, seen);
        let number = u64::from(head) / u64::from(EACH);
        (BUFFERS + BUFFERS_SIZE * u64::from(queue) + BUFFER * number, len)
    }

    /// Returns the next packet of the device, and adds another receive buffer.
    pub(super) fn receive(&mut self) -> (Header, Vec<u8>) {
        let (place, len) = self.wait_used(queue::RX);
        let mut bytes = self.bytes(place, usize::try_from(len).unwrap());
        let data = bytes.split_off(HEADER);
        let header = Header::decode(bytes.first_chunk().unwrap());
        assert_eq!(header.len as usize, data.len());
        self.give();
        (header, data)
    }

    /// Sends a packet in three parts, and waits until the device has read the packet.
    pub(super) fn send(&mut self, header: &Header, data: &[u8]) {
        let place = self.place(queue::TX);
        let bytes = [&header.encode(), data].concat();
        self.ram.write_slice(&bytes, GuestAddress(place)).unwrap();
        let (at, len) = (place + self.offset(), u32::try_from(bytes.len()).unwrap());
        let (first, second) = (30, (len - 30) / 2);
        self.add(
            queue::TX,
            &[(at, first, NEXT), (at + 30, second, NEXT), (at + 30 + u64::from(second), len - first - second, 0)],
        );
        self.wait_used(queue::TX);
    }

    pub(super) fn say(&mut self, ports: Ports, op: u16) {
        self.send(&Guest::header(ports, op), &[]);
    }

    /// Waits until the device has handled all earlier events of the host and the guest. To do so, sends two packets that the device does
    /// not answer. The device reads the second packet only after it has handled all events that preceded the first packet.
    pub(super) fn looked(&mut self) {
        (0..2).for_each(|_| self.say(Ports { guest: 1, host: 1 }, op::RST));
    }

    pub(super) fn write_data(&mut self, ports: Ports, data: &[u8]) {
        let len = u32::try_from(data.len()).unwrap();
        self.send(&Header { len, ..Guest::header(ports, op::RW) }, data);
    }

    /// Starts a host program that serves `port`.
    pub(super) fn serve(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.dir.path().join(format!("s_{port}"))).unwrap()
    }

    /// Starts a host program that connects to the guest's `port`.
    pub(super) fn client(&self, port: u32) -> UnixStream {
        use std::io::Write;
        let mut client = UnixStream::connect(self.dir.path().join("s")).unwrap();
        client.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        client
    }

    /// Starts a host program that connects to the guest's `port`, and establishes the connection.
    pub(super) fn connected(&mut self, port: u32) -> (Ports, UnixStream) {
        let mut client = self.client(port);
        let (request, _) = self.receive();
        assert_eq!((request.op, request.dst_port, request.dst_cid), (op::REQUEST, port, CID));
        let ports = Ports { guest: port, host: request.src_port };
        self.say(ports, op::RESPONSE);
        assert_eq!(line(&mut client), format!("OK {}\n", ports.host));
        (ports, client)
    }
}
