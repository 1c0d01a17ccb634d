// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The host's side of a network device.

use std::fs::File;
use std::io;

use super::spec::{GUEST_CSUM, GUEST_ECN, GUEST_TSO4, GUEST_TSO6, GUEST_USO4, GUEST_USO6};

/// What the guest takes of packets that the host has not finished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Packets without their checksum.
    pub csum: bool,
    /// Segments of TCP over IPv4 in one packet.
    pub tso4: bool,
    /// Segments of TCP over IPv6 in one packet.
    pub tso6: bool,
    /// Likewise with bits for congestion.
    pub ecn: bool,
    /// Segments of UDP in one packet, over either.
    pub uso: bool,
}

impl Offloads {
    /// Those that a driver has agreed to.
    pub(super) fn of(features: u64) -> Self {
        let has = |feature| features & feature == feature;
        // All others need the first (virtio 1.4, section 5.1.3.1).
        let csum = has(GUEST_CSUM);
        Self {
            csum,
            tso4: csum && has(GUEST_TSO4),
            tso6: csum && has(GUEST_TSO6),
            ecn: csum && has(GUEST_ECN),
            uso: csum && has(GUEST_USO4 | GUEST_USO6),
        }
    }
}

/// The host's interface.
pub trait Carrier: Send + Sync {
    /// The file of a pair of queues. A read takes a packet with a header of [`HEADER_BYTES`](super::spec::HEADER_BYTES) before it, a write
    /// gives one; neither waits.
    fn file(&self, pair: u16) -> &File;
    /// Tells the host what the guest takes.
    ///
    /// # Errors
    /// The host refuses.
    fn set_offloads(&self, offloads: Offloads) -> io::Result<()>;
    /// Has the host use the first of the pairs of queues: so many.
    ///
    /// # Errors
    /// The host refuses.
    fn set_pairs(&self, pairs: u16) -> io::Result<()>;
}
