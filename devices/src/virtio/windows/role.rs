// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What threads of window memory ask of the host's kernel.

use crate::sandbox::Call::{self, Without};
use crate::sandbox::ThreadRole;
use crate::sandbox::calls::MAPPINGS;

/// Flags that would have a file written to, or made.
const NOT_FOR_READING: u32 = (libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC).cast_unsigned();

/// Opening a file for reading.
const OPENING: &[Call] = &[Without(libc::SYS_open, 1, NOT_FOR_READING), Without(libc::SYS_openat, 2, NOT_FOR_READING)];

/// Allocates window memory ahead of requests, and gives it back.
pub(crate) const STASH_ROLE: ThreadRole = ThreadRole { name: "window-stash", calls: &[MAPPINGS] };

/// Opens a chunk of window memory anew, for a server that is to read it only.
pub(crate) const READER_ROLE: ThreadRole = ThreadRole { name: "window-reader", calls: &[OPENING] };
