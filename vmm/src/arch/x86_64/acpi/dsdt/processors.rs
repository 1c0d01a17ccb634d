// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Hotplug of processors (ACPI 6.5, section 8.4): a device for each possible processor, and the methods that access
//! [`devices::acpi::cpu_hotplug`].

use acpi_tables::Aml;
use acpi_tables::aml::{
    Arg, BufferData, Device, EISAName, Equal, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, IO,
    If, Local, Method, MethodCall, Name, NotEqual, OpRegion, OpRegionSpace, Path, ResourceTemplate, Return, Store,
    ZERO,
};
use acpi_tables::madt::{EnabledStatus, ProcessorLocalApic};
use devices::acpi::cpu_hotplug::{CAME, EJECT, MAX_PROCESSORS, REFUSE, REGISTERS_LEN, TO_GO};

use super::notification::{DEVICE_CHECK, EJECT_REQUEST, NotifyIfSet};
use super::{bytes_of, narrow, system_device};
use crate::arch::layout::CPU_HOTPLUG_PORTS;

/// Method that notifies the processors of changes.
pub(super) const SCAN: &str = "\\_SB_.CHPC.SCAN";
/// Method that ejects the processor whose number is the argument.
const EJECTED: &str = "\\_SB_.CHPC.EJCT";
/// Method that receives the guest's status for an event of a processor. Arguments: number of the processor, event, status.
const STATUS: &str = "\\_SB_.CHPC.STAT";
/// Status (`_STA`) of a processor that is present, functions, and is shown in the user interface (ACPI 6.5, section 6.3.7).
const PRESENT: u8 = 0xf;
/// Status that the guest reports while an ejection is in progress (ACPI 6.5, section 6.3.5).
const IN_PROGRESS: u8 = 0x84;

fn name(number: u32) -> String {
    format!("C{number:03X}")
}

/// Returns the name of the field that is 1 if processor `number` is present.
fn is_there(number: u32) -> String {
    format!("P{number:03X}")
}

/// Writes the devices of the first `count` processors, and the methods that access the registers.
pub(super) fn processors(count: u32, aml: &mut Vec<u8>) {
    let all: Vec<Processor> = (0..count).map(Processor).collect();
    // Hardware ID of a processor container.
    let hid = Name::new("_HID".into(), &"ACPI0010");
    let mut container: Vec<&dyn Aml> = vec![&hid];
    container.extend(all.iter().map(|processor| processor as &dyn Aml));
    system_device("CPUS", container, aml);
    registers(count, aml);
}

fn registers(count: u32, aml: &mut Vec<u8>) {
    let (base, len): (u16, u8) = (narrow(CPU_HOTPLUG_PORTS), narrow(REGISTERS_LEN));
    let ports = IO::new(base, base, 1, len);
    let scan = scan(count);
    let (ejected, kept) = (Path::new("EJEC"), Path::new("KEPT"));
    // The method STAT ignores every event except an eject request. Any status except success and "in progress" means that the guest keeps
    // the processor.
    let (request, done, in_progress) = (EJECT_REQUEST, ZERO, IN_PROGRESS);
    let keep = Store::new(&kept, &Arg(0));
    let (not_done, not_in_progress) = (NotEqual::new(&Arg(2), &done), NotEqual::new(&Arg(2), &in_progress));
    let refused = If::new(&not_in_progress, vec![&keep]);
    let failed = If::new(&not_done, vec![&refused]);
    let is_request = Equal::new(&Arg(1), &request);
    system_device(
        "CHPC",
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0A06")),
            &Name::new("_UID".into(), &"processors"),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&ports])),
            &OpRegion::new("REGS".into(), OpRegionSpace::SystemIO, &base, &len),
            &Field::new(
                "REGS".into(),
                FieldAccessType::DWord,
                FieldLockRule::NoLock,
                FieldUpdateRule::WriteAsZeroes,
                fields(count),
            ),
            &Method::new("EJCT".into(), 1, true, vec![&Store::new(&ejected, &Arg(0))]),
            &Method::new("STAT".into(), 3, true, vec![&If::new(&is_request, vec![&failed])]),
            &Method::new("SCAN".into(), 0, true, scan.iter().map(|step| &**step).collect()),
        ],
        aml,
    );
}

fn words(count: u32) -> u32 {
    count.div_ceil(32)
}

/// Returns the name of a register field with the bits of 32 processors. `kind` is `C` for added processors, and `G` for processors to
/// eject.
fn word_name(kind: char, word: u32) -> String {
    format!("{kind}W{word:02}")
}

fn field(name: &str, bits: usize) -> FieldEntry {
    let name = name.as_bytes().first_chunk().unwrap_or_else(|| panic!("{name} must have four characters"));
    FieldEntry::Named(*name, bits)
}

fn fields(count: u32) -> Vec<FieldEntry> {
    let bits = |count: u32| usize::try_from(count).expect("a few");
    let mut fields: Vec<FieldEntry> = (0..count).map(|number| field(&is_there(number), 1)).collect();
    let mut used = count;
    for kind in ['C', 'G'] {
        // Skips the remaining bits of the previous registers, which belong to processors that this VM cannot have.
        fields.push(FieldEntry::Reserved(bits(MAX_PROCESSORS - used)));
        fields.extend((0..words(count)).map(|word| field(&word_name(kind, word), 32)));
        used = words(count) * 32;
    }
    fields.push(FieldEntry::Reserved(bits(MAX_PROCESSORS - used)));
    fields.retain(|field| !matches!(field, FieldEntry::Reserved(0)));
    fields.extend([field("EJEC", 32), field("KEPT", 32)]);
    fields
}

/// Returns the steps of the method SCAN. Reading clears a register, so each register is read once.
fn scan(count: u32) -> Vec<Box<dyn Aml>> {
    let mut steps: Vec<Box<dyn Aml>> = Vec::new();
    for word in 0..words(count) {
        for (local, kind) in [(0, 'C'), (1, 'G')] {
            steps.push(Box::new(Read { field: word_name(kind, word), local }));
        }
        for bit in 0..32u8 {
            let number = word * 32 + u32::from(bit);
            if number < count {
                let notify =
                    |local, event| NotifyIfSet { path: format!("\\_SB_.CPUS.{}", name(number)), local, bit, event };
                steps.push(Box::new(notify(0, DEVICE_CHECK)));
                steps.push(Box::new(notify(1, EJECT_REQUEST)));
            }
        }
    }
    steps
}

/// AML that reads a field into a local variable.
struct Read {
    field: String,
    local: u8,
}

impl Aml for Read {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        Store::new(&Local(self.local), &Path::new(&self.field)).to_aml_bytes(sink);
    }
}

/// Device of a processor.
struct Processor(u32);

impl Aml for Processor {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        let number = self.0;
        let id: u8 = narrow(number.into());
        let apic = BufferData::new(bytes_of(&ProcessorLocalApic::new(id, id, EnabledStatus::Enabled)));
        let there = Path::new(&format!("\\_SB_.CHPC.{}", is_there(number)));
        let ejected = MethodCall::new(EJECTED.into(), vec![&number]);
        let status = MethodCall::new(STATUS.into(), vec![&number, &Arg(0), &Arg(1)]);
        let (hid, uid) = (Name::new("_HID".into(), &"ACPI0007"), Name::new("_UID".into(), &number));
        let mat = Name::new("_MAT".into(), &apic);
        let present = Return::new(&PRESENT);
        let (if_there, absent) = (If::new(&there, vec![&present]), Return::new(&ZERO));
        let state = Method::new("_STA".into(), 0, true, vec![&if_there, &absent]);
        let eject = Method::new("_EJ0".into(), 1, true, vec![&ejected]);
        let ost = Method::new("_OST".into(), 3, true, vec![&status]);
        let mut children: Vec<&dyn Aml> = vec![&hid, &uid, &mat, &state];
        // The boot processor cannot be ejected.
        if number > 0 {
            children.extend([&eject as &dyn Aml, &ost]);
        }
        Device::new(name(number).as_str().into(), children).to_aml_bytes(sink);
    }
}

// Each register has a bit for every processor, and the registers have the offsets that `fields` assumes.
const _: () = {
    assert!(carom_api::limits::MAX_VCPUS <= MAX_PROCESSORS);
    assert!(CAME == MAX_PROCESSORS as u64 / 8 && TO_GO == 2 * CAME && EJECT == 3 * CAME && REFUSE == EJECT + 4);
};
