// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Numbers and layouts of the virtio-iommu device: virtio 1.3, section 5.13, and versions 2 and 3 of the bounce window extension.
//!
//! Sizes are in bytes. The readable part of a request starts with a head of 4 bytes: `type` and three reserved bytes. The
//! writable part ends with a tail of 4 bytes: `status` and three reserved bytes. All fields are little-endian.

/// Feature bits (section 5.13.3), as masks.
pub mod feature {
    /// The configuration field `input_range` is valid.
    pub const INPUT_RANGE: u64 = 1 << 0;
    /// The configuration field `domain_range` is valid.
    pub const DOMAIN_RANGE: u64 = 1 << 1;
    /// The device supports MAP and UNMAP.
    pub const MAP_UNMAP: u64 = 1 << 2;
    /// The device supports PROBE.
    pub const PROBE: u64 = 1 << 4;
    /// MAP supports `MAP_F_MMIO`.
    pub const MMIO: u64 = 1 << 5;
    /// The configuration field `bypass` is valid, and ATTACH supports bypass domains.
    pub const BYPASS_CONFIG: u64 = 1 << 6;
    /// The device supports MAP_LIST (docs/map-lists.md). Carom chose this bit, like the next one, from the bits for device-specific
    /// features.
    pub const MAP_LIST: u64 = 1 << 21;
    /// Version 3 of the bounce window extension. Carom chose this bit from the bits for device-specific features (0 to 23, section 2.2).
    /// The specification uses bits 0 to 6, and drafts of other extensions use bits from 7 on.
    pub const BOUNCE_WINDOW: u64 = 1 << 22;
    /// Version 2 of the bounce window extension, with an aperture below 4 GiB.
    pub const BOUNCE_WINDOW_V2: u64 = 1 << 23;
    /// Version 2 of the bounce window extension, with an aperture above 4 GiB. This bit is not device-specific. Guests with kernels of
    /// earlier releases accept it.
    pub const BOUNCE_WINDOW_V2_HIGH: u64 = 1 << 24;
    /// Mask of the features for bounce windows. A device offers version 3 and one of the features of version 2. A driver accepts one of
    /// the offered features.
    pub const ANY_BOUNCE_WINDOW: u64 = BOUNCE_WINDOW | BOUNCE_WINDOW_V2 | BOUNCE_WINDOW_V2_HIGH;
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
    /// Requests an endpoint's properties.
    pub const PROBE: u8 = 0x05;
    /// Backs a chunk and maps it in a domain (bounce windows).
    pub const WINDOW_ADD: u8 = 0x40;
    /// Removes a chunk from a domain and releases it (bounce windows).
    pub const WINDOW_DEL: u8 = 0x41;
    /// Maps a list of ranges of guest memory at consecutive IOVAs (map lists).
    pub const MAP_LIST: u8 = 0x42;
}

/// Sizes of the readable parts of requests, including the head (sections 5.13.6.2 to 5.13.6.6).
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
    /// head, le32 domain, le64 iova, le32 flags, u8 reserved\[8]. In version 2: head, le32 domain, le32 flags, le64 iova, u8 reserved\[8].
    pub const WINDOW_ADD: usize = 28;
    /// head, le32 domain, le64 iova, u8 reserved\[12]. In version 2: head, le32 domain, le32 reserved, le64 iova, u8 reserved2\[8].
    pub const WINDOW_DEL: usize = 28;
    /// head, le32 domain, le64 virt_start, le32 flags, le32 count. `count` ranges follow.
    pub const MAP_LIST: usize = 24;
}

/// Size of a range in MAP_LIST: le64 phys_start, le64 length.
pub const MAP_RANGE_SIZE: usize = 16;

/// Maximum number of ranges in one MAP_LIST: 1 MiB in pages of 4 KiB.
pub const MAX_MAP_RANGES: usize = 256;

/// Size in bytes of the longest readable part of a request.
pub const MAX_REQUEST: usize = readable::MAP_LIST + MAX_MAP_RANGES * MAP_RANGE_SIZE;

/// Size of the tail at the end of every writable part: u8 status, u8 reserved\[3].
pub const TAIL_SIZE: usize = 4;

/// Size of the writable part of WINDOW_ADD: le64 shm_offset, tail.
pub const WINDOW_ADD_REPLY: usize = 12;

/// The `shm_offset` in the reply to a failed WINDOW_ADD.
pub const NO_SHM_OFFSET: u64 = u64::MAX;

/// Maximum `probe_size` of the engine in bytes: room for 21 RESV_MEM properties.
pub const MAX_PROBE_SIZE: u32 = 512;

/// Maximum size of a reply in bytes: room for the PROBE properties and a tail.
pub const MAX_REPLY: usize = MAX_PROBE_SIZE as usize + TAIL_SIZE;

/// Flag of ATTACH (section 5.13.6.2): the domain is a bypass domain.
pub const ATTACH_F_BYPASS: u32 = 1 << 0;

/// Flags of MAP and WINDOW_ADD (section 5.13.6.4): the device may read.
pub const MAP_F_READ: u32 = 1 << 0;
/// Flags of MAP and WINDOW_ADD (section 5.13.6.4): the device may write.
pub const MAP_F_WRITE: u32 = 1 << 1;
/// Flag of MAP (section 5.13.6.4): the mapped memory is registers or memory of a device.
pub const MAP_F_MMIO: u32 = 1 << 2;

/// Outcome of a request (section 5.13.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// The request, or one of its options, is not supported.
    Unsupp = 2,
    /// A host call failed.
    DevErr = 3,
    /// A parameter is invalid.
    Inval = 4,
    /// A parameter is out of range.
    Range = 5,
    /// The domain, endpoint or chunk does not exist.
    NoEnt = 6,
    /// A limit was reached, or the host has too few resources.
    NoMem = 8,
}

/// Properties in PROBE replies (section 5.13.6.7).
pub mod property {
    /// Type of a RESV_MEM property.
    pub const RESV_MEM: u16 = 1;
    /// Length field of a RESV_MEM property: its size without the header (le16 type, le16 length).
    pub const RESV_MEM_LENGTH: u16 = 20;
    /// Size of a RESV_MEM property: header, u8 subtype, u8 reserved\[3], le64 start, le64 end.
    pub const RESV_MEM_SIZE: usize = 24;
    /// Subtype of RESV_MEM: the driver cannot map these addresses.
    pub const RESERVED: u8 = 0;
    /// Subtype of RESV_MEM: writes to these addresses are message-signalled interrupts.
    pub const MSI: u8 = 1;
}

/// Fault reports on the event queue (section 5.13.6.9).
pub mod fault {
    /// Size of a report: u8 reason, u8 reserved\[3], le32 flags, le32 endpoint, le32 reserved1, le64 address.
    pub const SIZE: usize = 24;
    /// Any other reason.
    pub const REASON_UNKNOWN: u8 = 0;
    /// The endpoint is attached to no domain.
    pub const REASON_DOMAIN: u8 = 1;
    /// Nothing is mapped at the address, or the mapping does not allow the access.
    pub const REASON_MAPPING: u8 = 2;
    /// The access was a read.
    pub const F_READ: u32 = 1 << 0;
    /// The access was a write.
    pub const F_WRITE: u32 = 1 << 1;
    /// The field `address` is valid.
    pub const F_ADDRESS: u32 = 1 << 8;
}

/// Device configuration (section 5.13.4, and the bounce window extension from [`config::STANDARD_SIZE`] on).
pub mod config {
    /// le64: supported page sizes, as a mask.
    pub const PAGE_SIZE_MASK: usize = 0;
    /// le64, le64: first and last IOVA.
    pub const INPUT_RANGE: usize = 8;
    /// le32, le32: first and last domain number.
    pub const DOMAIN_RANGE: usize = 24;
    /// le32: size of the properties of PROBE.
    pub const PROBE_SIZE: usize = 32;
    /// u8: 1 if unattached endpoints are in bypass mode. The only field that a driver may write.
    pub const BYPASS: usize = 36;
    /// Size of the standard structure.
    pub const STANDARD_SIZE: usize = 40;
    /// le64: first IOVA of the aperture.
    pub const WINDOW_IOVA_START: usize = 40;
    /// le64: last IOVA of the aperture.
    pub const WINDOW_IOVA_END: usize = 48;
    /// le64: bytes per chunk.
    pub const WINDOW_CHUNK_SIZE: usize = 56;
    /// le64: maximum bytes that the device backs, over all domains.
    pub const WINDOW_BUDGET: usize = 64;
    /// le32: maximum size of a DMA that the driver is advised to copy. 0 leaves the decision to the driver.
    pub const BOUNCE_THRESHOLD: usize = 72;
    /// le32: maximum size of a DMA that the driver is advised to copy if the device of the DMA writes the memory. 0 stands for
    /// [`BOUNCE_THRESHOLD`].
    pub const BOUNCE_THRESHOLD_WRITE: usize = 76;
    /// Size of the structure with the bounce window extension.
    pub const WINDOW_SIZE: usize = 80;
}
