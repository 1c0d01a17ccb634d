// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the device's thread asks of the host's kernel.

use crate::sandbox::ThreadRole;

/// Carries bytes between the guest's console and the host.
pub(crate) const ROLE: ThreadRole = ThreadRole { name: "console", calls: &[] };
