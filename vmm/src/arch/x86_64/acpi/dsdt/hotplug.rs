// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Hot plug of PCI devices: a slot for each, and the methods that read and write [`devices::pci::HotplugRegisters`].

use acpi_tables::Aml;
use acpi_tables::aml::{
    Arg, Device, EISAName, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, IO, Local, Method,
    MethodCall, Name, ONE, OpRegion, OpRegionSpace, Path, ResourceTemplate, Scope, ShiftLeft, Store,
};
use devices::pci::HotplugRegisters;

use super::narrow;
use super::told::{DEVICE_CHECK, EJECT_REQUEST, Told};
use crate::arch::layout::{PCI_HOTPLUG_PORTS, PCI_SLOTS};

/// The method that tells the slots of what has changed.
pub(super) const SCAN: &str = "\\_SB_.PHPC.SCAN";
/// The method that lets go of the device in the slot of this number.
const EJECT: &str = "\\_SB_.PHPC.EJCT";

fn slot_name(slot: u8) -> String {
    format!("S{slot:03}")
}

/// The slots of the root bus that devices can come to and go from. There is no `_STA`: whether a device is there, its
/// configuration space tells.
pub(super) fn slots(aml: &mut Vec<u8>) {
    for slot in PCI_SLOTS {
        let eject = MethodCall::new(EJECT.into(), vec![&slot]);
        Scope::new(
            "\\_SB_.PCI0".into(),
            vec![&Device::new(
                slot_name(slot).as_str().into(),
                vec![
                    &Name::new("_ADR".into(), &(u32::from(slot) << 16)),
                    &Name::new("_SUN".into(), &slot),
                    &Method::new("_EJ0".into(), 1, true, vec![&eject]),
                ],
            )],
        )
        .to_aml_bytes(aml);
    }
}

/// The registers, and the methods on them.
pub(super) fn registers(aml: &mut Vec<u8>) {
    let (base, len): (u16, u8) = (narrow(PCI_HOTPLUG_PORTS), narrow(HotplugRegisters::LEN));
    let ports = IO::new(base, base, 1, len);
    let fields = [*b"CAME", *b"TOGO", *b"EJEC"].map(|name| FieldEntry::Named(name, 32)).to_vec();
    let (came, to_go, gone) = (Path::new("CAME"), Path::new("TOGO"), Path::new("EJEC"));
    let (first, second) = (Local(0), Local(1));
    let mut scan: Vec<Box<dyn Aml>> = Vec::new();
    for slot in PCI_SLOTS {
        let told = |local, event| Told { path: format!("\\_SB_.PCI0.{}", slot_name(slot)), local, bit: slot, event };
        scan.push(Box::new(told(0, DEVICE_CHECK)));
        scan.push(Box::new(told(1, EJECT_REQUEST)));
    }
    // Reading clears, so both are read once.
    let (read_came, read_to_go) = (Store::new(&first, &came), Store::new(&second, &to_go));
    let mut steps: Vec<&dyn Aml> = vec![&read_came, &read_to_go];
    steps.extend(scan.iter().map(|step| &**step));
    Scope::new(
        "_SB_".into(),
        vec![&Device::new(
            "PHPC".into(),
            vec![
                &Name::new("_HID".into(), &EISAName::new("PNP0A06")),
                &Name::new("_UID".into(), &"PCI hot plug"),
                &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&ports])),
                &OpRegion::new("REGS".into(), OpRegionSpace::SystemIO, &base, &len),
                &Field::new(
                    "REGS".into(),
                    FieldAccessType::DWord,
                    FieldLockRule::NoLock,
                    FieldUpdateRule::WriteAsZeroes,
                    fields,
                ),
                &Method::new("EJCT".into(), 1, true, vec![&ShiftLeft::new(&gone, &ONE, &Arg(0))]),
                &Method::new("SCAN".into(), 0, true, steps),
            ],
        )],
    )
    .to_aml_bytes(aml);
}
