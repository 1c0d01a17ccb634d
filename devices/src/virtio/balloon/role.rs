// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the device's thread asks of the host's kernel.

use crate::sandbox::ThreadRole;

/// Gives memory of the guest back to the host.
pub(crate) const ROLE: ThreadRole = ThreadRole { name: "balloon", calls: &[] };
