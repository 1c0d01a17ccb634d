// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Numbers of virtio (1.3, section 6 and those of the device types) that a front end must know.

/// `VIRTIO_F_INDIRECT_DESC`, `VIRTIO_F_EVENT_IDX`: what of rings is left to the server.
pub(super) const RING_FEATURES: u64 = 1 << 28 | 1 << 29;
/// `VIRTIO_F_VERSION_1`.
pub(super) const VERSION_1: u64 = 1 << 32;
/// `VIRTIO_F_ACCESS_PLATFORM`: addresses are those of the platform's IOMMU.
pub(super) const ACCESS_PLATFORM: u64 = 1 << 33;
/// `VHOST_USER_F_PROTOCOL_FEATURES`, which is between front end and server.
pub(super) const PROTOCOL_FEATURES: u64 = 1 << 30;

/// Offset of the index in an available and a used ring (section 2.7).
pub(super) const RING_INDEX: u64 = 2;

/// A file system (section 5.11).
pub mod fs {
    /// Device type.
    pub const DEVICE_TYPE: u16 = 26;
    /// PCI class: another mass storage controller.
    pub const PCI_CLASS: u32 = 0x01_80_00;
    /// Bytes of the tag.
    pub const TAG_BYTES: usize = 36;
}

/// A disk (section 5.2).
pub(super) mod block {
    /// Device type.
    pub(in super::super) const DEVICE_TYPE: u16 = 2;
    /// PCI class: another mass storage controller.
    pub(in super::super) const PCI_CLASS: u32 = 0x01_80_00;
    /// `SIZE_MAX`, `SEG_MAX`, `GEOMETRY`, `RO`, `BLK_SIZE`, `FLUSH`, `TOPOLOGY`, `CONFIG_WCE`, `MQ`, `DISCARD`, `WRITE_ZEROES`.
    pub(in super::super) const FEATURES: u64 =
        1 << 1 | 1 << 2 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 13 | 1 << 14;
    /// Bytes of the device configuration, up to `write_zeroes_may_unmap` and what pads it.
    pub(in super::super) const CONFIG_BYTES: usize = 60;
    /// Where it has `writeback`, the one byte that a driver writes.
    pub(in super::super) const WRITEBACK: usize = 32;
    /// Where it has `num_queues`.
    pub(in super::super) const NUM_QUEUES: usize = 34;
}
