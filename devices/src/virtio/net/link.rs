// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the queues of a device share.

use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use super::carrier::Carrier;
use super::control::Pairs;
use super::counters::{Counts, count};
use crate::rate_limit::RateLimiter;

/// The host's side and the counts.
pub(super) struct Link {
    pub(super) id: String,
    pub(super) carrier: Box<dyn Carrier>,
    pub(super) counts: Counts,
    /// What holds packets for the guest back, of all queues together.
    pub(super) receive_limiter: Option<RateLimiter>,
    /// Likewise of the guest's own.
    pub(super) transmit_limiter: Option<RateLimiter>,
}

impl Link {
    /// The file of the pair that a queue belongs to: each has one to receive, then one to transmit (virtio 1.4, section 5.1.2).
    pub(super) fn file(&self, queue: u16) -> &File {
        self.carrier.file(queue / 2)
    }

    /// Lets a packet of so many bytes pass `limiter`.
    ///
    /// # Errors
    /// It has to wait so long.
    pub(super) fn pass(&self, limiter: Option<&RateLimiter>, bytes: usize) -> Result<(), Duration> {
        let passed = limiter.map_or(Ok(()), |limiter| limiter.pass(bytes as u64, Instant::now()));
        passed.inspect_err(|_| count(&self.counts.rate_waits, 1))
    }
}

impl Pairs for Link {
    fn id(&self) -> &str {
        &self.id
    }

    fn set_pairs(&self, pairs: u16) -> io::Result<()> {
        self.carrier.set_pairs(pairs)
    }
}
