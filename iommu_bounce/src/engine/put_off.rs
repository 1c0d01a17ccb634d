// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Bypass that comes with something else: what a DETACH or a reset of the device leaves attached to nothing reaches all RAM while `bypass`
//! is 1, and the host takes long to map that.
//!
//! A driver could ask for it again and again, while all others wait for the engine. So it is put off where requests that map are refused
//! or left undone, and where a write of 1 to `bypass` would be ignored. The endpoint reaches nothing until then, as with a host that
//! refuses.

use std::time::{Duration, Instant};

use super::bypass::{LONG, REST};
use super::{Engine, MOST_OF_BATCH};
use crate::SpaceId;
use crate::spec::Status;

impl Engine {
    /// As [`settle`](Self::settle), for several address spaces, as a consequence of what the driver asked for. Mapping RAM is put off, with
    /// `NOMEM`, if the host rests from it, if the batch took its time, and as soon as somebody waits.
    pub(super) fn settle_in_time(&mut self, ids: &[SpaceId]) -> Result<(), Status> {
        let began = Instant::now();
        let rests = self.bypass_rests(began);
        let (mut outcome, mut mapped) = (Ok(()), false);
        let allowed = self.pieces.set_allowed(true);
        for &id in ids {
            let maps = self.wants_ram(id);
            if maps {
                // No more than RAM of one address space keeps whoever waits, as with a request, and that only where it is one piece.
                let refused = rests || self.is_batch_spent(began.elapsed()) || (mapped && self.pieces.end_here());
                if refused {
                    self.bypass_put_off = true;
                    outcome = outcome.and(Err(Status::NoMem));
                    continue;
                }
                mapped = true;
            }
            outcome = outcome.and(self.settle(id));
        }
        self.pieces.set_allowed(allowed);
        if self.pieces.take_happened() {
            self.bypass_put_off = true;
            outcome = Err(Status::NoMem);
        }
        if mapped {
            let took = began.elapsed();
            self.bypass_rests = (took >= LONG).then(|| began + took * REST);
        }
        outcome
    }

    /// Does what was put off, if it is time.
    pub(super) fn catch_up(&mut self) {
        if !self.bypass_put_off {
            return;
        }
        let began = Instant::now();
        if self.bypass_rests(began) || self.is_batch_spent(Duration::ZERO) {
            return;
        }
        // What the host refuses now is not tried again.
        self.bypass_put_off = false;
        if let Err(status) = self.settle_in_time(&self.spaces.ids()) {
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
