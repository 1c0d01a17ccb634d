// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host interface of a network device.

use std::fs::File;
use std::io;

use super::spec::{GUEST_CSUM, GUEST_ECN, GUEST_TSO4, GUEST_TSO6, GUEST_USO4, GUEST_USO6};

/// Offloads: kinds of unfinished packets that the guest accepts from the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Packets without a checksum.
    pub csum: bool,
    /// Large TCP packets over IPv4 that are not segmented yet.
    pub tso4: bool,
    /// Large TCP packets over IPv6 that are not segmented yet.
    pub tso6: bool,
    /// Large TCP packets with ECN bits that are not segmented yet.
    pub ecn: bool,
    /// Large UDP packets over IPv4 or IPv6 that are not segmented yet.
    pub uso: bool,
}

impl Offloads {
    /// Returns the offloads that a driver has accepted.
    pub(super) fn of(features: u64) -> Self {
        let has = |feature| features & feature == feature;
        // All other offloads require GUEST_CSUM (virtio 1.4, section 5.1.3.1).
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

/// Host interface.
pub trait Carrier: Send + Sync {
    /// Returns the file of a pair of queues. A read of the file returns one packet, and a write sends one packet. A header of
    /// [`HEADER_BYTES`](super::spec::HEADER_BYTES) precedes each packet. Reads and writes do not block.
    fn file(&self, pair: u16) -> &File;
    /// Sets the offloads that the guest accepts.
    ///
    /// # Errors
    /// The host rejects the offloads.
    fn set_offloads(&self, offloads: Offloads) -> io::Result<()>;
    /// Makes the host use only the first `pairs` pairs of queues.
    ///
    /// # Errors
    /// The host rejects the number.
    fn set_pairs(&self, pairs: u16) -> io::Result<()>;
}
