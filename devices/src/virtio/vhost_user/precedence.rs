// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Who goes first where a lock does not say.
//!
//! A server may ask for translations without end, and each of them takes the session's lock for a moment. A thread that waits for the
//! lock to take a mapping away could lose each time. So whoever serves the server lets such threads go first.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::sync::lock;

/// How long those are let go first in a row. They are threads of vCPUs, which the server must not wait for without end either.
const LONGEST: Duration = Duration::from_millis(50);

/// See the module.
#[derive(Default)]
pub(super) struct Precedence {
    first: Mutex<u32>,
    none: Condvar,
}

/// Somebody goes first, as long as this is there.
pub(super) struct First<'p>(&'p Precedence);

impl Precedence {
    /// The caller goes first.
    pub(super) fn take(&self) -> First<'_> {
        *lock(&self.first) += 1;
        First(self)
    }

    /// Lets those go first who do.
    pub(super) fn give(&self) {
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
}
