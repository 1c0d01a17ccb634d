// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Locks that stay usable after a thread died.

use std::hint;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

/// Locks `mutex`, also after a thread panicked while it held it: the state of a device stays valid between any two of
/// its statements, and one dead vCPU thread must not take the others along before the VM is torn down.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`lock`], for one of several readers.
pub(crate) fn read_lock<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// As [`lock`], for the only writer.
pub(crate) fn write_lock<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// How often [`lock_soon`] tries: some microseconds, several times what the engine takes for a request that needs no host.
const TRIES: usize = 100;

/// The same for a thread that must not sleep: `None` if somebody holds `mutex` all of some microseconds.
pub(crate) fn lock_soon<T: ?Sized>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    (0..TRIES).find_map(|_| match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
        Err(TryLockError::WouldBlock) => {
            hint::spin_loop();
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn lock_that_is_held_is_not_waited_for() {
        let mutex = Mutex::new(1);
        let held = lock(&mutex);
        assert!(lock_soon(&mutex).is_none());
        drop(held);
        assert_eq!(lock_soon(&mutex).as_deref(), Some(&1));
    }

    #[test]
    fn lock_of_a_thread_that_died_is_taken() {
        let mutex = Mutex::new(1);
        let panicked = thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _held = lock(&mutex);
                panic!("as the test wants it");
            });
            holder.join().is_err()
        });
        assert!(panicked);
        assert_eq!(lock_soon(&mutex).as_deref(), Some(&1));
    }
}
