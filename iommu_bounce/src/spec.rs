// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Numbers and layouts of the virtio-iommu device: virtio 1.3, section 5.13, and the bounce window extension, version 1.
//!
//! Sizes are in bytes. A request's readable part starts with a head of 4 bytes, `type` and three reserved ones; its
//! writable part ends with a tail of 4 bytes, `status` and three reserved ones. All fields are little-endian.

/// Feature bits (section 5.13.3), as masks.
pub mod feature {
    /// `input_range` in the configuration holds.
    pub const INPUT_RANGE: u64 = 1 << 0;
    /// `domain_range` in the configuration holds.
    pub const DOMAIN_RANGE: u64 = 1 << 1;
    /// MAP and UNMAP can be used.
    pub const MAP_UNMAP: u64 = 1 << 2;
    /// PROBE can be used.
    pub const PROBE: u64 = 1 << 4;
    /// MAP knows `MAP_F_MMIO`.
    pub const MMIO: u64 = 1 << 5;
    /// `bypass` in the configuration holds, and ATTACH knows bypass domains.
    pub const BYPASS_CONFIG: u64 = 1 << 6;
    /// The bounce window extension. A number of ours in the device's range; the specification uses 0 to 6.
    pub const BOUNCE_WINDOW: u64 = 1 << 23;
    /// The same with an aperture above 4 GiB, in place of `BOUNCE_WINDOW`: for drivers that know of such.
    pub const BOUNCE_WINDOW_HIGH: u64 = 1 << 24;
    /// Whether there are bounce windows: one of these.
    pub const ANY_BOUNCE_WINDOW: u64 = BOUNCE_WINDOW | BOUNCE_WINDOW_HIGH;
}

/// Request types (section 5.13.6).
pub mod request {
    /// Attaches an endpoint to a domain.
    pub const ATTACH: u8 = 0x01;
    /// Detaches an endpoint from a domain.
    pub const DETACH: u8 = 0x02;
    /// Maps guest RAM in a domain.
    pub const MAP: u8 = 0x03;
    /// Removes mappings from a domain.
    pub const UNMAP: u8 = 0x04;
    /// Asks for an endpoint's properties.
    pub const PROBE: u8 = 0x05;
    /// Backs a chunk and maps it in a domain (bounce windows).
    pub const WINDOW_ADD: u8 = 0x40;
    /// Takes a chunk out of a domain and gives it back (bounce windows).
    pub const WINDOW_DEL: u8 = 0x41;
}

/// Sizes of the readable parts of requests, head included (sections 5.13.6.2 to 5.13.6.6).
pub mod readable {
    /// head, le32 domain, le32 endpoint, le32 flags, u8 reserved\[4].
    pub const ATTACH: usize = 20;
    /// head, le32 domain, le32 endpoint, u8 reserved\[8].
    pub const DETACH: usize = 20;
    /// head, le32 domain, le64 virt_start, le64 virt_end, le64 phys_start, le32 flags.
    pub const MAP: usize = 36;
    /// head, le32 domain, le64 virt_start, le64 virt_end, u8 reserved\[4].
    pub const UNMAP: usize = 28;
    /// head, le32 endpoint, u8 reserved\[64].
    pub const PROBE: usize = 72;
    /// head, le32 domain, le32 flags, le64 iova, u8 reserved\[8].
    pub const WINDOW_ADD: usize = 28;
    /// head, le32 domain, le32 reserved, le64 iova, u8 reserved2\[8].
    pub const WINDOW_DEL: usize = 28;
}

/// Size of the tail that ends every writable part: u8 status, u8 reserved\[3].
pub const TAIL_SIZE: usize = 4;

/// Size of the writable part of WINDOW_ADD: le64 shm_offset, tail.
pub const WINDOW_ADD_REPLY: usize = 12;

/// The `shm_offset` that WINDOW_ADD answers when it fails.
pub const NO_SHM_OFFSET: u64 = u64::MAX;

/// The largest `probe_size` that the engine takes, in bytes: room for 21 RESV_MEM properties.
pub const MAX_PROBE_SIZE: u32 = 512;

/// The longest reply to any request, in bytes: the properties of PROBE and a tail.
pub const MAX_REPLY: usize = MAX_PROBE_SIZE as usize + TAIL_SIZE;

/// Flag of ATTACH (section 5.13.6.2): the domain is a bypass domain.
pub const ATTACH_F_BYPASS: u32 = 1 << 0;

/// Flags of MAP and WINDOW_ADD (section 5.13.6.4): the device may read.
pub const MAP_F_READ: u32 = 1 << 0;
/// Flags of MAP and WINDOW_ADD (section 5.13.6.4): the device may write.
pub const MAP_F_WRITE: u32 = 1 << 1;
/// Flag of MAP (section 5.13.6.4): what is mapped are registers or memory of a device.
pub const MAP_F_MMIO: u32 = 1 << 2;

/// The outcome of a request (section 5.13.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The request is not supported, or not as asked.
    Unsupp = 2,
    /// The host failed.
    DevErr = 3,
    /// A parameter is invalid.
    Inval = 4,
    /// A parameter is out of range.
    Range = 5,
    /// The domain, endpoint or chunk does not exist.
    NoEnt = 6,
    /// A limit is reached.
    NoMem = 8,
}

/// Properties that PROBE answers (section 5.13.6.7).
pub mod property {
    /// Type of a RESV_MEM property.
    pub const RESV_MEM: u16 = 1;
    /// What a RESV_MEM property says about its length: its size without the header, le16 type and le16 length.
    pub const RESV_MEM_LENGTH: u16 = 20;
    /// Size of a RESV_MEM property: header, u8 subtype, u8 reserved\[3], le64 start, le64 end.
    pub const RESV_MEM_SIZE: usize = 24;
    /// Subtype of RESV_MEM: the driver cannot map these addresses.
    pub const RESERVED: u8 = 0;
    /// Subtype of RESV_MEM: writes here are message-signalled interrupts.
    pub const MSI: u8 = 1;
}

/// Fault reports on the event queue (section 5.13.6.9).
pub mod fault {
    /// Size of a report: u8 reason, u8 reserved\[3], le32 flags, le32 endpoint, le32 reserved1, le64 address.
    pub const SIZE: usize = 24;
    /// None of the other reasons.
    pub const REASON_UNKNOWN: u8 = 0;
    /// The endpoint is attached to nothing.
    pub const REASON_DOMAIN: u8 = 1;
    /// Nothing is mapped there, or not for such an access.
    pub const REASON_MAPPING: u8 = 2;
    /// It was a read.
    pub const F_READ: u32 = 1 << 0;
    /// It was a write.
    pub const F_WRITE: u32 = 1 << 1;
    /// `address` holds.
    pub const F_ADDRESS: u32 = 1 << 8;
}

/// The device configuration (section 5.13.4, and the bounce window extension from [`config::STANDARD_SIZE`] on).
pub mod config {
    /// le64: page sizes.
    pub const PAGE_SIZE_MASK: usize = 0;
    /// le64, le64: first and last IOVA.
    pub const INPUT_RANGE: usize = 8;
    /// le32, le32: first and last domain.
    pub const DOMAIN_RANGE: usize = 24;
    /// le32: size of the properties of PROBE.
    pub const PROBE_SIZE: usize = 32;
    /// u8: whether endpoints that are attached to nothing are in bypass mode. The one field that a driver may write.
    pub const BYPASS: usize = 36;
    /// Size of the standard structure.
    pub const STANDARD_SIZE: usize = 40;
    /// le64: first IOVA of the aperture.
    pub const WINDOW_IOVA_START: usize = 40;
    /// le64: last IOVA of the aperture.
    pub const WINDOW_IOVA_END: usize = 48;
    /// le64: bytes per chunk.
    pub const WINDOW_CHUNK_SIZE: usize = 56;
    /// le64: bytes that the device backs, over all domains.
    pub const WINDOW_BUDGET: usize = 64;
    /// le32: size at or below which copying is advised; 0 leaves it to the driver.
    pub const BOUNCE_THRESHOLD: usize = 72;
    /// Size of the structure with the bounce window extension.
    pub const WINDOW_SIZE: usize = 80;
}
