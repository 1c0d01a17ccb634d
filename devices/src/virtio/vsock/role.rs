// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the device's thread asks of the host's kernel.

use crate::sandbox::ThreadRole;
use crate::sandbox::calls::{MESSAGES, SOCKETS, WAITING};

/// Carries bytes between sockets of the guest and of the host.
pub(crate) const ROLE: ThreadRole = ThreadRole { name: "vsock", calls: &[MESSAGES, SOCKETS, WAITING] };
