// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Constants of the specification (virtio 1.4, section 5.10).

/// Device type (virtio 1.4, section 5).
pub const DEVICE_TYPE: u16 = 19;
/// PCI class: communication controller, other.
pub const PCI_CLASS: u32 = 0x07_8000;

/// Indices of the queues (section 5.10.2).
pub mod queue {
    /// Packets from the device to the driver.
    pub const RX: u16 = 0;
    /// Packets from the driver to the device.
    pub const TX: u16 = 1;
    /// Events from the device to the driver.
    pub const EVENT: u16 = 2;
}

/// Feature bits (section 5.10.3).
pub mod feature {
    /// The device supports stream sockets.
    pub const STREAM: u64 = 1 << 0;
}

/// Size of the device configuration in bytes. The only field of the configuration is the guest's CID (section 5.10.4).
pub const CONFIG_BYTES: usize = 8;
/// Size of a packet's header in bytes (section 5.10.6).
pub const HEADER: usize = 44;
/// CID of the host.
pub const HOST_CID: u64 = 2;
/// Wildcard that means any port. No connection can use this port.
pub const PORT_ANY: u32 = u32::MAX;
/// Type of packets of stream sockets.
pub const TYPE_STREAM: u16 = 1;

/// Operations of a packet.
pub mod op {
    /// Requests a connection.
    pub const REQUEST: u16 = 1;
    /// Accepts a connection.
    pub const RESPONSE: u16 = 2;
    /// Resets or refuses a connection.
    pub const RST: u16 = 3;
    /// Shuts down one or both directions.
    pub const SHUTDOWN: u16 = 4;
    /// Carries data.
    pub const RW: u16 = 5;
    /// Reports the state of the receive buffer of the packet's sender.
    pub const CREDIT_UPDATE: u16 = 6;
    /// Requests a credit update.
    pub const CREDIT_REQUEST: u16 = 7;
}

/// Flags of [`op::SHUTDOWN`] (section 5.10.6.5).
pub mod shutdown {
    /// The packet's sender will receive no more data.
    pub const RECEIVE: u32 = 1 << 0;
    /// The packet's sender will send no more data.
    pub const SEND: u32 = 1 << 1;
    /// Both directions.
    pub const BOTH: u32 = RECEIVE | SEND;
}

/// Size of an event in bytes (section 5.10.6.7).
pub const EVENT: usize = 4;
/// Event: all connections were lost.
pub const EVENT_TRANSPORT_RESET: u32 = 0;
