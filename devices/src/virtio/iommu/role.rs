// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the device's thread asks of the host's kernel.

use crate::sandbox::ThreadRole;
use crate::sandbox::calls::{MAPPINGS, MESSAGES};

/// Polls the request queue.
pub(crate) const ROLE: ThreadRole = ThreadRole { name: "iommu_poll", calls: &[MAPPINGS, MESSAGES] };
