// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Bypass that comes with something else: what a DETACH or a reset of the device leaves attached to nothing reaches all RAM while `bypass`
//! is 1, and the host takes long to map that.
//!
//! A driver could ask for it again and again, while all others wait for the engine. So it is put off where requests that map are refused
//! or left undone, and, but for a reset, where a write of 1 to `bypass` would be ignored. The endpoint reaches nothing until then, as with
//! a host that refuses. What takes no time, as the host's kernel does not pin it, is not put off.

use std::time::{Duration, Instant};

use super::bypass::{LONG, REST};
use super::{Engine, MOST_OF_BATCH};
use crate::SpaceId;
use crate::spec::Status;

impl Engine {
    /// As [`settle`](Self::settle), for several address spaces, as a consequence of what the driver asked for. Mapping RAM is put off, which
    /// is no error, if the batch took its time, as soon as somebody waits, and, if `rests`, while the host rests from it.
    pub(super) fn settle_in_time(&mut self, ids: &[SpaceId], rests: bool) -> Result<(), Status> {
        let began = Instant::now();
        let rests = rests && self.bypass_rests(began);
        let (mut outcome, mut mapped) = (Ok(()), false);
        let allowed = self.pieces.set_allowed(true);
        for &id in ids {
            if self.wants_ram(id) && self.spaces.get(id).pins() {
                // No more than RAM of one address space keeps whoever waits, as with a request, and that only where it is one piece.
                if rests || self.is_batch_spent(began.elapsed()) || (mapped && self.pieces.end_here()) {
                    // To ask whether somebody waits is to make way for him.
                    self.pieces.take_happened();
                    self.bypass_put_off = true;
                    continue;
                }
                mapped = true;
            }
            let settled = self.settle(id);
            if self.pieces.take_happened() {
                self.bypass_put_off = true;
            } else {
                outcome = outcome.and(settled);
            }
        }
        self.pieces.set_allowed(allowed);
        if mapped {
            let took = began.elapsed();
            self.bypass_rests = (took >= LONG).then(|| began + took * REST);
        }
        outcome
    }

    /// Maps RAM that was put off for endpoints in bypass mode, if it is time. To be called when the device goes on after a pause: before it a
    /// reset may have put it off, and a driver that is gone makes no request.
    pub fn catch_up(&mut self) {
        if !self.bypass_put_off {
            return;
        }
        let began = Instant::now();
        if self.bypass_rests(began) || self.is_batch_spent(Duration::ZERO) {
            return;
        }
        // What the host refuses now is not tried again.
        self.bypass_put_off = false;
        if let Err(status) = self.settle_in_time(&self.spaces.ids(), true) {
            log::debug!("endpoints in bypass mode reach nothing yet ({status:?})");
        }
        self.batch = self.batch.map(|spent| spent + began.elapsed());
    }

    /// Whether the batch that is served has taken its time, `more` included.
    pub(super) fn is_batch_spent(&self, more: Duration) -> bool {
        self.batch.is_some_and(|spent| spent + more >= MOST_OF_BATCH)
    }

    /// Whether the host is given time before it maps all RAM again.
    fn bypass_rests(&self, now: Instant) -> bool {
        self.bypass_rests.is_some_and(|until| now < until)
    }

    /// Whether the address space is to hold all RAM and does not.
    fn wants_ram(&self, id: SpaceId) -> bool {
        let space = self.spaces.get(id);
        let unattached = |id| self.endpoints.get(id).is_none_or(|endpoint| endpoint.domain.is_none());
        self.bypass && !space.identity && !space.endpoints.is_empty() && space.endpoints.iter().all(unattached)
    }
}
