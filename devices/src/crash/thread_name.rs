// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reads the name of a thread, in a way that a signal handler may use.

/// Reads the name of this thread into `bytes`.
pub(super) fn read(bytes: &mut [u8; 16]) {
    // SAFETY: PR_GET_NAME writes 16 bytes, and `bytes` has 16.
    unsafe { libc::prctl(libc::PR_GET_NAME, bytes.as_mut_ptr()) };
}
