// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the device's thread asks of the host's kernel.

use crate::sandbox::ThreadRole;

/// Reads random bytes from a file for a guest.
pub(crate) const ROLE: ThreadRole = ThreadRole { name: "rng", calls: &[] };
