// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! RAM that is added while the guest runs: memory devices (ACPI 6.5, section 9.11), and the method that notifies these devices. The method
//! reads the registers of [`devices::acpi::memory_devices`].

use acpi_tables::Aml;
use acpi_tables::aml::{
    Add, AddressSpace, AddressSpaceCacheable, CreateQWordField, EISAName, Field, FieldAccessType, FieldEntry,
    FieldLockRule, FieldUpdateRule, IO, If, Local, Method, Name, ONE, OpRegion, OpRegionSpace, Path, ResourceTemplate,
    Return, Store, Subtract, ZERO,
};
use devices::acpi::memory_devices::{CAME, DEVICE_LEN, MAX_MEMORY_DEVICES, REGISTERS_LEN};

use super::notification::{DEVICE_CHECK, NotifyIfSet};
use super::{narrow, system_device};
use crate::arch::layout::MEMORY_DEVICE_PORTS;

/// Method that notifies the memory devices of added RAM.
pub(super) const SCAN: &str = "\\_SB_.MHPC.SCAN";
/// Status (`_STA`) of a device that is present, functions, and is shown in the user interface (ACPI 6.5, section 6.3.7).
const PRESENT: u8 = 0xf;
/// Offsets of the first address, last address and length in a 64-bit address space descriptor (ACPI 6.5, section
/// 6.4.3.5.1).
const FIRST: u8 = 14;
const LAST: u8 = 22;
const LENGTH: u8 = 38;

fn name(number: u32) -> String {
    format!("M{number:03}")
}

/// Writes the memory devices, and the device MHPC, which has the method that notifies the memory devices. MHPC owns the register ports of
/// all memory devices.
pub(super) fn devices(aml: &mut Vec<u8>) {
    let count = u32::try_from(MAX_MEMORY_DEVICES).expect("a few");
    (0..count).for_each(|number| device(number, aml));
    let base: u16 = narrow(MEMORY_DEVICE_PORTS);
    let came_at: u16 = narrow(MEMORY_DEVICE_PORTS + CAME);
    // The ports are divided among several port descriptors, because one descriptor covers at most 255 ports.
    let half: u16 = narrow(CAME / 4);
    let parts: Vec<IO> =
        (0..4u16).map(|part| base + part * half).map(|at| IO::new(at, at, 1, narrow(CAME / 4))).collect();
    let last = IO::new(came_at, came_at, 1, narrow(REGISTERS_LEN - CAME));
    let mut ports: Vec<&dyn Aml> = parts.iter().map(|part| part as &dyn Aml).collect();
    ports.push(&last);
    let (came, added) = (Path::new("CAME"), Local(0));
    let notices: Vec<NotifyIfSet> = (0..count)
        .map(|number| NotifyIfSet {
            path: format!("\\_SB_.{}", name(number)),
            local: 0,
            bit: narrow(number.into()),
            event: DEVICE_CHECK,
        })
        .collect();
    // Reading clears the register, so the method reads it once.
    let read = Store::new(&added, &came);
    let mut steps: Vec<&dyn Aml> = vec![&read];
    steps.extend(notices.iter().map(|notice| notice as &dyn Aml));
    system_device(
        "MHPC",
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0A06")),
            &Name::new("_UID".into(), &"memory devices"),
            &Name::new("_CRS".into(), &ResourceTemplate::new(ports)),
            &OpRegion::new("REGS".into(), OpRegionSpace::SystemIO, &came_at, &4u8),
            &fields(&[*b"CAME"]),
            &Method::new("SCAN".into(), 0, true, steps),
        ],
        aml,
    );
}

fn fields(names: &[[u8; 4]]) -> Field {
    Field::new(
        "REGS".into(),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        names.iter().map(|name| FieldEntry::Named(*name, if name == b"CAME" { 32 } else { 64 })).collect(),
    )
}

/// Writes one memory device. The device's registers contain its address and size. A device of size 0 is absent.
fn device(number: u32, aml: &mut Vec<u8>) {
    let base: u16 = narrow(MEMORY_DEVICE_PORTS + DEVICE_LEN * u64::from(number));
    let (address, length) = (Path::new("ADDR"), Path::new("SIZE"));
    let (first, last, bytes) = (Path::new("RMIN"), Path::new("RMAX"), Path::new("RLEN"));
    // The method `_CRS` fills in this descriptor and returns it.
    let range: AddressSpace<u64> = AddressSpace::new_memory(AddressSpaceCacheable::Cacheable, true, 0, 1, None);
    let buffer = Path::new("RANG");
    let sum = Local(0);
    system_device(
        &name(number),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0C80")),
            &Name::new("_UID".into(), &number),
            &OpRegion::new("REGS".into(), OpRegionSpace::SystemIO, &base, &narrow::<u8>(DEVICE_LEN)),
            &fields(&[*b"ADDR", *b"SIZE"]),
            &Method::new(
                "_STA".into(),
                0,
                true,
                vec![&If::new(&length, vec![&Return::new(&PRESENT)]), &Return::new(&ZERO)],
            ),
            &Method::new(
                "_CRS".into(),
                0,
                true,
                vec![
                    &Name::new("RANG".into(), &ResourceTemplate::new(vec![&range])),
                    &CreateQWordField::new(&first, &buffer, &FIRST),
                    &CreateQWordField::new(&last, &buffer, &LAST),
                    &CreateQWordField::new(&bytes, &buffer, &LENGTH),
                    &Store::new(&first, &address),
                    &Store::new(&bytes, &length),
                    &Add::new(&sum, &address, &length),
                    &Subtract::new(&last, &sum, &ONE),
                    &Return::new(&buffer),
                ],
            ),
        ],
        aml,
    );
}
