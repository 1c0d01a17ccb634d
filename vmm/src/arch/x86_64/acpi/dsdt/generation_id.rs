// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The VM Generation ID device (Microsoft, "Virtual Machine Generation ID"), and the method that notifies this device. The method reads the
//! register of [`devices::acpi::generation_notice`].

use acpi_tables::aml::{
    Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, Local, Method, Name, OpRegion, OpRegionSpace,
    Package, Path, Store, ZERO,
};
use devices::acpi::generation_notice::REGISTER_LEN;

use super::notification::NotifyIfSet;
use super::{narrow, system_device};
use crate::arch::layout::{GENERATION_ID, GENERATION_ID_PORT};

/// Method that notifies the device if the ID is new.
pub(super) const LOOK: &str = "\\_SB_.VGEN.LOOK";
/// Notification: the ID is new.
const CHANGED: u8 = 0x80;

/// Writes the device.
pub(super) fn device(aml: &mut Vec<u8>) {
    // The first name is longer than ACPI allows, and the second name has the maximum length. Hyper-V reports both
    // names.
    let names = Package::new(vec![&"VM_Gen_Counter", &"VMGENCTR"]);
    let (low, high): (u32, u32) = (narrow(GENERATION_ID & 0xffff_ffff), narrow(GENERATION_ID >> 32));
    let (port, len): (u16, u8) = (narrow(GENERATION_ID_PORT), narrow(REGISTER_LEN));
    let register = Field::new(
        "REGS".into(),
        FieldAccessType::Byte,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        vec![FieldEntry::Named(*b"ISNW", 8)],
    );
    let (is_new, field) = (Local(0), Path::new("ISNW"));
    // Reading clears the register, so the method reads it once.
    let read = Store::new(&is_new, &field);
    let notify = NotifyIfSet { path: "\\_SB_.VGEN".into(), local: 0, bit: 0, event: CHANGED };
    system_device(
        "VGEN",
        vec![
            &Name::new("_HID".into(), &"CARO0001"),
            &Name::new("_CID".into(), &names),
            &Name::new("_DDN".into(), &"VM_Gen_Counter"),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("ADDR".into(), &Package::new(vec![&low, &high])),
            &OpRegion::new("REGS".into(), OpRegionSpace::SystemIO, &port, &len),
            &register,
            &Method::new("LOOK".into(), 0, true, vec![&read, &notify]),
        ],
        aml,
    );
}
