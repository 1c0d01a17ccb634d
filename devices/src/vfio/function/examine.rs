// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Examines a device's configuration space, and decides what the guest sees of this space.
//!
//! Carom emulates these parts:
//! - The BARs, MSI, MSI-X, and the links of the standard and the extended capability list.
//! - The interrupt pin. The guest's function is alone in its slot, so its pin is INTA#, or none if INTx cannot be forwarded.
//! - The power state. The device stays in D0, because guest accesses to a mapped BAR would fault in any other state.
//! - The expansion ROM, which is absent.
//!
//! All other registers are the device's own. VFIO checks the guest's accesses to these registers.

use std::ops::Range;

use log::warn;

use super::capabilities::{self, FoundCapability};
use super::config_view::ConfigView;
use super::host_function::{HostFunction, IrqKind};
use crate::pci::{Bar, BarKind, ENTRY_SIZE, regs};
use crate::vfio::error::VfioPciError;

/// Extended capabilities that are hidden, because the guest could use them to change what the host has configured. The list contains
/// address translation services, SR-IOV, page requests, resizable BARs, PASID, and resizable BARs of virtual functions, in this order.
const HIDDEN_EXTENDED: [u16; 6] = [0x0f, 0x10, 0x13, 0x15, 0x1b, 0x24];
/// Enhanced allocation, a standard capability that is hidden because it contains fixed addresses of the host.
const CAP_ENHANCED_ALLOCATION: u16 = 0x14;
/// Interrupt pin INTA#.
const INTA: u8 = 1;
/// Multifunction bit of the header type.
const MULTIFUNCTION: u8 = 0x80;

/// MSI capability (PCI Local Bus 3.0, section 6.8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MsiCapability {
    /// Offset of the capability.
    pub(crate) offset: u16,
    /// True if the capability has a 64-bit address.
    pub(crate) wide: bool,
    /// True if the capability has a mask bit for each vector.
    pub(crate) maskable: bool,
    /// Number of vectors: 1, 2, 4, 8, 16 or 32.
    pub(crate) vectors: u16,
}

impl MsiCapability {
    /// Returns the offset of the 16-bit data register.
    pub(crate) fn data(self) -> u16 {
        self.offset + if self.wide { 12 } else { 8 }
    }
    /// Returns the offset of the 32 mask bits, or `None` if vectors cannot be masked.
    pub(crate) fn mask(self) -> Option<u16> {
        self.maskable.then_some(self.offset + if self.wide { 16 } else { 12 })
    }
    /// Returns the size of the capability in configuration space, in bytes.
    pub(crate) fn len(self) -> u16 {
        10 + if self.wide { 4 } else { 0 } + if self.maskable { 10 } else { 0 }
    }
}

/// A range of bytes in a BAR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BarRange {
    /// Index of the BAR.
    pub(crate) bar: u8,
    /// Offsets of the bytes in the BAR.
    pub(crate) range: Range<u64>,
}

/// MSI-X capability (PCI Local Bus 3.0, section 6.8.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MsixCapability {
    /// Offset of the capability.
    pub(crate) offset: u16,
    /// Number of vectors, 1 to 2048.
    pub(crate) vectors: u16,
    /// Place of the MSI-X table.
    pub(crate) table: BarRange,
    /// Place of the pending-bit array.
    pub(crate) pending: BarRange,
}

/// Guest's view of a device.
pub(crate) struct FunctionLayout {
    pub(crate) view: ConfigView,
    pub(crate) bars: Vec<Bar>,
    pub(crate) msi: Option<MsiCapability>,
    pub(crate) msix: Option<MsixCapability>,
    /// True if the function has INTx and the host can forward INTx.
    pub(crate) intx: bool,
}

/// Examines the configuration space of `host`. `name` is the function's name in messages. `line` is the number of the guest's interrupt
/// line for INTx, or `None` if the VM has no such line.
pub(crate) fn examine(name: &str, host: &dyn HostFunction, line: Option<u8>) -> Result<FunctionLayout, VfioPciError> {
    let size = host.config_size();
    if size < u64::from(regs::EXTENDED) {
        let what = format!("the configuration space has {size} bytes, but a PCI function has 256 or 4096 bytes");
        return Err(VfioPciError::Nonsense { name: name.to_string(), what });
    }
    let header_type = byte(host, regs::HEADER_TYPE) & !MULTIFUNCTION;
    if header_type != 0 {
        return Err(VfioPciError::Bridge { name: name.to_string(), header_type });
    }
    let bars = bars(name, host)?;
    let has_pin = byte(host, regs::INTERRUPT_PIN) != 0;
    let intx = has_pin && host.irq_count(IrqKind::Intx) != 0;
    let mut layout = FunctionLayout { view: ConfigView::new(&bars), bars, msi: None, msix: None, intx };
    emulate_header(&mut layout, line.filter(|_| intx));
    link_standard(name, &mut layout, host);
    link_extended(&mut layout, host);
    if has_pin && layout.msi.is_none() && layout.msix.is_none() && !intx {
        warn!(
            "{name}: the guest gets no interrupts from this device, because the device has only INTx, which cannot be forwarded to the guest"
        );
    }
    Ok(layout)
}

fn byte(host: &dyn HostFunction, offset: u16) -> u8 {
    let mut byte = [0xff];
    host.read_config(offset, &mut byte);
    byte[0]
}

fn word(host: &dyn HostFunction, offset: u16) -> u16 {
    let mut bytes = [0xff; 2];
    host.read_config(offset, &mut bytes);
    u16::from_le_bytes(bytes)
}

fn dword(host: &dyn HostFunction, offset: u16) -> u32 {
    let mut bytes = [0xff; 4];
    host.read_config(offset, &mut bytes);
    u32::from_le_bytes(bytes)
}

/// Returns the BARs. Reads their kinds from configuration space, and asks VFIO for their sizes.
fn bars(name: &str, host: &dyn HostFunction) -> Result<Vec<Bar>, VfioPciError> {
    let mut bars = Vec::new();
    let mut index = 0;
    while index < 6 {
        let size = host.region(index).size;
        if size != 0 {
            let register = dword(host, regs::BAR0 + 4 * u16::from(index));
            let bar = bar(index, register, size).ok_or_else(|| VfioPciError::Nonsense {
                name: name.to_string(),
                what: format!("BAR {index} is invalid: the register has the value {register:#x}, and the size is {size:#x} bytes; the type must be valid, and the size a power of two that this type allows"),
            })?;
            bars.push(bar);
            index += u8::from(bar.kind.is_64bit());
        }
        index += 1;
    }
    Ok(bars)
}

fn bar(index: u8, register: u32, size: u64) -> Option<Bar> {
    let prefetchable = register & 8 != 0;
    let (kind, sizes) = match register & 7 {
        flags if flags & 1 != 0 => (BarKind::Io, 4..=1 << 15),
        // The value 2 means a BAR below 1 MiB. The specification has dropped this kind, so it is handled like 0, a 32-bit BAR.
        0 | 2 => (BarKind::Memory32 { prefetchable }, 16..=1 << 31),
        4 if index < 5 => (BarKind::Memory64 { prefetchable }, 16..=1 << 52),
        _ => return None,
    };
    (size.is_power_of_two() && sizes.contains(&size)).then_some(Bar { index, kind, size })
}

fn emulate_header(layout: &mut FunctionLayout, line: Option<u8>) {
    let view = &mut layout.view;
    // Decoding stays on in the device, even if the guest turns decoding off. The memory slots also stay. If the device did not decode its
    // memory, a guest access through a slot would fault.
    let has = |io: bool| layout.bars.iter().any(|bar| (bar.kind == BarKind::Io) == io);
    let command = if has(true) { regs::COMMAND_IO } else { 0 } | if has(false) { regs::COMMAND_MEMORY } else { 0 };
    view.pin(regs::COMMAND, &command.to_le_bytes());
    view.emulate(regs::HEADER_TYPE, &[MULTIFUNCTION], &[0], &[]);
    view.fix(regs::CARDBUS_CIS, &[0; 4]);
    view.fix(regs::ROM_BAR, &[0; 4]);
    // On a PC, firmware writes the line number to this register, for drivers that do not read the ACPI tables.
    view.emulate(regs::INTERRUPT_LINE, &[0xff], &[line.unwrap_or(0)], &[0xff]);
    view.fix(regs::INTERRUPT_PIN, &[line.map_or(0, |_| INTA)]);
}

/// Returns the latest possible end of the capability at `offset`: the start of the next capability in configuration space, or `limit`.
fn end_of(offset: u16, list: &[FoundCapability], limit: u16) -> u16 {
    list.iter().map(|found| found.offset).filter(|other| *other > offset).min().unwrap_or(limit)
}

/// Links all guest-visible standard capabilities to one list.
fn link_standard(name: &str, layout: &mut FunctionLayout, host: &dyn HostFunction) {
    let list = capabilities::standard(host);
    let mut seen = Vec::new();
    for found in &list {
        let end = end_of(found.offset, &list, regs::EXTENDED);
        let visible = match u8::try_from(found.id) {
            Ok(regs::CAP_MSI) if layout.msi.is_none() => emulate_msi(layout, host, found.offset, end),
            Ok(regs::CAP_MSIX) if layout.msix.is_none() => emulate_msix(layout, host, found.offset, end),
            Ok(regs::CAP_MSI | regs::CAP_MSIX) => Err("has the same ID as an earlier capability".to_string()),
            Ok(regs::CAP_PM) => emulate_power(layout, found.offset, end),
            _ if found.id == CAP_ENHANCED_ALLOCATION => Err("contains fixed addresses of the host".to_string()),
            _ => Ok(()),
        };
        match visible {
            Ok(()) => seen.push(*found),
            Err(why) => {
                warn!(
                    "{name}: the guest does not see capability {:#x} at {:#x}, because the capability {why}",
                    found.id, found.offset
                );
                layout.view.fix(found.offset, &vec![0; usize::from(end - found.offset)]);
            }
        }
    }
    let view = &mut layout.view;
    let mut link = regs::CAPABILITIES;
    for found in &seen {
        view.fix(link, &[found.offset.to_le_bytes()[0]]);
        view.fix(found.offset, &[found.id.to_le_bytes()[0]]);
        link = found.offset + 1;
    }
    view.fix(link, &[0]);
    let has_list = if seen.is_empty() { 0 } else { regs::STATUS_CAPABILITIES };
    view.emulate(regs::STATUS, &regs::STATUS_CAPABILITIES.to_le_bytes(), &has_list.to_le_bytes(), &[]);
}

/// Emulates the power state. The guest may write the power state, but the device stays in D0. The capability reports that the device keeps
/// its registers when the guest leaves the state D3hot (No_Soft_Reset).
fn emulate_power(layout: &mut FunctionLayout, offset: u16, end: u16) -> Result<(), String> {
    const STATE: u8 = 3;
    const NO_SOFT_RESET: u8 = 8;
    if end - offset < 8 {
        return Err("is too short".to_string());
    }
    layout.view.emulate(offset + 4, &[STATE | NO_SOFT_RESET], &[NO_SOFT_RESET], &[STATE]);
    Ok(())
}

fn emulate_msi(layout: &mut FunctionLayout, host: &dyn HostFunction, offset: u16, end: u16) -> Result<(), String> {
    let control = word(host, offset + 2);
    let irqs = host.irq_count(IrqKind::Msi).min(32);
    let most = 1u32 << ((control >> 1) & 7).min(5);
    if irqs == 0 {
        return Err("has no vectors".to_string());
    }
    // Use the largest number of vectors, a power of two, that both the device and VFIO support.
    let exponent = most.min(irqs).ilog2();
    let msi = MsiCapability {
        offset,
        wide: control & regs::MSI_WIDE != 0,
        maskable: control & regs::MSI_MASKABLE != 0,
        vectors: 1 << exponent,
    };
    if end - offset < msi.len() {
        return Err("is too short".to_string());
    }
    let visible = (control & (regs::MSI_WIDE | regs::MSI_MASKABLE)) | u16::try_from(exponent << 1).unwrap_or(0);
    let mut value = vec![0; usize::from(msi.len() - 2)];
    value[..2].copy_from_slice(&visible.to_le_bytes());
    let mut writable = vec![0xff; value.len()];
    writable[..2].copy_from_slice(&(regs::MSI_ENABLE | regs::MSI_MULTIPLE_ENABLE).to_le_bytes());
    // Bits 1 and 0 of the address are read-only.
    writable[2] = 0xfc;
    if let Some(mask) = msi.mask() {
        // The pending bits, and the bytes between the data and the mask bits, are read-only.
        writable[usize::from(msi.data() + 2 - offset - 2)..usize::from(mask - offset - 2)].fill(0);
        writable[usize::from(mask + 4 - offset - 2)..].fill(0);
    }
    layout.view.emulate(offset + 2, &vec![0xff; value.len()], &value, &writable);
    layout.msi = Some(msi);
    Ok(())
}

fn emulate_msix(layout: &mut FunctionLayout, host: &dyn HostFunction, offset: u16, end: u16) -> Result<(), String> {
    if end - offset < 12 {
        return Err("is too short".to_string());
    }
    let vectors = (word(host, offset + 2) & regs::MSIX_TABLE_SIZE) + 1;
    let irqs = host.irq_count(IrqKind::Msix);
    if u32::from(vectors) > irqs {
        return Err(format!("has {vectors} vectors, but only {irqs} interrupts are available"));
    }
    let place = |register: u32, len: u64| {
        let [low, ..] = register.to_le_bytes();
        let (bar, start) = (low & 7, u64::from(register & !7));
        let fits = |b: &&Bar| b.index == bar && b.kind != BarKind::Io && start + len <= b.size;
        layout.bars.iter().find(fits).map(|_| BarRange { bar, range: start..start + len })
    };
    let table = dword(host, offset + 4);
    let pending = dword(host, offset + 8);
    let msix = MsixCapability {
        offset,
        vectors,
        table: place(table, u64::from(vectors) * ENTRY_SIZE).ok_or("has its table outside all memory BARs")?,
        pending: place(pending, u64::from(vectors).div_ceil(64) * 8)
            .ok_or("has its pending bits outside all memory BARs")?,
    };
    let mut value = [0; 10];
    value[..2].copy_from_slice(&(vectors - 1).to_le_bytes());
    value[2..6].copy_from_slice(&table.to_le_bytes());
    value[6..].copy_from_slice(&pending.to_le_bytes());
    let control = crate::pci::CONTROL_ENABLE | crate::pci::CONTROL_FUNCTION_MASK;
    layout.view.emulate(offset + 2, &[0xff; 10], &value, &control.to_le_bytes());
    layout.msix = Some(msix);
    Ok(())
}

/// Links all guest-visible extended capabilities to one list.
fn link_extended(layout: &mut FunctionLayout, host: &dyn HostFunction) {
    let view = &mut layout.view;
    if host.config_size() < u64::from(regs::CONFIG_SIZE) {
        view.fix(regs::EXTENDED, &vec![0; usize::from(regs::CONFIG_SIZE - regs::EXTENDED)]);
        return;
    }
    let list = capabilities::extended(host);
    let (hidden, seen): (Vec<&FoundCapability>, Vec<_>) =
        list.iter().partition(|found| HIDDEN_EXTENDED.contains(&found.id));
    for found in hidden {
        let end = end_of(found.offset, &list, regs::CONFIG_SIZE);
        view.fix(found.offset, &vec![0; usize::from(end - found.offset)]);
    }
    // The list starts at a fixed offset. If the capability at this offset is hidden, a null capability replaces it.
    let mut heads: Vec<(u16, u32)> =
        seen.iter().map(|found| (found.offset, u32::from(found.id) | (u32::from(found.version) << 16))).collect();
    if heads.first().is_none_or(|(offset, _)| *offset != regs::EXTENDED) {
        heads.insert(0, (regs::EXTENDED, 0));
    }
    for (at, (offset, head)) in heads.iter().enumerate() {
        let next = heads.get(at + 1).map_or(0, |(offset, _)| *offset);
        view.fix(*offset, &(head | (u32::from(next) << 20)).to_le_bytes());
    }
}
