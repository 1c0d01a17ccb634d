// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Precedence of threads that wait for the same lock.
//!
//! A server may send an endless stream of requests for translations, or of reports that its configuration has changed. Each request takes
//! the session's lock for a moment. A thread that needs the lock for an UNMAP or a pause could lose the race for the lock every time. So
//! such threads register before they wait for the lock. The watcher thread, which serves the server's requests, waits until no thread is
//! registered before it takes the lock.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::sync::lock;

/// Maximum time that the watcher thread waits for registered threads. Many of the registered threads are vCPU threads. Without this
/// limit, the guest could delay the server's requests for ever.
const LONGEST: Duration = Duration::from_millis(50);

/// Precedence of threads for a lock, as described in the module documentation.
#[derive(Default)]
pub(super) struct Precedence {
    first: Mutex<u32>,
    none: Condvar,
}

/// Registration of a thread that takes the lock before the watcher thread. The registration ends when the value is dropped.
struct First<'p>(&'p Precedence);

/// Lock guard of a registered thread.
pub(super) struct FirstGuard<'p, T> {
    /// Declared before `_first`, so the lock is released before the registration ends.
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
    /// Registers the calling thread, and locks `mutex`.
    pub(super) fn lock_first<'p, T>(&'p self, mutex: &'p Mutex<T>) -> FirstGuard<'p, T> {
        let first = self.take();
        FirstGuard { guard: lock(mutex), _first: first }
    }

    /// Waits until no thread is registered, for at most [`LONGEST`]. Then locks `mutex`.
    pub(super) fn lock_last<'p, T>(&self, mutex: &'p Mutex<T>) -> MutexGuard<'p, T> {
        self.give();
        lock(mutex)
    }

    /// Registers the calling thread.
    fn take(&self) -> First<'_> {
        *lock(&self.first) += 1;
        First(self)
    }

    /// Waits until no thread is registered, for at most [`LONGEST`].
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
    fn give_waits_for_takers_up_to_the_limit() {
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
    fn lock_last_waits_until_lock_first_is_released() {
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
