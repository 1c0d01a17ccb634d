// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Constants of the specification (virtio 1.3, section 5.5).

/// Device type (virtio 1.3, section 5).
pub const DEVICE_TYPE: u16 = 5;
/// PCI class: memory controller, other.
pub const PCI_CLASS: u32 = 0x05_8000;

/// Indices of the queues (section 5.5.2).
pub mod queue {
    /// Queue for pages that the driver adds to the balloon.
    pub const INFLATE: u16 = 0;
    /// Queue for pages that the driver removes from the balloon.
    pub const DEFLATE: u16 = 1;
    /// Possible indices of the queue for free pages. The specification assigns index 4. Some drivers, such as Linux's driver, number only
    /// the queues whose features the device offers. These drivers use index 2.
    pub const REPORTING: std::ops::RangeInclusive<u16> = 2..=4;
}

/// Feature bits (section 5.5.3).
pub mod feature {
    /// The driver may remove pages from the balloon when the guest is out of memory.
    pub const DEFLATE_ON_OOM: u64 = 1 << 2;
    /// The driver may report free pages.
    pub const REPORTING: u64 = 1 << 5;
}

/// Size of the configuration in bytes. The fields are the target size and the present size, in pages (section 5.5.4). The specification has
/// further fields only for features that the device does not offer.
pub const CONFIG_BYTES: usize = 8;
/// Size of a page in bytes, in the configuration and in the queues (section 5.5.6).
pub const PAGE: u64 = 4096;
