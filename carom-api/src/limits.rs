// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a VM may have at most. The VMM's address map has room for as much, which it asserts when it is compiled.

use std::ops::RangeInclusive;

/// Bytes in a MiB.
pub const MIB: u64 = 1 << 20;
/// Bytes in a GiB.
pub const GIB: u64 = 1 << 30;

/// Most vCPUs of a VM: what the 8-bit local APIC IDs of the ACPI MADT can name.
pub const MAX_VCPUS: u32 = 254;
/// Highest number of a CPU of the host: sets of them, as the C library has them, hold so many.
pub const MAX_HOST_CPU: u32 = 1023;
/// Bits of a physical address that the guest's CPUs have at most if nothing else is said. Linux that starts by PVH knows as many.
pub const MAX_PHYS_BITS: u8 = 46;
/// Bits of a physical address that x86-64 CPUs may have, the least since they have 64-bit addresses.
pub const PHYS_BITS: RangeInclusive<u8> = 36..=52;
/// Bytes of physical addresses that are not RAM's, at least: the hole below 4 GiB, and as much for 64-bit BARs.
pub const ROOM_BESIDE_RAM: u64 = 2 * GIB;
/// Least RAM in bytes that a kernel boots in.
pub const MIN_MEMORY: u64 = 32 * MIB;
/// Most RAM in bytes.
pub const MAX_MEMORY: u64 = 512 * GIB;
/// Bytes of RAM that lie below the hole for BARs.
pub const LOW_MEMORY: u64 = 3 * GIB;
/// Most zones that RAM is made of.
pub const MAX_MEMORY_ZONES: usize = 32;
/// Highest number of a node of the host.
pub const MAX_HOST_NODE: u32 = 1023;
/// Highest number of a node of the guest.
pub const MAX_NODE: u32 = 15;
/// What the size of RAM is a multiple of, in bytes: one huge page.
pub const MEMORY_GRANULE: u64 = 2 * MIB;
/// RAM that comes while the guest runs is a multiple of this: the least that Linux adds.
pub const HOTPLUG_GRANULE: u64 = 128 * MIB;
/// Room for the kernel command line with its terminating zero, in bytes.
pub const CMDLINE_MAX: usize = 0x1_0000;

/// Bytes of a chunk of a bounce window: one huge page.
pub const CHUNK_SIZE: u64 = 2 * MIB;
/// Budget of all bounce windows in bytes where none is given.
pub const DEFAULT_BOUNCE_SIZE: u64 = 64 * MIB;
/// Most bytes that the budget of bounce windows may be raised to: 32 domains whose windows fill the aperture of IOVAs.
pub const MAX_BOUNCE_SIZE: u64 = 16 * GIB;

/// Most PCI segments of a VM.
pub const MAX_PCI_SEGMENTS: u16 = 16;

/// Slots of a bus that devices may be in. The first is the host bridge's.
pub const SLOTS: RangeInclusive<u8> = 1..=31;

/// How many devices fit on a PCI segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// In a VM without a virtio-iommu, and on a segment whose devices are all behind it.
    pub all: usize,
    /// On another segment of a VM that has a virtio-iommu, behind it.
    pub behind_iommu: usize,
    /// The same, beside it.
    pub beside_iommu: usize,
}

impl Slots {
    /// Those of `segment`. On the first, the virtio-iommu has a place.
    pub const fn of(segment: u16) -> Self {
        if segment == 0 {
            Self { all: 30, behind_iommu: 16, beside_iommu: 14 }
        } else {
            Self { all: 31, behind_iommu: 17, beside_iommu: 14 }
        }
    }
}
