// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Maximums of a VM. The VMM asserts at compile time that its address map has room for these maximums.

use std::ops::RangeInclusive;

/// Bytes in a MiB.
pub const MIB: u64 = 1 << 20;
/// Bytes in a GiB.
pub const GIB: u64 = 1 << 30;

/// Maximum vCPUs of a VM. Local APIC IDs have 8 bits: 255 addresses all CPUs, and 254 is left for the I/O APIC.
pub const MAX_VCPUS: u32 = 254;
/// Highest number of a host CPU: the last CPU that the C library's CPU sets (`cpu_set_t`) can hold.
pub const MAX_HOST_CPU: u32 = 1023;
/// Default maximum width of a guest-physical address in bits. Linux supports at most 46 bits when it boots through PVH.
pub const MAX_PHYS_BITS: u8 = 46;
/// Possible widths of a physical address in bits on x86-64. All 64-bit CPUs have at least 36 bits.
pub const PHYS_BITS: RangeInclusive<u8> = 36..=52;
/// Minimum bytes of guest-physical address space in addition to the RAM: 1 GiB for the hole below 4 GiB, and 1 GiB for 64-bit BARs.
pub const ROOM_BESIDE_RAM: u64 = 2 * GIB;
/// Minimum RAM in bytes that a kernel can boot with.
pub const MIN_MEMORY: u64 = 32 * MIB;
/// Maximum RAM in bytes.
pub const MAX_MEMORY: u64 = 512 * GIB;
/// Maximum bytes of RAM below the hole for BARs.
pub const LOW_MEMORY: u64 = 3 * GIB;
/// Maximum memory zones of a VM.
pub const MAX_MEMORY_ZONES: usize = 32;
/// Highest number of a host NUMA node.
pub const MAX_HOST_NODE: u32 = 1023;
/// Highest number of a guest NUMA node.
pub const MAX_NODE: u32 = 15;
/// Granule of the RAM size in bytes: one huge page.
pub const MEMORY_GRANULE: u64 = 2 * MIB;
/// Granule of hotplugged RAM in bytes: the smallest block that Linux adds.
pub const HOTPLUG_GRANULE: u64 = 128 * MIB;
/// Maximum bytes of the kernel command line, including its terminating zero.
pub const CMDLINE_MAX: usize = 0x1_0000;

/// Bytes of a chunk of a bounce window: one huge page.
pub const CHUNK_SIZE: u64 = 2 * MIB;
/// Default budget of all bounce windows in bytes.
pub const DEFAULT_BOUNCE_SIZE: u64 = 64 * MIB;
/// Maximum budget of bounce windows in bytes: enough for 32 domains whose windows fill the IOVA aperture.
pub const MAX_BOUNCE_SIZE: u64 = 16 * GIB;

/// Maximum PCI segments of a VM.
pub const MAX_PCI_SEGMENTS: u16 = 16;

/// PCI slots available to devices. Slot 0 belongs to the host bridge.
pub const SLOTS: RangeInclusive<u8> = 1..=31;

/// Maximum numbers of devices on a PCI segment. If the VM has no virtio-iommu, or if the whole segment is behind the virtio-iommu, `all`
/// applies. Otherwise the other two fields apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Maximum number of all devices together.
    pub all: usize,
    /// Maximum number of devices behind the virtio-iommu.
    pub behind_iommu: usize,
    /// Maximum number of devices that are not behind the virtio-iommu.
    pub beside_iommu: usize,
}

impl Slots {
    /// Returns the maximums for `segment`. The virtio-iommu takes a slot of segment 0.
    pub const fn of(segment: u16) -> Self {
        if segment == 0 {
            Self { all: 30, behind_iommu: 16, beside_iommu: 14 }
        } else {
            Self { all: 31, behind_iommu: 17, beside_iommu: 14 }
        }
    }
}
