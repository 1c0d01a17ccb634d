// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Limits the rate of resets that the guest asks for, because a reset costs the host far more than the guest. A reset is done immediately
//! unless the guest resets itself again and again.

use std::ops::ControlFlow;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use super::channel::Message;
use super::{Control, State};
use crate::error::VmError;
use crate::machine::Machine;

/// Minimum time that a guest must run to count as successfully booted.
const LIFE: Duration = Duration::from_secs(5);
/// Number of successive resets that are done without a delay. Resets are successive if the guest runs too briefly between them to count as
/// booted.
const AT_ONCE: u32 = 8;
/// Delay of the first reset beyond [`AT_ONCE`]. The delay doubles with each further reset.
const FIRST: Duration = Duration::from_millis(50);
/// Maximum delay.
const MOST: Duration = Duration::from_millis(1600);

/// Resets that a guest has asked for.
#[derive(Debug, Default)]
pub(super) struct ResetPace {
    /// Earliest time of the pending reset, if a reset is pending.
    due: Option<Instant>,
    /// Time of the last reset.
    last: Option<Instant>,
    in_a_row: u32,
}

impl ResetPace {
    /// Records the guest's request for a reset. Returns true if the reset must be done now. Otherwise the reset must be done at the time
    /// [`due`](Self::due).
    pub(super) fn asked(&mut self, now: Instant) -> bool {
        if self.due.is_some() {
            return false;
        }
        let lived = self.last.map_or(Duration::MAX, |last| now.saturating_duration_since(last));
        self.in_a_row = if lived >= LIFE { 0 } else { self.in_a_row.saturating_add(1) };
        let Some(beyond) = self.in_a_row.checked_sub(AT_ONCE + 1) else { return true };
        let wait = FIRST.saturating_mul(1 << beyond.min(16)).min(MOST);
        self.due = Some(now + wait);
        false
    }

    /// Returns the time when the pending reset is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Records that the guest was reset, so that no reset is pending.
    pub(super) fn done(&mut self, now: Instant) {
        self.due = None;
        self.last = Some(now);
    }
}

/// Returns the next message, or `None` if no message arrives before `due`.
pub(super) fn receive(messages: &Receiver<Message>, due: Option<Instant>) -> Option<Message> {
    match due.map(|due| due.saturating_duration_since(Instant::now())) {
        None => Some(messages.recv().expect("the control thread holds a sender")),
        // A reset that is due is done before all queued messages.
        Some(Duration::ZERO) => None,
        Some(left) => messages.recv_timeout(left).ok(),
    }
}

impl<M: Machine> Control<M> {
    /// Returns the time when a reset that the guest asked for is due.
    pub(super) fn reset_due(&self) -> Option<Instant> {
        self.created.as_ref()?.booted.as_ref()?.resets.due()
    }

    /// Serves the guest's request for a reset. Resets the guest now, or later if the guest resets itself too often.
    pub(super) fn handle_reset_request(&mut self) -> ControlFlow<Result<(), VmError>> {
        let booted = self.created.as_mut().and_then(|created| created.booted.as_mut());
        match booted.map(|booted| booted.resets.asked(Instant::now())) {
            Some(true) => self.reset_for_guest(),
            _ => ControlFlow::Continue(()),
        }
    }

    /// Does the pending reset of a paused VM, which stays paused. A snapshot does not record a pending reset, so a restored guest
    /// would continue without the reset. A VM that cannot be reset is shut down.
    pub(super) fn do_due_reset(&mut self) -> Result<(), VmError> {
        if self.reset_due().is_none() {
            return Ok(());
        }
        let reset = self.reset(false);
        self.or_end(reset)
    }

    /// Resets the guest at its request. If the reset fails, the guest ends.
    pub(super) fn reset_for_guest(&mut self) -> ControlFlow<Result<(), VmError>> {
        let run = self.created.as_ref().is_some_and(|created| created.state == State::Running);
        match self.reset(run) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => self.end_of_guest(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resets_in_a_row_wait_longer_and_longer() {
        let (mut pace, mut now, start) = (ResetPace::default(), Instant::now(), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..20 {
            if !pace.asked(now) {
                let due = pace.due().unwrap();
                assert!(!pace.asked(now), "another vCPU asks, too");
                assert_eq!(pace.due(), Some(due));
                waits.push(due.duration_since(now).as_millis());
                now = due;
            }
            pace.done(now);
        }
        assert_eq!(waits, [50, 100, 200, 400, 800, 1600, 1600, 1600, 1600, 1600, 1600], "{:?}", now - start);
        now += LIFE;
        assert!(pace.asked(now), "the guest counts as booted");
    }
}
