// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory that a domain maps: guest RAM, device memory, and chunks of window memory.

use crate::backend::{DeviceMemoryKind, Permissions};

/// Mapping of guest RAM. One MAP request creates the mapping, and the mapping is always removed as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// Last IOVA.
    pub(crate) last: u64,
    /// Guest-physical address of the memory.
    pub(crate) gpa: u64,
    pub(crate) permissions: Permissions,
}

/// Mapping of device memory. One MAP request creates the mapping, and the mapping is always removed as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceMapping {
    /// Last IOVA.
    pub(crate) last: u64,
    /// Guest-physical address at which the guest saw the memory when it was mapped.
    pub(crate) gpa: u64,
    pub(crate) permissions: Permissions,
    pub(crate) kind: DeviceMemoryKind,
    /// True while the host maps the memory. Becomes false when the memory moves or disappears in the guest's view.
    pub(crate) live: bool,
}

/// Chunk of window memory, mapped by one WINDOW_ADD request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Index of the chunk in the store.
    pub(crate) index: u32,
    pub(crate) permissions: Permissions,
}

/// Kind of memory that a range is mapped to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MappedMemory {
    /// Guest RAM.
    Ram,
    /// Chunk with this index.
    Chunk(u32),
    /// Device memory.
    Device(DeviceMemoryKind),
}

impl MappedMemory {
    /// True if the host kernel pins the memory.
    #[inline]
    pub(crate) fn is_pinned(self) -> bool {
        self != Self::Device(DeviceMemoryKind::Registers)
    }

    /// True if the memory counts towards the cap on mapped bytes.
    #[inline]
    pub(crate) fn is_capped(self) -> bool {
        matches!(self, Self::Ram | Self::Device(DeviceMemoryKind::Pages))
    }
}

impl DeviceMapping {
    /// Returns the bytes that count towards the cap on mapped bytes, for a mapping that starts at `iova`.
    pub(crate) fn capped_bytes(&self, iova: u64) -> u64 {
        let counts = self.live && MappedMemory::Device(self.kind).is_capped();
        if counts { self.last - iova + 1 } else { 0 }
    }
}
