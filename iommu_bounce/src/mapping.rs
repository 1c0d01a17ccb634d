// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a domain maps: guest RAM, memory of devices, and chunks of window memory.

use crate::backend::{DeviceMemoryKind, Permissions};

/// A mapping of guest RAM, made by one MAP request and removed whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// Last IOVA.
    pub(crate) last: u64,
    /// Where the memory starts.
    pub(crate) gpa: u64,
    pub(crate) permissions: Permissions,
}

/// A mapping of a device's memory, made by one MAP request and removed whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceMapping {
    /// Last IOVA.
    pub(crate) last: u64,
    /// Where the guest saw the memory.
    pub(crate) gpa: u64,
    pub(crate) permissions: Permissions,
    pub(crate) kind: DeviceMemoryKind,
    /// Whether the host maps it. It does so until the memory moves or goes in the guest's view.
    pub(crate) live: bool,
}

/// A chunk of window memory, mapped by one WINDOW_ADD request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Its index in the store.
    pub(crate) index: u32,
    pub(crate) permissions: Permissions,
}

/// Which kind of memory a mapped range leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MappedMemory {
    /// Guest RAM.
    Ram,
    /// The chunk of this index.
    Chunk(u32),
    /// Memory of a device.
    Device(DeviceMemoryKind),
}

impl MappedMemory {
    /// True if the host's kernel pins it.
    #[inline]
    pub(crate) fn is_pinned(self) -> bool {
        self != Self::Device(DeviceMemoryKind::Registers)
    }

    /// True if it counts toward the cap on mapped bytes.
    #[inline]
    pub(crate) fn is_capped(self) -> bool {
        matches!(self, Self::Ram | Self::Device(DeviceMemoryKind::Pages))
    }
}

impl DeviceMapping {
    /// Bytes that count toward the cap on mapped bytes, for a mapping that starts at `iova`.
    pub(crate) fn capped_bytes(&self, iova: u64) -> u64 {
        let counts = self.live && MappedMemory::Device(self.kind).is_capped();
        if counts { self.last - iova + 1 } else { 0 }
    }
}
