// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the device's thread asks of the host's kernel.

use crate::sandbox::ThreadRole;
use crate::sandbox::calls::WAITING;

/// Waits for what the host says of a device that it gave.
pub(crate) const NOTICES_ROLE: ThreadRole = ThreadRole { name: "vfio-notices", calls: &[WAITING] };
