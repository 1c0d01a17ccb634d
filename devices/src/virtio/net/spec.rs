// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Constants of the specification (virtio 1.4, section 5.1).

use virtio_bindings::bindings::virtio_net as bindings;

/// Device type (virtio 1.4, section 5).
pub const DEVICE_TYPE: u16 = 1;
/// PCI class: Ethernet controller.
pub const PCI_CLASS: u32 = 0x02_0000;

/// Size in bytes of the header before each packet. The header contains the number of receive buffers that the packet uses (section 5.1.6).
pub const HEADER_BYTES: usize = 12;
/// Offset of the 16-bit number of buffers in the header.
pub const NUM_BUFFERS: usize = 10;
/// Maximum size in bytes of a packet that is not segmented yet, including the Ethernet header (section 5.1.6.3.1).
pub const MAX_PACKET: usize = 65550;
/// Minimum size of a packet in bytes: the Ethernet header.
pub const MIN_FRAME: usize = 14;

/// The driver may leave a packet's checksum to the device.
pub const CSUM: u64 = 1 << bindings::VIRTIO_NET_F_CSUM;
/// The driver accepts packets without a checksum.
pub const GUEST_CSUM: u64 = 1 << bindings::VIRTIO_NET_F_GUEST_CSUM;
/// The configuration contains the device's MTU.
pub const MTU: u64 = 1 << bindings::VIRTIO_NET_F_MTU;
/// The configuration contains the device's MAC address.
pub const MAC: u64 = 1 << bindings::VIRTIO_NET_F_MAC;
/// The driver accepts large packets of TCP over IPv4.
pub const GUEST_TSO4: u64 = 1 << bindings::VIRTIO_NET_F_GUEST_TSO4;
/// The driver accepts large packets of TCP over IPv6.
pub const GUEST_TSO6: u64 = 1 << bindings::VIRTIO_NET_F_GUEST_TSO6;
/// The driver accepts large TCP packets with ECN bits.
pub const GUEST_ECN: u64 = 1 << bindings::VIRTIO_NET_F_GUEST_ECN;
/// The device accepts large packets of TCP over IPv4.
pub const HOST_TSO4: u64 = 1 << bindings::VIRTIO_NET_F_HOST_TSO4;
/// The device accepts large packets of TCP over IPv6.
pub const HOST_TSO6: u64 = 1 << bindings::VIRTIO_NET_F_HOST_TSO6;
/// The device accepts large TCP packets with ECN bits.
pub const HOST_ECN: u64 = 1 << bindings::VIRTIO_NET_F_HOST_ECN;
/// A packet may be spread over several receive buffers.
pub const MRG_RXBUF: u64 = 1 << bindings::VIRTIO_NET_F_MRG_RXBUF;
/// The device has a control queue.
pub const CTRL_VQ: u64 = 1 << bindings::VIRTIO_NET_F_CTRL_VQ;
/// The device has several pairs of queues.
pub const MQ: u64 = 1 << bindings::VIRTIO_NET_F_MQ;
/// The driver accepts large packets of UDP over IPv4.
pub const GUEST_USO4: u64 = 1 << 54;
/// The driver accepts large packets of UDP over IPv6.
pub const GUEST_USO6: u64 = 1 << 55;
/// The device accepts large packets of UDP.
pub const HOST_USO: u64 = 1 << 56;

/// Size of the configuration in bytes (section 5.1.4), up to the MTU.
pub const CONFIG_BYTES: usize = 12;

/// Class of control commands that set the number of pairs in use (section 5.1.6.5.6.1).
pub const CTRL_MQ: u8 = 4;
/// The only command of the class `CTRL_MQ`.
pub const CTRL_MQ_VQ_PAIRS_SET: u8 = 0;
/// Answer of the control queue: the command succeeded.
pub const CTRL_OK: u8 = 0;
/// Answer of the control queue: the command failed.
pub const CTRL_ERR: u8 = 1;
