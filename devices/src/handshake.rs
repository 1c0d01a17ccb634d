// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Orders to a thread: run, pause or stop. Other threads can wait until the thread pauses.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::sync::lock;

/// An order to a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Run.
    Run,
    /// Wait for another order.
    Pause,
    /// End. Later orders have no effect.
    Stop,
}

struct State {
    order: Order,
    /// True while the thread waits for another order.
    parked: bool,
    /// True if the thread has ended.
    ended: bool,
}

/// Current order to a thread, and the thread's response.
pub struct Handshake {
    state: Mutex<State>,
    changed: Condvar,
    /// True if the order is [`Order::Run`]. The thread reads this flag without the lock.
    runs: AtomicBool,
}

impl Handshake {
    /// Creates a handshake for a thread that starts with `order`.
    pub fn new(order: Order) -> Self {
        Self {
            state: Mutex::new(State { order, parked: false, ended: false }),
            changed: Condvar::new(),
            runs: AtomicBool::new(order == Order::Run),
        }
    }

    /// True if the thread should run. Takes no lock.
    pub fn runs(&self) -> bool {
        self.runs.load(Ordering::Acquire)
    }

    /// Gives the thread a new order.
    pub fn give(&self, order: Order) {
        let mut state = lock(&self.state);
        if state.order != Order::Stop {
            state.order = order;
            state.parked &= order != Order::Run;
            self.runs.store(order == Order::Run, Ordering::Release);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until the thread pauses or has ended.
    pub fn wait_parked(&self) {
        let mut state = lock(&self.state);
        while !state.is_at_rest() {
            state = self.wait(state);
        }
    }

    /// Like [`wait_parked`](Self::wait_parked), for a thread that may not notice the order by itself. Calls `nudge` immediately, and again
    /// after each interval `every`.
    pub fn wait_parked_nudging(&self, every: Duration, nudge: impl Fn()) {
        let mut state = lock(&self.state);
        while !state.is_at_rest() {
            nudge();
            state = self.changed.wait_timeout(state, every).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Called by the thread. Waits while the order is [`Order::Pause`]. Returns true for [`Order::Run`], and false for [`Order::Stop`]. If
    /// the order is not [`Order::Run`] at first, calls `settle` before the thread pauses or the function returns false.
    pub fn wait_to_run(&self, settle: impl FnOnce()) -> bool {
        let mut state = lock(&self.state);
        if state.order != Order::Run {
            drop(state);
            settle();
            state = lock(&self.state);
        }
        while state.order == Order::Pause {
            state.parked = true;
            self.changed.notify_all();
            state = self.wait(state);
        }
        state.order == Order::Run
    }

    /// Called by the thread. Waits while the order is [`Order::Run`].
    pub fn wait_while_running(&self) {
        let mut state = lock(&self.state);
        while state.order == Order::Run {
            state = self.wait(state);
        }
    }

    /// Called by the thread. Waits for `time`, or until the order changes.
    pub fn wait_for_time(&self, time: Duration) {
        let state = lock(&self.state);
        let order = state.order;
        drop(self.changed.wait_timeout_while(state, time, |state| state.order == order));
    }

    /// Called by the thread when it ends. Ends the waits of other threads for this thread.
    pub fn end(&self) {
        lock(&self.state).ended = true;
        self.changed.notify_all();
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_at_rest(&self) -> bool {
        self.parked || self.ended
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Instant;

    use super::*;

    #[test]
    fn thread_parks_continues_and_stops_as_ordered() {
        let handshake = Handshake::new(Order::Pause);
        let (sender, receiver) = channel();
        thread::scope(|scope| {
            let thread = scope.spawn(|| {
                while handshake.wait_to_run(|| sender.send("settled").unwrap()) {
                    sender.send("runs").unwrap();
                    handshake.wait_while_running();
                }
                handshake.end();
            });
            for _ in 0..100 {
                handshake.wait_parked();
                assert_eq!(receiver.try_iter().collect::<Vec<_>>(), ["settled"]);
                handshake.give(Order::Run);
                assert_eq!(receiver.recv(), Ok("runs"));
                handshake.give(Order::Pause);
            }
            handshake.give(Order::Stop);
            thread.join().unwrap();
            handshake.give(Order::Run);
            assert!(!handshake.runs());
        });
    }

    #[test]
    fn thread_that_ended_is_not_waited_for() {
        let handshake = Handshake::new(Order::Run);
        handshake.end();
        handshake.give(Order::Pause);
        handshake.wait_parked();
        handshake.wait_parked_nudging(Duration::from_secs(60), || unreachable!("the thread has ended"));
    }

    #[test]
    fn wait_for_time_is_equally_long_for_each_order() {
        let time = Duration::from_millis(5);
        for order in [Order::Run, Order::Pause, Order::Stop] {
            let start = Instant::now();
            Handshake::new(order).wait_for_time(time);
            assert!(start.elapsed() >= time, "{order:?}");
        }
    }

    #[test]
    fn thread_is_nudged_until_it_parks() {
        let handshake = Handshake::new(Order::Pause);
        let (nudge, nudged) = channel();
        let thread = &handshake;
        thread::scope(|scope| {
            scope.spawn(move || {
                nudged.iter().take(3).for_each(drop);
                assert!(!thread.wait_to_run(|| ()));
            });
            handshake.wait_parked_nudging(Duration::from_millis(1), || nudge.send(()).unwrap_or_default());
            handshake.give(Order::Stop);
        });
    }
}
