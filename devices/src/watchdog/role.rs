// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the device's thread asks of the host's kernel.

use crate::sandbox::ThreadRole;

/// Waits for the end of the counter.
pub(crate) const ROLE: ThreadRole = ThreadRole { name: "watchdog", calls: &[] };
