// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long this process waits for others that it does not trust.
//!
//! One access of a guest's, or one operation of the VMM's, may take many messages to a server. A limit for each message would
//! add up. So what belongs together is an [`Operation`], and each server may hold it for a limited time in all. Beside that, a
//! server has a [`Budget`] for how long it holds anybody.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Whom threads of this process wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// The host's kernel, which ends its I/O.
    HostKernel,
    /// The server at the other end of a connection, of whatever kind.
    Server(u64),
}

impl Peer {
    /// Returns a server with a number that no other connection of the process has.
    pub(crate) fn new_server() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self::Server(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

thread_local! {
    /// Whether an operation is under way, and how many have begun.
    static CURRENT: Cell<(bool, u64)> = const { Cell::new((false, 0)) };
    /// How long this thread has waited in an operation: number of the operation, peer, time.
    static WAITED: RefCell<Vec<(u64, Peer, Duration)>> = const { RefCell::new(Vec::new()) };
}

/// What this thread does as one, as long as this is there. Costs next to nothing as long as it waits for nobody.
pub struct Operation {
    is_outermost: bool,
    /// It is the thread's own.
    not_send: PhantomData<*const ()>,
}

impl Operation {
    /// Begins an operation. Within another it is a part of that one.
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

    /// How long this thread has waited for `peer` in this operation; zero where none is under way.
    pub(crate) fn waited(peer: Peer) -> Duration {
        let (true, operation) = CURRENT.get() else { return Duration::ZERO };
        WAITED.with_borrow(|all| {
            let found = all.iter().find(|waited| (waited.0, waited.1) == (operation, peer));
            found.map_or(Duration::ZERO, |waited| waited.2)
        })
    }

    /// Notes that it waited.
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

/// One part of the time that passes comes back to a [`Budget`].
const COMES_BACK: u32 = 64;

/// How long a server may hold others. What it took comes back slowly.
#[derive(Debug)]
pub(crate) struct Budget {
    /// What it has at most.
    whole: Duration,
    /// An answer within this time holds nobody.
    free: Duration,
    left: Duration,
    /// When `left` was that.
    since: Instant,
    /// Until when waiting is paid for: threads that wait at the same time are held once.
    paid: Instant,
}

impl Budget {
    pub(crate) fn new(whole: Duration, free: Duration, now: Instant) -> Self {
        Self { whole, free, left: whole, since: now, paid: now }
    }

    /// How long an answer may take that is waited for from `now` on.
    pub(crate) fn allows(&mut self, now: Instant) -> Duration {
        self.refill(now);
        self.left + self.free
    }

    /// Pays for a wait.
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
        assert_eq!(Operation::waited(one), Duration::ZERO, "none is under way");
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
        assert!(budget.allows(at(3)) >= left, "what comes soon costs nothing");
        budget.pay(at(3), at(20));
        assert_eq!(budget.allows(at(20)), SECOND / 10, "spent");
        assert_eq!(budget.allows(at(84)), SECOND + SECOND / 10);
        assert_eq!(budget.allows(at(100_000)), SECOND * 7 + SECOND / 10);
    }
}
