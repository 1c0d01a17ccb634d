// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Numbers of the specification (virtio 1.4, section 5.1).

use virtio_bindings::bindings::virtio_net as bindings;

/// Device type (virtio 1.4, section 5).
pub const DEVICE_TYPE: u16 = 1;
/// PCI class: Ethernet controller.
pub const PCI_CLASS: u32 = 0x02_0000;

/// Bytes of the header before each packet, with the number of buffers in it (section 5.1.6).
pub const HEADER_BYTES: usize = 12;
/// Where in the header that number is: 16 bits.
pub const NUM_BUFFERS: usize = 10;
/// Most bytes of a packet: what segmentation offload makes of it, and the Ethernet header (section 5.1.6.3.1).
pub const MAX_PACKET: usize = 65550;
/// Bytes of a packet as it is without offloads, with the Ethernet header, and a VLAN tag: the least room for one.
pub const MIN_FRAME: usize = 14;

/// The packet's checksum may be left to the device.
pub const CSUM: u64 = 1 << bindings::VIRTIO_NET_F_CSUM;
/// The driver takes packets whose checksum is not made.
pub const GUEST_CSUM: u64 = 1 << bindings::VIRTIO_NET_F_GUEST_CSUM;
/// The device tells its most bytes of a packet.
pub const MTU: u64 = 1 << bindings::VIRTIO_NET_F_MTU;
/// The device has an address.
pub const MAC: u64 = 1 << bindings::VIRTIO_NET_F_MAC;
/// The driver takes segments of TCP over IPv4 as one packet.
pub const GUEST_TSO4: u64 = 1 << bindings::VIRTIO_NET_F_GUEST_TSO4;
/// Likewise over IPv6.
pub const GUEST_TSO6: u64 = 1 << bindings::VIRTIO_NET_F_GUEST_TSO6;
/// With bits for congestion.
pub const GUEST_ECN: u64 = 1 << bindings::VIRTIO_NET_F_GUEST_ECN;
/// The device takes segments of TCP over IPv4 as one packet.
pub const HOST_TSO4: u64 = 1 << bindings::VIRTIO_NET_F_HOST_TSO4;
/// Likewise over IPv6.
pub const HOST_TSO6: u64 = 1 << bindings::VIRTIO_NET_F_HOST_TSO6;
/// With bits for congestion.
pub const HOST_ECN: u64 = 1 << bindings::VIRTIO_NET_F_HOST_ECN;
/// A packet may come in several buffers.
pub const MRG_RXBUF: u64 = 1 << bindings::VIRTIO_NET_F_MRG_RXBUF;
/// There is a control queue.
pub const CTRL_VQ: u64 = 1 << bindings::VIRTIO_NET_F_CTRL_VQ;
/// There are several pairs of queues.
pub const MQ: u64 = 1 << bindings::VIRTIO_NET_F_MQ;
/// The driver takes segments of UDP over IPv4 as one packet.
pub const GUEST_USO4: u64 = 1 << 54;
/// Likewise over IPv6.
pub const GUEST_USO6: u64 = 1 << 55;
/// The device takes segments of UDP as one packet.
pub const HOST_USO: u64 = 1 << 56;

/// Bytes of the configuration (section 5.1.4), up to the MTU.
pub const CONFIG_BYTES: usize = 12;

/// Class of a command to the control queue that sets how many pairs of queues are used (section 5.1.6.5.6.1).
pub const CTRL_MQ: u8 = 4;
/// Its only command.
pub const CTRL_MQ_VQ_PAIRS_SET: u8 = 0;
/// Answer of the control queue: done.
pub const CTRL_OK: u8 = 0;
/// Answer of the control queue: refused.
pub const CTRL_ERR: u8 = 1;
