// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the queues of a device share.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use log::warn;

use super::carrier::Carrier;
use super::control::Pairs;
use super::counters::Counts;
use crate::counters::count;
use crate::rate_limit::RateLimiter;
use crate::throttle::Throttle;

/// The host's side and the counts.
pub(super) struct Link {
    pub(super) id: String,
    pub(super) carrier: Box<dyn Carrier>,
    pub(super) counts: Counts,
    /// What holds packets for the guest back, of all queues together.
    pub(super) receive_limiter: Option<RateLimiter>,
    /// Likewise of the guest's own.
    pub(super) transmit_limiter: Option<RateLimiter>,
    /// The host's interface was deleted.
    pub(super) gone: AtomicBool,
}

impl Link {
    /// The file of the pair that a queue belongs to: each has one to receive, then one to transmit (virtio 1.4, section 5.1.2).
    pub(super) fn file(&self, queue: u16) -> &File {
        self.carrier.file(queue / 2)
    }

    /// Whether the host's interface was deleted. Its files are of none from then on.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Says that the host's interface does not do as it should: once if there is none any more, else when `throttle` lets it pass.
    pub(super) fn complain(&self, throttle: &Throttle, what: &str, error: &io::Error) {
        if error.raw_os_error() == Some(libc::EBADFD) {
            if !self.gone.swap(true, Ordering::Relaxed) {
                warn!("{}: the host's interface is gone: packets are lost from now on", self.id);
            }
        } else if throttle.pass() {
            warn!("{}: {what}: {error}", self.id);
        }
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
