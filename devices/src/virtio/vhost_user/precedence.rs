// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Who goes first where a lock does not say.
//!
//! A server may ask for translations, and say that its configuration has changed, without end. Each time takes the session's lock for a
//! moment. A thread that waits for the lock to take a mapping away, or to pause the device, could lose each time. So whoever serves the
//! server lets such threads go first.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::sync::lock;

/// How long those are let go first in a row. Many are threads of vCPUs, which the server must not wait for without end either.
const LONGEST: Duration = Duration::from_millis(50);

/// See the module.
#[derive(Default)]
pub(super) struct Precedence {
    first: Mutex<u32>,
    none: Condvar,
}

/// Somebody goes first, as long as this is there.
struct First<'p>(&'p Precedence);

/// What is locked by somebody who goes first.
pub(super) struct FirstGuard<'p, T> {
    /// Unlocked before others are let go on.
    guard: MutexGuard<'p, T>,
    _first: First<'p>,
}

impl<T> Deref for FirstGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for FirstGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl Precedence {
    /// Locks `mutex` for a caller who goes first.
    pub(super) fn lock_first<'p, T>(&'p self, mutex: &'p Mutex<T>) -> FirstGuard<'p, T> {
        let first = self.take();
        FirstGuard { guard: lock(mutex), _first: first }
    }

    /// Locks it for a caller who lets those go first who do.
    pub(super) fn lock_last<'p, T>(&self, mutex: &'p Mutex<T>) -> MutexGuard<'p, T> {
        self.give();
        lock(mutex)
    }

    /// The caller goes first.
    fn take(&self) -> First<'_> {
        *lock(&self.first) += 1;
        First(self)
    }

    /// Lets those go first who do.
    fn give(&self) {
        let first = lock(&self.first);
        let waited = self.none.wait_timeout_while(first, LONGEST, |first| *first != 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for First<'_> {
    fn drop(&mut self) {
        *lock(&self.0.first) -= 1;
        self.0.none.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn who_gives_waits_for_those_who_take_and_not_without_end() {
        let precedence = Precedence::default();
        precedence.give();
        let first = precedence.take();
        let begin = Instant::now();
        precedence.give();
        assert!(begin.elapsed() >= LONGEST);
        std::thread::scope(|scope| {
            let given = scope.spawn(|| precedence.give());
            drop(first);
            given.join().unwrap();
        });
        assert_eq!(*lock(&precedence.first), 0);
    }

    #[test]
    fn who_locks_first_goes_first_until_it_is_unlocked() {
        let (precedence, mutex) = (Precedence::default(), Mutex::new(0));
        let mut first = precedence.lock_first(&mutex);
        *first += 1;
        assert_eq!(*lock(&precedence.first), 1);
        std::thread::scope(|scope| {
            let last = scope.spawn(|| *precedence.lock_last(&mutex));
            *first += 1;
            drop(first);
            assert_eq!(last.join().unwrap(), 2);
        });
        assert_eq!(*lock(&precedence.first), 0);
    }
}
