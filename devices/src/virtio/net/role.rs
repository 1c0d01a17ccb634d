// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What threads of a network device ask of the host's kernel.

use crate::sandbox::ThreadRole;
use crate::sandbox::calls::TAP;

/// Serves a queue of packets: reads and writes the file of the host's interface.
pub(crate) const ROLE: ThreadRole = ThreadRole { name: "net", calls: &[] };

/// Serves the control queue: tells the host's interface of its queues.
pub(crate) const CONTROL_ROLE: ThreadRole = ThreadRole { name: "net_control", calls: &[TAP] };
