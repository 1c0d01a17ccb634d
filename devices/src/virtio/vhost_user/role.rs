// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the device's threads ask of the host's kernel.

use crate::sandbox::Call;
use crate::sandbox::ThreadRole;
use crate::sandbox::calls::{MESSAGES, SOCKETS, unix_stream};

/// Sockets whose other end goes to the server.
const SOCKET_PAIRS: &[Call] = &[unix_stream(libc::SYS_socketpair)];

/// Waits for the server, looks for the next one and tells it of the device, or of the pairs of queues that a driver uses, or ends a
/// connection whose server takes too long.
pub(crate) const ROLE: ThreadRole = ThreadRole { name: "vhost-user", calls: &[MESSAGES, SOCKETS, SOCKET_PAIRS] };
