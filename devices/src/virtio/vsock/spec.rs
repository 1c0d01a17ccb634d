// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Numbers of the specification (virtio 1.4, section 5.10).

/// Device type (virtio 1.4, section 5).
pub const DEVICE_TYPE: u16 = 19;
/// PCI class: communication controller, of no kind that PCI knows.
pub const PCI_CLASS: u32 = 0x07_8000;

/// Indices of the queues (section 5.10.2).
pub mod queue {
    /// Packets for the driver.
    pub const RX: u16 = 0;
    /// Packets of the driver.
    pub const TX: u16 = 1;
    /// Events for the driver.
    pub const EVENT: u16 = 2;
}

/// Feature bits (section 5.10.3).
pub mod feature {
    /// There are stream sockets.
    pub const STREAM: u64 = 1 << 0;
}

/// Bytes of the device configuration: the guest's CID (section 5.10.4).
pub const CONFIG_BYTES: usize = 8;
/// Bytes of a packet's header (section 5.10.6).
pub const HEADER: usize = 44;
/// CID of the host.
pub const HOST_CID: u64 = 2;
/// Stands for any port, and is none.
pub const PORT_ANY: u32 = u32::MAX;
/// The type of packets of stream sockets.
pub const TYPE_STREAM: u16 = 1;

/// What a packet does.
pub mod op {
    /// Asks for a connection.
    pub const REQUEST: u16 = 1;
    /// Takes one.
    pub const RESPONSE: u16 = 2;
    /// Ends one, or refuses it.
    pub const RST: u16 = 3;
    /// Says in which directions no bytes will go any more.
    pub const SHUTDOWN: u16 = 4;
    /// Has bytes.
    pub const RW: u16 = 5;
    /// Tells of the sender's buffer.
    pub const CREDIT_UPDATE: u16 = 6;
    /// Asks for that.
    pub const CREDIT_REQUEST: u16 = 7;
}

/// Flags of [`op::SHUTDOWN`] (section 5.10.6.5).
pub mod shutdown {
    /// The sender receives no more.
    pub const RECEIVE: u32 = 1 << 0;
    /// The sender sends no more.
    pub const SEND: u32 = 1 << 1;
    /// Both.
    pub const BOTH: u32 = RECEIVE | SEND;
}

/// Bytes of an event (section 5.10.6.7).
pub const EVENT: usize = 4;
/// The event that all connections are gone.
pub const EVENT_TRANSPORT_RESET: u32 = 0;
