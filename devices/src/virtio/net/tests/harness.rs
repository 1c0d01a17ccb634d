// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Test harness: a driver for the device under test, and the host's end of the device's host interface.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use iommu_bounce::Permissions;

use crate::rate_limit::RateLimits;
use crate::sync::lock;
use crate::virtio::net::spec::{CSUM, CTRL_VQ, GUEST_CSUM, GUEST_TSO4, HEADER_BYTES, MAC, MQ, MRG_RXBUF};
use crate::virtio::net::{Carrier, NetParams, NetTraits, Offloads, VirtioNet, create};
use crate::virtio::test_driver::{NEXT, Part, Rings, TestDriver, TestPlatform, wait_until};
use crate::virtio::test_support::FakeMsi;

pub(super) const MAC_ADDRESS: [u8; 6] = [2, 0, 0, 0, 0, 7];
/// Size of each queue.
pub(super) const QUEUE: u16 = 16;
/// Address of the tests' buffers.
pub(super) const BUFFERS: u64 = 0x8_0000;
pub(super) const RECEIVE: u16 = 0;
pub(super) const TRANSMIT: u16 = 1;
pub(super) const RINGS: Rings = Rings { first: [0x1_0000, 0x1_1000, 0x1_2000], stride: 0x4000, size: QUEUE };

/// Host interface for the tests: a socket for each pair of queues, and the settings that the device requested.
pub(super) struct Host {
    files: Vec<File>,
    requested: Arc<Mutex<Requested>>,
}

/// Settings that the device requested last.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Requested {
    pub(super) offloads: Offloads,
    pub(super) pairs: u16,
    /// True if the host rejects requests.
    pub(super) refuses: bool,
}

impl Host {
    /// Creates a host with a single pair, whose packets pass through `file`.
    pub(super) fn of(file: File) -> Self {
        Self { files: vec![file], requested: Arc::default() }
    }
}

impl Carrier for Host {
    fn file(&self, pair: u16) -> &File {
        &self.files[usize::from(pair)]
    }

    fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        lock(&self.requested).offloads = offloads;
        Ok(())
    }

    fn set_pairs(&self, pairs: u16) -> io::Result<()> {
        let mut requested = lock(&self.requested);
        if requested.refuses {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        requested.pairs = pairs;
        Ok(())
    }
}

pub(super) struct Interface {
    /// The host's ends of the sockets, one for each pair.
    pub(super) host: Vec<UnixDatagram>,
    pub(super) requested: Arc<Mutex<Requested>>,
}

pub(super) type Harness = TestDriver<VirtioNet, Interface>;

impl Harness {
    pub(super) fn new(pairs: u16, translated: bool) -> Self {
        Self::limited(pairs, translated, None)
    }

    /// Creates a device with a rate limit.
    pub(super) fn limited(pairs: u16, translated: bool, limits: Option<RateLimits>) -> Self {
        let (mut files, mut host) = (Vec::new(), Vec::new());
        for _ in 0..pairs {
            let (ours, theirs) = UnixDatagram::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            theirs.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            files.push(File::from(OwnedFd::from(ours)));
            host.push(theirs);
        }
        Self::on(files, host, translated, limits)
    }

    /// Creates a device with one pair that uses `file`.
    pub(super) fn on_file(file: File) -> Self {
        Self::on(vec![file], Vec::new(), false, None)
    }

    fn on(files: Vec<File>, host: Vec<UnixDatagram>, translated: bool, limits: Option<RateLimits>) -> Self {
        let pairs = u16::try_from(files.len()).unwrap();
        let platform = TestPlatform::new(0x10_0000, translated);
        let requested = Arc::new(Mutex::default());
        let traits = NetTraits {
            mac: MAC_ADDRESS,
            mtu: 1500,
            pairs,
            queue_size: QUEUE,
            csum: true,
            tso: true,
            uso: false,
            merges: true,
        };
        let params = NetParams {
            id: "_net0".into(),
            carrier: Box::new(Host { files, requested: requested.clone() }),
            traits,
            limits,
            memory: platform.memory.clone(),
            msi: Arc::new(FakeMsi::default()),
            doorbells: Some(platform.doorbells.clone()),
            observer: Some(platform.recorder.clone()),
        };
        platform.drive(create(params).unwrap(), RINGS, Interface { host, requested })
    }

    /// Initialises the device as a driver does, with or without mergeable receive buffers.
    pub(super) fn start(&mut self, merges: bool) {
        let queues = if self.host.len() > 1 { 2 * self.host.len() + 1 } else { 2 };
        let queues: Vec<u16> = (0..u16::try_from(queues).unwrap()).collect();
        self.map_pages(queues.iter().flat_map(|queue| RINGS.of(*queue)));
        self.map(BUFFERS, 0x4_0000, Permissions::READ | Permissions::WRITE);
        let mut features = MAC | CSUM | GUEST_CSUM | GUEST_TSO4;
        features |= if merges { MRG_RXBUF } else { 0 };
        features |= if self.host.len() > 1 { MQ | CTRL_VQ } else { 0 };
        self.set_up(features, queues);
    }

    /// Adds a chain of buffers to a queue.
    pub(super) fn add(&mut self, queue: u16, buffers: &[Part]) {
        let mut chain = buffers.to_vec();
        let last = chain.len() - 1;
        chain[..last].iter_mut().for_each(|(_, _, flags)| *flags |= NEXT);
        self.chain(queue, &chain);
    }

    /// Returns the number of bytes written to the buffers of a used element.
    pub(super) fn used_len(&self, queue: u16, element: u16) -> u32 {
        self.used_element(queue, element).1
    }

    pub(super) fn wait_used(&self, queue: u16, count: u16) {
        wait_until(|| self.used(queue) == count);
    }

    /// Sends a packet from the host to the guest.
    pub(super) fn give(&self, pair: usize, frame: &[u8]) {
        self.host[pair].send(&[&[0; HEADER_BYTES], frame].concat()).unwrap();
    }

    /// Receives a packet on the host's side, and returns its length. If a signal interrupts the system call, retries the call.
    pub(super) fn receive(&self, packet: &mut [u8]) -> usize {
        loop {
            match self.host[0].recv(packet) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                received => return received.unwrap(),
            }
        }
    }

    /// Sends a packet as the guest.
    pub(super) fn send(&mut self, frame: &[u8]) {
        let packet = [&[0; HEADER_BYTES], frame].concat();
        let place = BUFFERS + 0x2_0000;
        self.fill(place, &packet);
        let len = u32::try_from(packet.len()).unwrap();
        let place = place + self.offset();
        // The header is in a separate buffer, as with legacy drivers.
        self.add(TRANSMIT, &[(place, 12, 0), (place + 12, len - 12, 0)]);
        self.ring(TRANSMIT);
    }
}

/// Returns a frame of `len` bytes.
pub(super) fn frame(len: usize) -> Vec<u8> {
    (0..len).map(|index| u8::try_from(index % 251).unwrap()).collect()
}
