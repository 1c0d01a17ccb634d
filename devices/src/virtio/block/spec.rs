// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Constants of the specification (virtio 1.4, section 5.2).

/// Device type (virtio 1.4, section 5).
pub const DEVICE_TYPE: u16 = 2;
/// PCI class: mass storage controller, other.
pub const PCI_CLASS: u32 = 0x01_8000;

/// Feature bits (section 5.2.3).
pub mod feature {
    /// `seg_max` gives the maximum number of data buffers in a request.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The disk is read-only.
    pub const RO: u64 = 1 << 5;
    /// `blk_size` gives the block size.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// The device accepts flush requests. If the driver does not accept this feature, each write must be durable when it completes.
    pub const FLUSH: u64 = 1 << 9;
    /// `topology` gives the best alignment of requests.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// `num_queues` gives the number of queues.
    pub const MQ: u64 = 1 << 12;
    /// The device accepts discard requests.
    pub const DISCARD: u64 = 1 << 13;
    /// The device accepts write-zeroes requests.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// Request types (section 5.2.6).
pub mod request {
    /// Read.
    pub const IN: u32 = 0;
    /// Write.
    pub const OUT: u32 = 1;
    /// Flush: make written data durable.
    pub const FLUSH: u32 = 4;
    /// Return the disk's serial number.
    pub const GET_ID: u32 = 8;
    /// Discard: the content of the ranges is no longer needed.
    pub const DISCARD: u32 = 11;
    /// Write zeroes.
    pub const WRITE_ZEROES: u32 = 13;
}

/// Request status (section 5.2.6).
pub mod status {
    /// The request succeeded.
    pub const OK: u8 = 0;
    /// The request failed or is out of range.
    pub const IOERR: u8 = 1;
    /// The device does not support this request.
    pub const UNSUPP: u8 = 2;
}

/// Size of a sector in bytes. Requests give positions and lengths in sectors, even if the block size is larger.
pub const SECTOR: u64 = 512;
/// Size of a request header in bytes. The fields are the type, a reserved field and the sector.
pub const HEADER: usize = 16;
/// Size of the disk's serial number in bytes.
pub const ID_BYTES: usize = 20;
/// Size of a range in a discard or write-zeroes request, in bytes. The fields are the first sector, the number of sectors and the flags.
pub const RANGE_BYTES: usize = 16;
/// Range flag: the device may deallocate the range.
pub const UNMAP: u32 = 1 << 0;
/// Size of the device configuration in bytes, up to the last field of an offered feature (section 5.2.4).
pub const CONFIG_BYTES: usize = 60;
