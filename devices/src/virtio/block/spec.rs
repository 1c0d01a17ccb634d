// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Numbers of the specification (virtio 1.4, section 5.2).

/// Device type (virtio 1.4, section 5).
pub const DEVICE_TYPE: u16 = 2;
/// PCI class: mass storage, of no kind that PCI knows.
pub const PCI_CLASS: u32 = 0x01_8000;

/// Feature bits (section 5.2.3).
pub mod feature {
    /// `seg_max` says how many buffers a request has at most.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The disk is read-only.
    pub const RO: u64 = 1 << 5;
    /// `blk_size` says what requests are multiples of.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// There are flush requests. A driver that does not accept it relies on each write being durable.
    pub const FLUSH: u64 = 1 << 9;
    /// `topology` says what requests are best aligned to.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// `num_queues` says how many queues there are.
    pub const MQ: u64 = 1 << 12;
    /// There are discard requests.
    pub const DISCARD: u64 = 1 << 13;
    /// There are requests that write zeroes.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// Types of requests (section 5.2.6).
pub mod request {
    /// Read.
    pub const IN: u32 = 0;
    /// Write.
    pub const OUT: u32 = 1;
    /// Make durable what was written.
    pub const FLUSH: u32 = 4;
    /// Tell the disk's name.
    pub const GET_ID: u32 = 8;
    /// What is there is not needed any more.
    pub const DISCARD: u32 = 11;
    /// Write zeroes.
    pub const WRITE_ZEROES: u32 = 13;
}

/// Status of a request (section 5.2.6).
pub mod status {
    /// Done.
    pub const OK: u8 = 0;
    /// It failed, or it is out of range.
    pub const IOERR: u8 = 1;
    /// The device does not know such a request.
    pub const UNSUPP: u8 = 2;
}

/// Bytes of a sector, in which requests say where and how much, whatever the block size.
pub const SECTOR: u64 = 512;
/// Bytes of a request's header: type, reserved, sector.
pub const HEADER: usize = 16;
/// Bytes of the disk's name.
pub const ID_BYTES: usize = 20;
/// Bytes of an entry of a discard or write-zeroes request: sector, number of sectors, flags.
pub const RANGE_BYTES: usize = 16;
/// Flag of such an entry: the range may be deallocated.
pub const UNMAP: u32 = 1 << 0;
/// Bytes of the device configuration, as far as it has fields for the features that are offered (section 5.2.4).
pub const CONFIG_BYTES: usize = 60;
