// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! State that the queues of a network device share.

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

/// Host interface, counters and rate limits of a device.
pub(super) struct Link {
    pub(super) id: String,
    pub(super) carrier: Box<dyn Carrier>,
    pub(super) counts: Counts,
    /// Rate limit for packets to the guest, shared by all receive queues.
    pub(super) receive_limiter: Option<RateLimiter>,
    /// Rate limit for packets from the guest, shared by all transmit queues.
    pub(super) transmit_limiter: Option<RateLimiter>,
    /// True if the host interface was deleted.
    pub(super) gone: AtomicBool,
}

impl Link {
    /// Returns the file of the pair that a queue belongs to. A pair has a receive queue, then a transmit queue (virtio 1.4, section 5.1.2).
    pub(super) fn file(&self, queue: u16) -> &File {
        self.carrier.file(queue / 2)
    }

    /// Returns true if the host interface was deleted. After the deletion, reads and writes of the interface's files fail.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Logs a failure of the host interface. Logs a deleted interface once, and other failures as often as `throttle` allows.
    pub(super) fn complain(&self, throttle: &Throttle, what: &str, error: &io::Error) {
        if error.raw_os_error() == Some(libc::EBADFD) {
            if !self.gone.swap(true, Ordering::Relaxed) {
                warn!(
                    "{}: the host interface was deleted: all packets are lost from now on; to restore the network, create the interface and re-add the device",
                    self.id
                );
            }
        } else if throttle.pass() {
            warn!("{}: {what}: {error}", self.id);
        }
    }

    /// Charges a packet of `bytes` bytes to the budget of `limiter`.
    ///
    /// # Errors
    /// The remaining budget is too small. The error is the time that the packet has to wait.
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
