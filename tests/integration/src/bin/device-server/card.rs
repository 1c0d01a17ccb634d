// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Network card: moves packets between the queues and a tap interface.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use crate::memory::{Fault, Memory};
use crate::ring::Ring;

/// `VIRTIO_NET_F_CSUM`: the guest may send packets with partial checksums, which the tap interface completes.
pub(crate) const FEATURES: u64 = 1;

/// Length of the header before each packet in the guest's buffers, in bytes. The header's last field is the number of buffers.
const HEADER: usize = 12;
/// Length of the header before each packet on the tap interface, in bytes. This header is the guest's header without the number of
/// buffers.
const TAP_HEADER: usize = 10;
/// Maximum bytes of a packet.
const PACKET: usize = 65536;
/// Maximum number of packets that one call moves for a queue. After the call, the server handles messages of the front end.
const AT_ONCE: usize = 64;

/// Network card on a tap interface.
pub(crate) struct Card {
    tap: File,
    /// Packet from the interface that waits for a buffer of the guest. The packet already has the header that the guest
    /// expects.
    waiting: Option<Vec<u8>>,
}

impl Card {
    /// Creates a card on the interface `tap`. Reads from `tap` must not block.
    pub(crate) fn new(tap: File) -> Self {
        Self { tap, waiting: None }
    }

    /// Returns the tap interface if the card can receive a packet from the interface.
    pub(crate) fn source(&self, rings: &[Ring]) -> Option<BorrowedFd<'_>> {
        (self.waiting.is_none() && rings.first().is_some_and(Ring::runs)).then(|| self.tap.as_fd())
    }

    /// Moves packets in both directions.
    pub(crate) fn work(&mut self, rings: &mut [Ring], memory: &Memory) -> Result<(), Fault> {
        for ring in rings.iter_mut().skip(1).step_by(2) {
            transmit(ring, memory, &self.tap)?;
        }
        rings.first_mut().map_or(Ok(()), |ring| receive(ring, memory, &self.tap, &mut self.waiting))
    }
}

/// Moves packets from the guest to the interface.
fn transmit(ring: &mut Ring, memory: &Memory, mut tap: &File) -> Result<(), Fault> {
    for _ in 0..AT_ONCE {
        let Some(chain) = ring.runs().then(|| ring.chain(memory)).transpose()?.flatten() else { return Ok(()) };
        let mut packet = Vec::new();
        for part in chain.parts.iter().filter(|part| !part.is_writable) {
            let from = packet.len();
            packet.resize((from + part.len as usize).min(HEADER + PACKET), 0);
            memory.read(part.address, &mut packet[from..])?;
        }
        ring.put_used(memory, &chain, 0)?;
        if let (Some(header), Some(data)) = (packet.get(..TAP_HEADER), packet.get(HEADER..)) {
            // A packet that the interface rejects is lost, as on a wire.
            let _ = tap.write(&[header, data].concat());
        }
    }
    // Move the remaining packets after the server has handled messages of the front end.
    ring.kick_again();
    Ok(())
}

/// Moves packets from the interface to the guest. If the guest provides no buffer for a packet, the packet waits in `waiting`,
/// and later packets wait in the interface.
fn receive(ring: &mut Ring, memory: &Memory, mut tap: &File, waiting: &mut Option<Vec<u8>>) -> Result<(), Fault> {
    for _ in 0..AT_ONCE {
        if !ring.runs() {
            return Ok(());
        }
        if waiting.is_none() {
            let mut packet = vec![0; HEADER + PACKET];
            let len = match tap.read(&mut packet[HEADER - TAP_HEADER..]) {
                Ok(len) if len >= TAP_HEADER => len,
                Err(error) if error.kind() != ErrorKind::WouldBlock => continue,
                _ => return Ok(()),
            };
            packet.truncate(HEADER - TAP_HEADER + len);
            // Convert the interface's header to the guest's header: move it to the start, and append the number of buffers,
            // which is 1.
            packet.copy_within(HEADER - TAP_HEADER..HEADER, 0);
            packet[TAP_HEADER..HEADER].copy_from_slice(&1u16.to_le_bytes());
            *waiting = Some(packet);
        }
        let Some(packet) = waiting else { return Ok(()) };
        let Some(chain) = ring.chain(memory)? else { return Ok(()) };
        let mut done = 0;
        for part in chain.parts.iter().filter(|part| part.is_writable) {
            let len = (packet.len() - done).min(part.len as usize);
            memory.write(part.address, &packet[done..done + len])?;
            done += len;
        }
        ring.put_used(memory, &chain, u32::try_from(done).unwrap_or(u32::MAX))?;
        *waiting = None;
    }
    Ok(())
}
