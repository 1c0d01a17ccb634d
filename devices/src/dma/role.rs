// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the thread that tells of faults asks of the host's kernel.

use crate::sandbox::ThreadRole;

/// Tells the driver of the virtio-iommu of accesses that were stopped.
pub(crate) const ROLE: ThreadRole = ThreadRole { name: "dma-faults", calls: &[] };
