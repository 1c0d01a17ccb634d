// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the device's thread asks of the host's kernel.

use crate::sandbox::ThreadRole;
use crate::sandbox::calls::AT_PLACES;

/// Serves the queue: flushes the file.
pub(crate) const ROLE: ThreadRole = ThreadRole { name: "pmem", calls: &[AT_PLACES] };
