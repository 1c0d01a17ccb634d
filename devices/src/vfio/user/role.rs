// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the device's thread asks of the host's kernel.

use crate::sandbox::ThreadRole;
use crate::sandbox::calls::MESSAGES;

/// Reads what the device's server sends, and copies what it asks for.
pub(crate) const ROLE: ThreadRole = ThreadRole { name: "vfio-user", calls: &[MESSAGES] };
