// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Figures about a running engine.

use serde::Serialize;

use crate::latency::HostLatency;
use crate::mapping::MappedMemory;
use crate::wire::{Kind, by_kind};

/// How many requests of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestCounts {
    /// ATTACH requests.
    pub attach: u64,
    /// DETACH requests.
    pub detach: u64,
    /// MAP requests.
    pub map: u64,
    /// UNMAP requests.
    pub unmap: u64,
    /// PROBE requests.
    pub probe: u64,
    /// WINDOW_ADD requests.
    pub window_add: u64,
    /// WINDOW_DEL requests.
    pub window_del: u64,
    /// Requests of no known type, or too short for their type.
    pub invalid: u64,
}

/// Figures about a running engine. Totals count from the start of the VM; a device reset does not clear them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Requests received.
    pub requests: RequestCounts,
    /// Of these, the ones whose status was not `OK`, or that got no answer.
    pub failed: RequestCounts,
    /// Mappings that exist, over all domains. Chunks are not mappings.
    pub mappings: u64,
    /// Bytes of guest RAM that are mapped on the host. Files that the guest sees as memory count, too. They are counted once for each address space of the host that maps them:
    /// one for each endpoint, unless the endpoints of a domain share one.
    pub mapped_bytes: u64,
    /// The largest [`mapped_bytes`](Self::mapped_bytes) so far.
    pub peak_mapped_bytes: u64,
    /// Bytes that the host's kernel has pinned: guest RAM, files that the guest sees as memory, and chunks. They are counted once for each address space of its IOMMU that maps
    /// them, as it accounts them (`VmLck` of containers, `VmPin` of IOMMUFD). Those of emulated devices and other processes pin
    /// nothing.
    pub pinned_bytes: u64,
    /// The largest [`pinned_bytes`](Self::pinned_bytes) so far.
    pub peak_pinned_bytes: u64,
    /// Bytes of window memory that are backed, lost chunks included.
    pub window_bytes: u64,
    /// The largest [`window_bytes`](Self::window_bytes) so far.
    pub peak_window_bytes: u64,
    /// Parked chunks: still mapped on the host after a reset of the VM, for when the guest asks for them again.
    pub parked_chunks: u64,
    /// Parked chunks that the guest got back, each without a call to the host.
    pub unparked_chunks: u64,
    /// Calls to [`DmaMapper::map`](crate::DmaMapper::map) that succeeded.
    pub host_maps: u64,
    /// Calls to [`DmaMapper::unmap`](crate::DmaMapper::unmap) that succeeded.
    pub host_unmaps: u64,
    /// Calls to [`DmaMapper::unmap`](crate::DmaMapper::unmap) that were saved because neighbouring UNMAP requests of
    /// one notification shared one.
    pub merged_unmaps: u64,
    /// Calls to a mapper or to the chunk store that failed.
    pub host_errors: u64,
    /// Stuck ranges: the host did not unmap them, and no domain has them any more. Each request tries again.
    pub stuck_ranges: u64,
    /// Lost chunks: they could not be given back, are not used again, and count in [`window_bytes`](Self::window_bytes). The host is asked
    /// again with each request for windows and each reset, but for those of which nobody knows whether it still maps them.
    pub lost_chunks: u64,
    /// Faults queued for the driver.
    pub faults: u64,
    /// Faults that were not reported to the driver: too many at once, of no endpoint, or with no buffer for them.
    /// Also those that waited when the device was reset.
    pub faults_dropped: u64,
    /// How long the host takes. Reported apart from the counters.
    #[serde(skip)]
    pub(crate) host: HostLatency,
}

impl RequestCounts {
    /// Counts one.
    pub(crate) fn add(&mut self, kind: Kind) {
        *self.of(kind) += 1;
    }

    fn of(&mut self, kind: Kind) -> &mut u64 {
        by_kind!(self, kind)
    }
}

impl Counters {
    /// Counts a request and its outcome.
    pub(crate) fn count(&mut self, kind: Kind, ok: bool) {
        self.requests.add(kind);
        if !ok {
            self.failed.add(kind);
        }
    }

    /// Counts an invalid request.
    pub(crate) fn count_invalid(&mut self) {
        self.requests.invalid += 1;
        self.failed.invalid += 1;
    }

    /// Counts what a mapper mapped.
    pub(crate) fn note_mapped(&mut self, memory: MappedMemory, len: u64, pins: bool) {
        self.host_maps += 1;
        if pins && memory.is_pinned() {
            self.pinned_bytes += len;
            self.peak_pinned_bytes = self.peak_pinned_bytes.max(self.pinned_bytes);
        }
        if memory.is_capped() {
            self.mapped_bytes += len;
            self.peak_mapped_bytes = self.peak_mapped_bytes.max(self.mapped_bytes);
        }
    }

    /// Counts what a mapper unmapped.
    pub(crate) fn note_unmapped(&mut self, memory: MappedMemory, len: u64, pins: bool) {
        self.host_unmaps += 1;
        self.forget_mapped(memory, len, pins);
    }

    /// Counts memory whose mapping ended with its mapper.
    pub(crate) fn forget_mapped(&mut self, memory: MappedMemory, len: u64, pins: bool) {
        if pins && memory.is_pinned() {
            self.pinned_bytes -= len;
        }
        if memory.is_capped() {
            self.mapped_bytes -= len;
        }
    }

    /// Sets the bytes of window memory that are backed.
    pub(crate) fn note_window(&mut self, bytes: u64) {
        self.window_bytes = bytes;
        self.peak_window_bytes = self.peak_window_bytes.max(bytes);
    }
}
