// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What threads of a disk ask of the host's kernel.

use crate::sandbox::ThreadRole;
use crate::sandbox::calls::{AT_PLACES, POLICY, URING, WAITING};

/// Serves a queue: reads and writes the image.
pub(crate) const ROLE: ThreadRole = ThreadRole { name: "block", calls: &[AT_PLACES, POLICY, URING, WAITING] };
