// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Locks that stay usable after a thread panicked.

use std::hint;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

/// Locks `mutex`, even after a thread panicked while it held the lock. This is sound, because the state of a device is valid after every
/// statement of its code. A vCPU thread that panicked must not make other threads panic before the VM is shut down.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Like [`lock`], but locks for reading, together with other readers.
pub(crate) fn read_lock<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Like [`lock`], but locks for writing.
pub(crate) fn write_lock<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Number of attempts of [`lock_soon`]. All attempts together take a few microseconds. This time is several times longer than the engine
/// needs for a request without a call to the host.
const TRIES: usize = 100;

/// Like [`lock`], for a thread that must not sleep. Returns `None` if another thread holds `mutex` for some microseconds.
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
    fn lock_soon_does_not_wait_for_a_held_lock() {
        let mutex = Mutex::new(1);
        let held = lock(&mutex);
        assert!(lock_soon(&mutex).is_none());
        drop(held);
        assert_eq!(lock_soon(&mutex).as_deref(), Some(&1));
    }

    #[test]
    fn lock_of_a_panicked_thread_can_be_taken() {
        let mutex = Mutex::new(1);
        let panicked = thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _held = lock(&mutex);
                panic!("panic of the test");
            });
            holder.join().is_err()
        });
        assert!(panicked);
        assert_eq!(lock_soon(&mutex).as_deref(), Some(&1));
    }
}
