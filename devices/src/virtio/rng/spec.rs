// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Constants of the specification (virtio 1.3, section 5.4). The device has no features and no configuration.

/// Device type (virtio 1.3, section 5).
pub const DEVICE_TYPE: u16 = 4;
/// PCI class: device that does not fit any defined class.
pub const PCI_CLASS: u32 = 0xff_0000;
/// Index of the only queue (section 5.4.2).
pub const REQUEST_QUEUE: u16 = 0;
