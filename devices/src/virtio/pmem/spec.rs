// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Constants of the specification (virtio 1.3, section 5.19).

/// Device type (virtio 1.3, section 5).
pub const DEVICE_TYPE: u16 = 27;
/// PCI class: mass storage controller, other.
pub const PCI_CLASS: u32 = 0x01_8000;
/// Index of the only queue (section 5.19.2).
pub const REQUEST_QUEUE: u16 = 0;
/// ID of the shared memory region that contains the memory (section 5.19.3).
pub const SHMID: u8 = 0;

/// Feature bits (section 5.19.3).
pub mod feature {
    /// The memory is the shared memory region. The driver must not use the address in the configuration.
    pub const SHMEM_REGION: u64 = 1 << 0;
}

/// Size of the configuration in bytes. The fields are le64 start and le64 size (section 5.19.4).
pub const CONFIG_BYTES: usize = 16;

/// Request to make all data written so far durable (section 5.19.6).
pub const FLUSH: u32 = 0;
/// Size of a request in bytes. An answer has the same size.
pub const REQUEST_BYTES: usize = 4;
/// Answers to requests.
pub mod status {
    /// The request succeeded.
    pub const OK: u32 = 0;
    /// The host failed to flush, or the request type is unknown.
    pub const FAILED: u32 = 1;
}

/// Alignment of the memory's size and address, in bytes. Linux needs this alignment to create a namespace.
pub const GRANULE: u64 = 2 << 20;
