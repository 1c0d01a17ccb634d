// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counter of the watchdog, and the thread that waits for the end of a stage.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::registers::{Registers, RegistersState, StageEnd, Timing};
use crate::sandbox::{self, ThreadRole};
use crate::state::StateError;

/// Role of the thread that waits for the end of a stage.
pub const ROLE: ThreadRole = ThreadRole { name: "watchdog", calls: &[] };

/// Time at which the current stage ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// The counter is stopped, so no stage ends.
    Never,
    /// The stage ends at this time.
    At(Instant),
    /// The VM is paused. When the VM continues, the stage lasts for this duration.
    After(Duration),
}

struct State {
    registers: Registers,
    end: End,
    paused: bool,
    closing: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Registers, the counter, and the thread that waits for the end of a stage. Dropping this value ends the thread.
pub(super) struct Timer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Timer {
    /// Creates a stopped counter. The counter's thread has the name `name`, and calls `expired` when the machine must be reset.
    pub(super) fn start(name: String, expired: Box<dyn Fn() + Send>) -> io::Result<Self> {
        let state = State { registers: Registers::new(), end: End::Never, paused: false, closing: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let of_thread = shared.clone();
        let thread = sandbox::start(ROLE, name, move || of_thread.wait(&expired))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Lets `act` access the registers. If `act` returns [`Timing::BeginsAnew`], starts the current stage again, or stops the counter if
    /// the registers disable it.
    pub(super) fn with<T>(&self, act: impl FnOnce(&mut Registers) -> (T, Timing)) -> T {
        let mut state = self.shared.lock();
        let (result, timing) = act(&mut state.registers);
        if timing == Timing::BeginsAnew {
            state.begin_stage();
            self.shared.changed.notify_one();
        }
        result
    }

    /// Freezes the counter while the VM is paused.
    pub(super) fn pause(&self) {
        let mut state = self.shared.lock();
        state.paused = true;
        if let End::At(end) = state.end {
            state.end = End::After(end.saturating_duration_since(Instant::now()));
        }
        self.shared.changed.notify_one();
    }

    /// Lets the counter continue.
    pub(super) fn resume(&self) {
        let mut state = self.shared.lock();
        state.paused = false;
        if let End::After(left) = state.end {
            state.end = End::At(Instant::now() + left);
        }
        self.shared.changed.notify_one();
    }

    /// Returns the registers. If the counter runs, also returns the nanoseconds until the current stage is over.
    pub(super) fn state(&self) -> (RegistersState, Option<u64>) {
        let state = self.shared.lock();
        let left = match state.end {
            End::Never => None,
            End::At(end) => Some(end.saturating_duration_since(Instant::now())),
            End::After(left) => Some(left),
        };
        (state.registers.state(), left.map(|left| u64::try_from(left.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Restores the saved state. After the call, the counter is paused.
    ///
    /// # Errors
    /// The saved state is one that no guest can cause.
    pub(super) fn restore(&self, registers: &RegistersState, left_ns: Option<u64>) -> Result<(), StateError> {
        let mut state = self.shared.lock();
        let mut restored = Registers::new();
        restored.restore(registers)?;
        let left = left_ns.map(Duration::from_nanos);
        if left > restored.stage() || left.is_some() != restored.stage().is_some() {
            return Err(StateError::rule(
                "left_ns",
                "the saved time does not fit the watchdog's stage: restore from an unmodified snapshot",
            ));
        }
        state.registers = restored;
        state.paused = true;
        state.end = left.map_or(End::Never, End::After);
        self.shared.changed.notify_one();
        Ok(())
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // Ignore the result. A panic of the thread was reported already.
            let _ = thread.join();
        }
    }
}

impl State {
    fn begin_stage(&mut self) {
        self.end = match (self.registers.stage(), self.paused) {
            (None, _) => End::Never,
            (Some(stage), false) => End::At(Instant::now() + stage),
            (Some(stage), true) => End::After(stage),
        };
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the ends of stages until the timer is dropped.
    fn wait(&self, expired: &dyn Fn()) {
        let mut state = self.lock();
        while !state.closing {
            let End::At(end) = state.end else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = end.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let ended = state.registers.end_stage();
            state.begin_stage();
            if ended == StageEnd::Reset {
                drop(state);
                expired();
                state = self.lock();
            }
        }
    }
}
