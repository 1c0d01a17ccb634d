// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI hotplug: a device object for each slot, and the methods that access [`devices::pci::HotplugRegisters`].

use acpi_tables::Aml;
use acpi_tables::aml::{
    Arg, Device, EISAName, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, IO, Local, Method,
    MethodCall, Name, ONE, OpRegion, OpRegionSpace, Path, ResourceTemplate, Scope, ShiftLeft, Store,
};
use devices::pci::HotplugRegisters;

use super::notification::{DEVICE_CHECK, EJECT_REQUEST, NotifyIfSet};
use super::{Bytes, TableConfig, bridge_name, narrow, system_device};
use crate::arch::layout::pci_hotplug_ports;
use crate::arch::segments;

/// Method that notifies the slots of changes.
pub(super) const SCAN: &str = "\\_SB_.PHPC.SCAN";

fn slot_name(slot: u8) -> String {
    format!("S{slot:03}")
}

/// Returns the name of a segment's object: `stem`, then the segment's number as a hexadecimal digit.
fn of_segment(stem: &str, segment: u16) -> String {
    format!("{stem}{segment:X}")
}

/// Returns the name of a segment's register: `stem`, then the segment's number as a hexadecimal digit.
fn field_name(stem: [u8; 3], segment: u16) -> [u8; 4] {
    let [first, second, third] = stem;
    let digit = char::from_digit(segment.into(), 16).map_or('_', |digit| digit.to_ascii_uppercase());
    [first, second, third, u8::try_from(digit).unwrap_or(b'_')]
}

/// Writes the hotplug slots of a segment's root bus. The slots need no `_STA`, because a device's configuration space shows whether the
/// device is present.
pub(super) fn slots(segment: u16, aml: &mut Vec<u8>) {
    let bridge = format!("\\_SB_.{}", bridge_name(segment));
    // Method that ejects the device in the slot whose number is the argument.
    let eject_method = format!("\\_SB_.PHPC.{}", of_segment("EJC", segment));
    for slot in segments::slots(segment) {
        let eject = MethodCall::new(eject_method.as_str().into(), vec![&slot]);
        // The number of a slot (`_SUN`) must be unique in the guest.
        let number = segment * 32 + u16::from(slot);
        Scope::new(
            bridge.as_str().into(),
            vec![&Device::new(
                slot_name(slot).as_str().into(),
                vec![
                    &Name::new("_ADR".into(), &(u32::from(slot) << 16)),
                    &Name::new("_SUN".into(), &number),
                    &Method::new("_EJ0".into(), 1, true, vec![&eject]),
                ],
            )],
        )
        .to_aml_bytes(aml);
    }
}

/// Writes the registers of all segments, and the methods that access these registers.
pub(super) fn registers(config: &TableConfig, aml: &mut Vec<u8>) {
    let len: u8 = narrow(HotplugRegisters::LEN);
    let segments = || (0..).zip(&config.segments).map(|(segment, _)| segment);
    let ports: Vec<IO> = segments()
        .map(|segment| {
            let base = narrow(pci_hotplug_ports(segment));
            IO::new(base, base, 1, len)
        })
        .collect();
    let resources = ResourceTemplate::new(ports.iter().map(|ports| ports as &dyn Aml).collect());
    let (mut parts, mut scan) = (Vec::new(), Vec::new());
    for segment in segments() {
        registers_of(segment, &mut parts);
        scan_of(segment, &mut scan);
    }
    system_device(
        "PHPC",
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0A06")),
            &Name::new("_UID".into(), &"PCI hot plug"),
            &Name::new("_CRS".into(), &resources),
            &Bytes(&parts),
            &Method::new("SCAN".into(), 0, true, vec![&Bytes(&scan)]),
        ],
        aml,
    );
}

/// Writes the registers of a segment, and the method that ejects a device.
fn registers_of(segment: u16, aml: &mut Vec<u8>) {
    let (base, len): (u16, u8) = (narrow(pci_hotplug_ports(segment)), narrow(HotplugRegisters::LEN));
    let region = of_segment("RGS", segment);
    let fields = [*b"CAM", *b"TGO", *b"EJE"].map(|stem| FieldEntry::Named(field_name(stem, segment), 32)).to_vec();
    OpRegion::new(region.as_str().into(), OpRegionSpace::SystemIO, &base, &len).to_aml_bytes(aml);
    Field::new(
        region.as_str().into(),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        fields,
    )
    .to_aml_bytes(aml);
    let gone = Path::new(&of_segment("EJE", segment));
    let eject = of_segment("EJC", segment);
    Method::new(eject.as_str().into(), 1, true, vec![&ShiftLeft::new(&gone, &ONE, &Arg(0))]).to_aml_bytes(aml);
}

/// Writes the part of the method SCAN that notifies the slots of a segment. The segment has a register for added devices, and a register
/// for devices to eject. The method reads each register only once, because reading a register clears it.
fn scan_of(segment: u16, aml: &mut Vec<u8>) {
    let (came, to_go) = (Path::new(&of_segment("CAM", segment)), Path::new(&of_segment("TGO", segment)));
    let (first, second) = (Local(0), Local(1));
    Store::new(&first, &came).to_aml_bytes(aml);
    Store::new(&second, &to_go).to_aml_bytes(aml);
    for slot in segments::slots(segment) {
        let path = || format!("\\_SB_.{}.{}", bridge_name(segment), slot_name(slot));
        let notify = |local, event| NotifyIfSet { path: path(), local, bit: slot, event };
        notify(0, DEVICE_CHECK).to_aml_bytes(aml);
        notify(1, EJECT_REQUEST).to_aml_bytes(aml);
    }
}
