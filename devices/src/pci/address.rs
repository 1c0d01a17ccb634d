// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Addresses of PCI functions.

use std::fmt;

/// Address of a PCI function: segment, bus, device and function, written `ssss:bb:dd.f`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PciAddress {
    /// Segment group.
    pub segment: u16,
    /// Bus number.
    pub bus: u8,
    /// Device number, 0 to 31.
    pub device: u8,
    /// Function number, 0 to 7.
    pub function: u8,
}

impl PciAddress {
    /// Returns function 0 of `device` (0 to 31) on bus 0 of segment 0.
    pub const fn on_root_bus(device: u8) -> Self {
        Self::on_segment(0, device)
    }

    /// Returns function 0 of `device` (0 to 31) on bus 0 of `segment`. All of Carom's devices have such
    /// addresses.
    pub const fn on_segment(segment: u16, device: u8) -> Self {
        Self { segment, bus: 0, device, function: 0 }
    }

    /// Returns the PCI requester ID of the function, which consists of bus, device and function.
    pub fn requester_id(self) -> u16 {
        (u16::from(self.bus) << 8) | (u16::from(self.device & 0x1f) << 3) | u16::from(self.function & 7)
    }

    /// Returns the number that virtio-iommu and the ACPI VIOT use for the function: segment and requester
    /// ID.
    pub fn endpoint_id(self) -> u32 {
        (u32::from(self.segment) << 16) | u32::from(self.requester_id())
    }

    /// Returns the function with this [`endpoint_id`](Self::endpoint_id).
    pub fn of_endpoint(id: u32) -> Self {
        let [function, bus, low, high] = id.to_le_bytes();
        Self { segment: u16::from_le_bytes([low, high]), bus, device: function >> 3, function: function & 7 }
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.segment, self.bus, self.device, self.function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_id_converts_back_to_its_address() {
        let address = PciAddress { segment: 1, bus: 2, device: 31, function: 7 };
        assert_eq!(PciAddress::of_endpoint(address.endpoint_id()), address);
    }
}
