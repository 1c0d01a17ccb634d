// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Time limits for peers that this process does not trust.
//!
//! One access of a guest, or one operation of the VMM, may need many messages to a server. If each message had its own limit, the waits
//! would add up. So related messages form an [`Operation`], which limits the total wait for each server. In addition, a [`Budget`] limits
//! the total time for which a server may delay other threads in all operations.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Peer that threads of this process wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// The host's kernel, which completes I/O.
    HostKernel,
    /// The server at the other end of a connection. The number identifies the connection.
    Server(u64),
}

impl Peer {
    /// Returns a peer for a new connection, with a number that no other connection of the process has.
    pub(crate) fn new_server() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self::Server(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

thread_local! {
    /// Operations of this thread. The first field is true while an operation is in progress. The second field is the number of operations
    /// begun so far.
    static CURRENT: Cell<(bool, u64)> = const { Cell::new((false, 0)) };
    /// Total wait of this thread for each peer in an operation. An entry consists of the operation's number, the peer and the total wait.
    static WAITED: RefCell<Vec<(u64, Peer, Duration)>> = const { RefCell::new(Vec::new()) };
}

/// Group of a thread's actions that share a time limit. The group begins when this value is created, and ends when the value is dropped. An
/// operation costs almost nothing if the thread never waits.
pub struct Operation {
    is_outermost: bool,
    /// Makes the type not `Send`, because the waits are recorded for each thread.
    not_send: PhantomData<*const ()>,
}

impl Operation {
    /// Begins an operation. If this thread is in another operation, the new operation becomes a part of the other operation.
    #[must_use]
    pub fn begin() -> Self {
        let is_outermost = CURRENT.with(|current| {
            let (is_under_way, number) = current.get();
            if !is_under_way {
                current.set((true, number.wrapping_add(1)));
            }
            !is_under_way
        });
        Self { is_outermost, not_send: PhantomData }
    }

    /// Returns the time that this thread has waited for `peer` in this operation. Returns zero outside an operation.
    pub(crate) fn waited(peer: Peer) -> Duration {
        let (true, operation) = CURRENT.get() else { return Duration::ZERO };
        WAITED.with_borrow(|all| {
            let found = all.iter().find(|waited| (waited.0, waited.1) == (operation, peer));
            found.map_or(Duration::ZERO, |waited| waited.2)
        })
    }

    /// Adds `time` to this thread's wait for `peer` in this operation. Does nothing outside an operation.
    pub(crate) fn note(peer: Peer, time: Duration) {
        let (true, operation) = CURRENT.get() else { return };
        WAITED.with_borrow_mut(|all| {
            all.retain(|waited| waited.0 == operation);
            match all.iter_mut().find(|waited| waited.1 == peer) {
                Some(waited) => waited.2 += time,
                None => all.push((operation, peer, time)),
            }
        });
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if self.is_outermost {
            CURRENT.with(|current| current.set((false, current.get().1)));
        }
    }
}

/// Divisor of the refill rate: a [`Budget`] regains 1/64 of the time that passes.
const COMES_BACK: u32 = 64;

/// Time for which a server may delay other threads. The budget slowly regains used time.
#[derive(Debug)]
pub(crate) struct Budget {
    /// Maximum of `left`.
    whole: Duration,
    /// Initial part of the wait for each answer. This part is not charged to the budget.
    free: Duration,
    left: Duration,
    /// Time at which `left` was computed.
    since: Instant,
    /// End of the period that was charged already. Concurrent waits are charged only once.
    paid: Instant,
}

impl Budget {
    pub(crate) fn new(whole: Duration, free: Duration, now: Instant) -> Self {
        Self { whole, free, left: whole, since: now, paid: now }
    }

    /// Returns the maximum time from `now` on that an answer may take.
    pub(crate) fn allows(&mut self, now: Instant) -> Duration {
        self.refill(now);
        self.left + self.free
    }

    /// Charges a wait between `from` and `to` to the budget.
    pub(crate) fn pay(&mut self, from: Instant, to: Instant) {
        self.refill(to);
        let held = to.saturating_duration_since((from + self.free).max(self.paid));
        if !held.is_zero() {
            self.left = self.left.saturating_sub(held);
            self.paid = to;
        }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.since);
        self.since = self.since.max(now);
        self.left = (self.left + passed / COMES_BACK).min(self.whole);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn waits_add_up_within_an_operation_and_for_each_peer() {
        let (one, other) = (Peer::new_server(), Peer::new_server());
        assert_ne!(one, other);
        Operation::note(one, SECOND);
        assert_eq!(Operation::waited(one), Duration::ZERO, "no operation is in progress");
        let outer = Operation::begin();
        Operation::note(one, SECOND);
        let inner = Operation::begin();
        Operation::note(one, SECOND);
        Operation::note(other, SECOND / 2);
        drop(inner);
        assert_eq!((Operation::waited(one), Operation::waited(other)), (2 * SECOND, SECOND / 2));
        drop(outer);
        assert_eq!(Operation::waited(one), Duration::ZERO);
        let _next = Operation::begin();
        assert_eq!(Operation::waited(one), Duration::ZERO);
        Operation::note(other, SECOND);
        assert_eq!((Operation::waited(other), Operation::waited(Peer::HostKernel)), (SECOND, Duration::ZERO));
    }

    #[test]
    fn budget_charges_joint_waits_once_and_recovers_slowly() {
        let start = Instant::now();
        let at = |seconds| start + SECOND * seconds;
        let mut budget = Budget::new(SECOND * 7, SECOND / 10, start);
        budget.pay(at(0), at(2));
        budget.pay(at(0), at(2));
        let left = budget.allows(at(2));
        assert!((SECOND * 5..SECOND * 6).contains(&left), "{left:?}");
        budget.pay(at(2), at(2) + SECOND / 10);
        assert!(budget.allows(at(3)) >= left, "a quick answer costs nothing");
        budget.pay(at(3), at(20));
        assert_eq!(budget.allows(at(20)), SECOND / 10, "the budget is spent");
        assert_eq!(budget.allows(at(84)), SECOND + SECOND / 10);
        assert_eq!(budget.allows(at(100_000)), SECOND * 7 + SECOND / 10);
    }
}
