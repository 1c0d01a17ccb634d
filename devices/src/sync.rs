// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Locks that stay usable after a thread died.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also after a thread panicked while it held it: the state of a device stays valid between any two of
/// its statements, and one dead vCPU thread must not take the others along before the VM is torn down.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
