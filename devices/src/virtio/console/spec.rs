// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Constants of the specification (virtio 1.3, section 5.3).

/// Device type (virtio 1.3, section 5).
pub const DEVICE_TYPE: u16 = 3;
/// PCI class: communication controller, other.
pub const PCI_CLASS: u32 = 0x07_8000;

/// Indices of the queues of the only port (section 5.3.2).
pub mod queue {
    /// Queue for input from the host.
    pub const RX: u16 = 0;
    /// Queue for output of the driver.
    pub const TX: u16 = 1;
}

/// Feature bits (section 5.3.3).
pub mod feature {
    /// The configuration contains the size of the terminal.
    pub const SIZE: u64 = 1 << 0;
}

/// Size of the configuration in bytes. The fields are columns and rows (section 5.3.4). The specification has further fields only for
/// features that the device does not offer.
pub const CONFIG_BYTES: usize = 4;
