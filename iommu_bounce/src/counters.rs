// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a running engine.

use serde::Serialize;

use crate::latency::HostLatency;
use crate::mapping::MappedMemory;
use crate::wire::{Kind, by_kind};

/// Number of requests of each kind.
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
    /// MAP_LIST requests.
    pub map_list: u64,
    /// Requests of unknown type, or too short for their type.
    pub invalid: u64,
}

/// Counters of a running engine. They count from the start of the VM, and a device reset does not clear them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Requests received.
    pub requests: RequestCounts,
    /// Requests whose status was not `OK`, or that got no answer.
    pub failed: RequestCounts,
    /// Existing mappings over all domains. Chunks do not count as mappings.
    pub mappings: u64,
    /// Bytes of guest RAM that are mapped on the host, including files that the guest sees as memory. Bytes count once for each host
    /// address space that maps them. Each endpoint has an address space of its own, unless the endpoints of a domain share an address
    /// space.
    pub mapped_bytes: u64,
    /// The largest [`mapped_bytes`](Self::mapped_bytes) so far.
    pub peak_mapped_bytes: u64,
    /// Bytes that the host kernel has pinned: guest RAM, files that the guest sees as memory, and chunks. Bytes count once for each IOMMU
    /// address space that maps them, as in the kernel's own accounting (`VmLck` for containers, `VmPin` for IOMMUFD). Address spaces of
    /// emulated devices and other processes pin nothing.
    pub pinned_bytes: u64,
    /// The largest [`pinned_bytes`](Self::pinned_bytes) so far.
    pub peak_pinned_bytes: u64,
    /// Bytes of backed window memory, including lost chunks.
    pub window_bytes: u64,
    /// The largest [`window_bytes`](Self::window_bytes) so far.
    pub peak_window_bytes: u64,
    /// Number of parked chunks. The host still maps these chunks after a reset of the VM, so that the guest can request them again.
    pub parked_chunks: u64,
    /// Number of parked chunks that the guest has requested again. None of these requests needed a host call.
    pub unparked_chunks: u64,
    /// Calls to [`DmaMapper::map`](crate::DmaMapper::map) that succeeded.
    pub host_maps: u64,
    /// Calls to [`DmaMapper::unmap`](crate::DmaMapper::unmap) that succeeded.
    pub host_unmaps: u64,
    /// Number of calls to [`DmaMapper::unmap`](crate::DmaMapper::unmap) that were saved, because adjacent UNMAP requests of one
    /// notification shared a call.
    pub merged_unmaps: u64,
    /// Failed calls to a mapper or to the chunk store.
    pub host_errors: u64,
    /// Number of stuck ranges. The host failed to unmap such a range, and no domain owns it any more. Each request retries the unmap.
    pub stuck_ranges: u64,
    /// Number of lost chunks, which the host could not release. Lost chunks are not used, and count in
    /// [`window_bytes`](Self::window_bytes). Each WINDOW_ADD or WINDOW_DEL and each reset retries the release. Chunks that the host may
    /// still map in a removed address space are never released.
    pub lost_chunks: u64,
    /// Faults queued for the driver.
    pub faults: u64,
    /// Faults that were not reported to the driver. A fault is not reported if too many faults occur in a short time, too many faults are
    /// pending, or the endpoint does not exist. Faults are also lost if the driver provides no buffer, or resets the device before the
    /// report.
    pub faults_dropped: u64,
    /// Durations of host calls. [`Engine::report`](crate::Engine::report) returns them separately from the counters.
    #[serde(skip)]
    pub(crate) host: HostLatency,
}

impl RequestCounts {
    /// Counts one request.
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

    /// Counts a successful map call.
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

    /// Counts a successful unmap call.
    pub(crate) fn note_unmapped(&mut self, memory: MappedMemory, len: u64, pins: bool) {
        self.host_unmaps += 1;
        self.forget_mapped(memory, len, pins);
    }

    /// Subtracts memory whose mapping was removed together with its mapper.
    pub(crate) fn forget_mapped(&mut self, memory: MappedMemory, len: u64, pins: bool) {
        if pins && memory.is_pinned() {
            self.pinned_bytes -= len;
        }
        if memory.is_capped() {
            self.mapped_bytes -= len;
        }
    }

    /// Sets the amount of backed window memory in bytes.
    pub(crate) fn note_window(&mut self, bytes: u64) {
        self.window_bytes = bytes;
        self.peak_window_bytes = self.peak_window_bytes.max(bytes);
    }
}
