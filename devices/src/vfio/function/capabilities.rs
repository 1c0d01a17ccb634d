// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reads the capability lists of a device that may be broken or hostile.

use super::host_function::ConfigAccess;
use crate::pci::regs;

/// Capability of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FoundCapability {
    /// Capability ID. Standard capabilities have an 8-bit ID.
    pub(crate) id: u16,
    /// Version, or 0 for a standard capability, which has no version.
    pub(crate) version: u8,
    /// Offset in configuration space, a multiple of 4.
    pub(crate) offset: u16,
}

fn dword(config: &dyn ConfigAccess, offset: u16) -> u32 {
    let mut bytes = [0; 4];
    config.read_config(offset, &mut bytes);
    u32::from_le_bytes(bytes)
}

/// True if `offset` is in `space`, and no capability in `list` has this offset.
fn goes_on(list: &[FoundCapability], offset: u16, space: std::ops::Range<u16>) -> bool {
    space.contains(&offset) && !list.iter().any(|found| found.offset == offset)
}

/// Returns the standard capabilities in list order (PCI Local Bus 3.0, section 6.7). The result ends at an invalid link: to the header, to
/// an earlier capability, or beyond the first 256 bytes of configuration space.
pub(crate) fn standard(config: &dyn ConfigAccess) -> Vec<FoundCapability> {
    let mut list = Vec::new();
    let status = dword(config, regs::COMMAND).to_le_bytes();
    if u16::from_le_bytes([status[2], status[3]]) & regs::STATUS_CAPABILITIES == 0 {
        return list;
    }
    let mut offset = u16::from(dword(config, regs::CAPABILITIES).to_le_bytes()[0] & 0xfc);
    while goes_on(&list, offset, regs::HEADER_END..regs::EXTENDED) {
        let [id, next, ..] = dword(config, offset).to_le_bytes();
        if id == 0xff {
            break;
        }
        list.push(FoundCapability { id: id.into(), version: 0, offset });
        offset = u16::from(next & 0xfc);
    }
    list
}

/// Returns the extended capabilities in list order (PCI Express Base, section 7.6.3), with the same checks of links as [`standard`].
pub(crate) fn extended(config: &dyn ConfigAccess) -> Vec<FoundCapability> {
    let mut list = Vec::new();
    if config.config_size() < u64::from(regs::CONFIG_SIZE) {
        return list;
    }
    let mut offset = regs::EXTENDED;
    while goes_on(&list, offset, regs::EXTENDED..regs::CONFIG_SIZE) {
        let header = dword(config, offset);
        if header == 0 || header == u32::MAX {
            break;
        }
        let [low, high, middle, _] = header.to_le_bytes();
        list.push(FoundCapability { id: u16::from_le_bytes([low, high]), version: middle & 0xf, offset });
        offset = u16::try_from(header >> 20).unwrap_or(0) & 0xffc;
    }
    list
}
