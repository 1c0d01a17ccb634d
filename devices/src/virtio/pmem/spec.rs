// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Numbers of the specification (virtio 1.3, section 5.19).

/// Device type (virtio 1.3, section 5).
pub const DEVICE_TYPE: u16 = 27;
/// PCI class: mass storage controller, of no kind that PCI knows.
pub const PCI_CLASS: u32 = 0x01_8000;
/// Index of the only queue (section 5.19.2).
pub const REQUEST_QUEUE: u16 = 0;
/// ID of the shared memory region that the memory is in (section 5.19.3).
pub const SHMID: u8 = 0;

/// Feature bits (section 5.19.3).
pub mod feature {
    /// The memory is in the shared memory region, rather than where the configuration says.
    pub const SHMEM_REGION: u64 = 1 << 0;
}

/// Bytes of the configuration: le64 start, le64 size (section 5.19.4).
pub const CONFIG_BYTES: usize = 16;

/// The request that the driver makes: have all that is written so far be persistent (section 5.19.6).
pub const FLUSH: u32 = 0;
/// Bytes of a request, and of its answer.
pub const REQUEST_BYTES: usize = 4;
/// Answers.
pub mod status {
    /// It is done.
    pub const OK: u32 = 0;
    /// The host failed.
    pub const FAILED: u32 = 1;
}

/// What size and place are multiples of, in bytes: the least that Linux makes a namespace of.
pub const GRANULE: u64 = 2 << 20;
