// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Numbers of the specification (virtio 1.3, section 5.5).

/// Device type (virtio 1.3, section 5).
pub const DEVICE_TYPE: u16 = 5;
/// PCI class: memory controller, of no kind that PCI knows.
pub const PCI_CLASS: u32 = 0x05_8000;

/// Indices of the queues (section 5.5.2).
pub mod queue {
    /// Pages that the driver puts into the balloon.
    pub const INFLATE: u16 = 0;
    /// Pages that it takes out.
    pub const DEFLATE: u16 = 1;
    /// The first and the last of those that may have free pages: the specification says 4, and drivers that leave out the queues
    /// which are for features that the device does not have, Linux's among them, use 2.
    pub const REPORTING: std::ops::RangeInclusive<u16> = 2..=4;
}

/// Feature bits (section 5.5.3).
pub mod feature {
    /// The driver takes pages out of the balloon when its guest is out of memory.
    pub const DEFLATE_ON_OOM: u64 = 1 << 2;
    /// The driver tells of pages that are free.
    pub const REPORTING: u64 = 1 << 5;
}

/// Bytes of the configuration: pages that the balloon should have, and that it has (section 5.5.4). What is behind them belongs to
/// features that the device does not have.
pub const CONFIG_BYTES: usize = 8;
/// Bytes of a page, in the configuration and in the queues (section 5.5.6).
pub const PAGE: u64 = 4096;
