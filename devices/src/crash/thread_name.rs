// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The name of a thread, as a handler of signals may ask for it.

/// The name of this thread.
pub(super) fn read(bytes: &mut [u8; 16]) {
    // SAFETY: PR_GET_NAME writes 16 bytes, for which there is room.
    unsafe { libc::prctl(libc::PR_GET_NAME, bytes.as_mut_ptr()) };
}
