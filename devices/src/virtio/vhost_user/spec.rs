// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Constants of virtio 1.3 that a front end must know, from section 6 and the sections of the device types.

/// `VIRTIO_F_INDIRECT_DESC` and `VIRTIO_F_EVENT_IDX`: ring features that the server implements.
pub(super) const RING_FEATURES: u64 = 1 << 28 | 1 << 29;
/// `VIRTIO_F_VERSION_1`.
pub(super) const VERSION_1: u64 = 1 << 32;
/// `VIRTIO_F_ACCESS_PLATFORM`: the platform's IOMMU translates the device's addresses.
pub(super) const ACCESS_PLATFORM: u64 = 1 << 33;
/// `VHOST_USER_F_PROTOCOL_FEATURES`. The driver never sees this feature.
pub(super) const PROTOCOL_FEATURES: u64 = 1 << 30;

/// Offset of the index in an available ring or a used ring (section 2.7).
pub(super) const RING_INDEX: u64 = 2;

/// File system (section 5.11).
pub mod fs {
    /// Device type.
    pub const DEVICE_TYPE: u16 = 26;
    /// PCI class: another mass storage controller.
    pub const PCI_CLASS: u32 = 0x01_80_00;
    /// Size of the tag in bytes.
    pub const TAG_BYTES: usize = 36;
}

/// Disk (section 5.2).
pub(super) mod block {
    /// Device type.
    pub(in super::super) const DEVICE_TYPE: u16 = 2;
    /// PCI class: another mass storage controller.
    pub(in super::super) const PCI_CLASS: u32 = 0x01_80_00;
    /// Features of a disk that a server may offer: `SIZE_MAX`, `SEG_MAX`, `GEOMETRY`, `RO`, `BLK_SIZE`, `FLUSH`, `TOPOLOGY`, `CONFIG_WCE`,
    /// `MQ`, `DISCARD`, `WRITE_ZEROES`.
    pub(in super::super) const FEATURES: u64 =
        1 << 1 | 1 << 2 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 13 | 1 << 14;
    /// Size of the device configuration in bytes, up to `write_zeroes_may_unmap` and its padding.
    pub(in super::super) const CONFIG_BYTES: usize = 60;
    /// Offset of `writeback`, the only byte that a driver can write.
    pub(in super::super) const WRITEBACK: usize = 32;
    /// Offset of `num_queues`.
    pub(in super::super) const NUM_QUEUES: usize = 34;
}
