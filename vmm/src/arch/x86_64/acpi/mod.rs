// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! ACPI tables, which describe the machine to the guest's kernel. The machine is hardware-reduced (ACPI 6.5, section 4.1): it has a sleep
//! and a reset register, and none of the legacy power hardware.

mod dsdt;
mod nodes;
mod viot;

use acpi_tables::Aml;
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use devices::acpi::power::{RESET_OFFSET, RESET_VALUE, SLEEP_CONTROL_OFFSET, SLEEP_STATUS_OFFSET};
use devices::pci::{BarWindows, PciAddress};
use devices::ram::Ram;
use std::ops::RangeInclusive;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::arch::layout::{
    ACPI_PORTS, ACPI_TABLES, ACPI_TABLES_END, IO_APIC, LOCAL_APIC, PCI_ECAM, PCI_ECAM_SIZE, RSDP,
};

pub use nodes::Nodes;

/// Manufacturer of the tables.
const OEM_ID: [u8; 6] = *b"CAROM ";
/// Name of the tables.
const OEM_TABLE_ID: [u8; 8] = *b"CAROMVM ";
/// Revision of the tables.
const OEM_REVISION: u32 = 1;

/// Boot architecture flag: the kernel must not use a CMOS clock (ACPI 6.5, section 5.2.9.3).
const NO_CMOS_CLOCK: u16 = 1 << 5;

/// VM-specific values of the tables.
#[derive(Clone, Debug)]
pub struct TableConfig {
    /// Number of vCPUs at boot. The numbers of vCPUs start at 0. A vCPU's number is also its APIC ID.
    pub vcpus: u32,
    /// Maximum number of vCPUs.
    pub max_vcpus: u32,
    /// Addresses of BARs, for each PCI segment.
    pub segments: Vec<BarWindows>,
    /// True if the guest boots firmware.
    pub firmware: bool,
    /// Address of the virtio-iommu, and the ranges of PCI functions behind it. The ranges include functions that may be added later.
    pub iommu: Option<(PciAddress, Vec<RangeInclusive<PciAddress>>)>,
    /// True if the VM has a first serial port.
    pub serial: bool,
    /// True if RAM can be added while the guest runs.
    pub memory_devices: bool,
    /// True if the guest has a VM Generation ID.
    pub generation_id: bool,
    /// NUMA nodes, if the configuration has any.
    pub nodes: Option<Nodes>,
}

impl TableConfig {
    /// True if vCPUs can be added and removed while the guest runs. This is possible if the maximum number of vCPUs is above 1.
    pub fn processors_change(&self) -> bool {
        self.max_vcpus > 1
    }
}

/// Writes all tables to guest memory. Returns the address of the root pointer (RSDP).
pub fn write(memory: &Ram, config: &TableConfig) -> Result<u64, GuestMemoryError> {
    let Tables { rsdp, rest } = build(config, ACPI_TABLES);
    assert!(
        ACPI_TABLES + rest.len() as u64 <= ACPI_TABLES_END,
        "the tables of 254 vCPUs, 16 segments and 16 nodes must fit in 128 KiB"
    );
    memory.write_slice(&rest, GuestAddress(ACPI_TABLES))?;
    memory.write_slice(&rsdp, GuestAddress(RSDP))?;
    Ok(RSDP)
}

/// Encoded tables.
struct Tables {
    /// Root pointer (RSDP), which has an address of its own.
    rsdp: Vec<u8>,
    /// All other tables, one after the other.
    rest: Vec<u8>,
}

/// Builds all tables. The addresses in the tables assume that all tables except the root pointer are written from `base` on.
fn build(config: &TableConfig, base: u64) -> Tables {
    let mut rest = Vec::new();
    let mut place = |table: &dyn Aml| {
        let address = base + rest.len() as u64;
        table.to_aml_bytes(&mut rest);
        rest.resize(rest.len().next_multiple_of(16), 0);
        address
    };
    let dsdt = place(&definition_block(config));
    let fadt = place(&fadt(dsdt));
    let mut entries = vec![fadt, place(&madt(config)), place(&mcfg(config))];
    if let Some((iommu, endpoints)) = &config.iommu {
        entries.push(place(&viot::build(*iommu, endpoints)));
    }
    if let Some(nodes) = &config.nodes {
        entries.extend([place(&nodes.srat()), place(&nodes.slit())]);
    }
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    entries.into_iter().for_each(|entry| xsdt.add_entry(entry));
    let xsdt = place(&xsdt);
    let mut rsdp = Vec::new();
    Rsdp::new(OEM_ID, xsdt).to_aml_bytes(&mut rsdp);
    Tables { rsdp, rest }
}

fn definition_block(config: &TableConfig) -> Sdt {
    // 36 bytes: the common table header.
    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    dsdt.append_slice(&dsdt::build(config));
    dsdt
}

fn fadt(dsdt: u64) -> impl Aml {
    let register = |offset| {
        let address = ACPI_PORTS + offset;
        GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, address)
    };
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Wbinvd)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.reset_reg = register(RESET_OFFSET);
    fadt.reset_value = RESET_VALUE;
    // Only firmware uses the CMOS clock. A kernel uses KVM's clock, which has a finer resolution. Without this flag, a kernel in a VM with
    // firmware would wait for interrupts of the CMOS clock, which never arrive. In a VM without firmware, a distribution kernel would look
    // for the missing CMOS clock for seconds.
    fadt.iapc_boot_arch = NO_CMOS_CLOCK.into();
    fadt.sleep_control_reg = register(SLEEP_CONTROL_OFFSET);
    fadt.sleep_status_reg = register(SLEEP_STATUS_OFFSET);
    fadt.finalize()
}

fn madt(config: &TableConfig) -> MADT {
    let mut madt = MADT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION, LocalInterruptController::Address(LOCAL_APIC));
    for id in 0..config.max_vcpus {
        // The guest reserves space only for vCPUs that are listed here, so the list includes vCPUs that may be added later.
        let status = if id < config.vcpus { EnabledStatus::Enabled } else { EnabledStatus::DisabledOnlineCapable };
        let id = u8::try_from(id).expect("at most 254 vCPUs");
        madt.add_structure(ProcessorLocalApic::new(id, id, status));
    }
    madt.add_structure(IoApic::new(0, IO_APIC, 0));
    madt
}

fn mcfg(config: &TableConfig) -> MCFG {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for (segment, _) in (0..).zip(&config.segments) {
        mcfg.add_ecam(PCI_ECAM + u64::from(segment) * PCI_ECAM_SIZE, segment, 0, 0);
    }
    mcfg
}

#[cfg(test)]
mod tests {
    use carom_api::config::NumaConfig;
    use carom_api::limits::MAX_PCI_SEGMENTS;

    use super::*;
    use crate::arch::segments::windows;

    fn config() -> TableConfig {
        TableConfig {
            vcpus: 2,
            max_vcpus: 2,
            segments: segments(1),
            firmware: false,
            iommu: Some((PciAddress::on_root_bus(1), vec![PciAddress::on_root_bus(2)..=PciAddress::on_root_bus(17)])),
            serial: true,
            memory_devices: false,
            generation_id: true,
            nodes: None,
        }
    }

    /// Returns the largest set of nodes: 16 nodes, of a machine with 254 vCPUs and 32 zones.
    fn most_nodes() -> Option<Nodes> {
        let mut config = carom_api::VmConfig::default();
        config.memory.zones = (0..32).map(|id| format!("id=z{id},size=512M").parse().unwrap()).collect();
        let node = |id: u32| {
            let cpus = (0..254).filter(|cpu| cpu % 16 == id).collect();
            let memory_zones = vec![format!("z{id}"), format!("z{}", id + 16)];
            NumaConfig { guest_numa_id: id, cpus, memory_zones, ..NumaConfig::default() }
        };
        config.numa = (0..16).map(node).collect();
        Nodes::of(&config)
    }

    fn segments(count: u16) -> Vec<BarWindows> {
        let mut config = carom_api::VmConfig::default();
        config.platform.num_pci_segments = count;
        windows(&config, &(0x40_0000_0000..=0x7f_ffff_ffff))
    }

    fn u64_at(image: &[u8], offset: usize) -> u64 {
        u64::from_le_bytes(image[offset..offset + 8].try_into().unwrap())
    }

    fn table(image: &[u8], address: u64) -> &[u8] {
        let start = usize::try_from(address).unwrap();
        let len = u32::from_le_bytes(image[start + 4..start + 8].try_into().unwrap()) as usize;
        &image[start..start + len]
    }

    #[test]
    fn every_table_is_reached_from_the_root_and_sums_to_zero() {
        let Tables { rsdp, rest: image } = build(&config(), 0);
        assert_eq!(&rsdp[..8], b"RSD PTR ");
        let xsdt = table(&image, u64_at(&rsdp, 24));
        let entries: Vec<_> = xsdt[36..].chunks(8).map(|entry| u64_at(entry, 0)).collect();
        let mut names = Vec::new();
        for entry in entries {
            let table = table(&image, entry);
            names.push(String::from_utf8_lossy(&table[..4]).into_owned());
            assert_eq!(table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0, "{names:?}");
        }
        assert_eq!(names, ["FACP", "APIC", "MCFG", "VIOT"]);
        let fadt = table(&image, u64_at(xsdt, 36));
        let dsdt = table(&image, u64_at(fadt, 140));
        assert_eq!(&dsdt[..4], b"DSDT");
        assert_eq!(dsdt.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
    }

    #[test]
    fn tables_report_no_cmos_clock_to_the_kernel() {
        for firmware in [false, true] {
            let image = build(&TableConfig { firmware, ..config() }, 0).rest;
            let start = image.windows(4).position(|window| window == b"FACP").unwrap();
            let fadt = table(&image, start as u64);
            // Fields of the FADT: the boot flags, and the port of the ACPI timer. The port is 0, so that the kernel does not use this
            // timer.
            assert_eq!((u16::from_le_bytes([fadt[109], fadt[110]]), &fadt[76..80]), (1 << 5, &[0; 4][..]));
        }
    }

    #[test]
    fn segment_0_bridge_covers_the_hole_however_it_is_divided() {
        for firmware in [false, true] {
            let mut vm = carom_api::VmConfig::default();
            vm.payload.firmware = firmware.then(|| "/f".into());
            let segments = windows(&vm, &(0x40_0000_0000..=0x7f_ffff_ffff));
            let image = build(&TableConfig { firmware, segments, ..config() }, 0).rest;
            // A 32-bit memory descriptor contains the lowest and the highest address.
            let whole = [0xc000_0000u32, 0xf7ff_ffff].map(u32::to_le_bytes).concat();
            assert!(image.windows(8).any(|window| window == whole), "{firmware}");
        }
    }

    #[test]
    fn each_segment_has_its_ecam_and_host_bridge() {
        let build = |count| build(&TableConfig { segments: segments(count), ..config() }, 0).rest;
        let has = |image: &[u8], name: &[u8]| image.windows(name.len()).any(|window| window == name);
        let (one, three) = (build(1), build(3));
        assert!(has(&one, b"PCI0") && !has(&one, b"PCI1"));
        assert!(has(&three, b"PCI2") && !has(&three, b"PCI3"));
        let start = three.windows(4).position(|window| window == b"MCFG").unwrap();
        let mcfg = table(&three, start as u64);
        // Entries after 44 bytes of header. Each entry has a base, a segment, the first and last bus, and four reserved bytes.
        let entries: Vec<_> = mcfg[44..].chunks(16).map(|entry| (u64_at(entry, 0), entry[8])).collect();
        assert_eq!(entries, [(0xf800_0000, 0), (0xf810_0000, 1), (0xf820_0000, 2)]);
        // The last segment has hotplug slots and registers.
        assert!(has(&three, b"_SB_PCI2") && has(&three, b"CAM2") && !has(&three, b"CAM3"));
    }

    #[test]
    fn first_pin_of_each_slot_has_a_shared_level_active_high_line() {
        let image = build(&TableConfig { segments: segments(2), ..config() }, 0).rest;
        let has = |bytes: &[u8]| image.windows(bytes.len()).any(|window| window == bytes);
        for irq in 20..24u8 {
            // ACPI interrupt descriptor: length, flags "consumer" and "shared", one number.
            assert!(has(&[0x89, 6, 0, 0x09, 1, irq, 0, 0, 0]), "{irq}");
        }
        // A route consists of the slot with any function, the pin, the path of the link device, and an index.
        let route = |slot: u8, link: &[u8]| {
            let route = [&[0x0c, 0xff, 0xff, slot, 0, 0][..], b"\\\x2e_SB_", link, &[0]].concat();
            image.windows(route.len()).filter(|window| *window == route).count()
        };
        // Slot N of segment 1 uses the same line as slot N + 1 of segment 0.
        assert_eq!((route(2, b"LNK2"), route(2, b"LNK3"), route(2, b"LNK0")), (1, 1, 0));
        assert_eq!((route(31, b"LNK3"), route(31, b"LNK0"), route(0, b"LNK0"), route(1, b"LNK2")), (1, 1, 0, 1));
        assert_eq!(image.windows(4).filter(|window| *window == b"_PRT").count(), 2);
    }

    #[test]
    fn machine_with_hotpluggable_ram_has_memory_devices() {
        let has = |memory_devices| {
            let image = build(&TableConfig { memory_devices, ..config() }, 0).rest;
            ["MHPC", "M000", "M031"].map(|name| image.windows(4).any(|window| window == name.as_bytes()))
        };
        assert_eq!((has(false), has(true)), ([false; 3], [true; 3]));
    }

    #[test]
    fn generation_id_is_described_with_its_address_and_names() {
        let image = |generation_id| build(&TableConfig { generation_id, ..config() }, 0).rest;
        let has = |image: &[u8], bytes: &[u8]| image.windows(bytes.len()).any(|window| window == bytes);
        let (with, without) = (image(true), image(false));
        // ADDR is a package of two numbers: 0xf1000 and 0.
        let address = b"ADDR\x12\x08\x02\x0c\x00\x10\x0f\x00\x00";
        for bytes in [&address[..], b"\x0dVM_Gen_Counter\0", b"\x0dVMGENCTR\0"] {
            assert_eq!((has(&with, bytes), has(&without, bytes)), (true, false), "{bytes:x?}");
        }
        // The event device compares the interrupt with 19, and calls the method.
        let event = b"\x93\x68\x0a\x13\\\x2f\x03_SB_VGENLOOK";
        assert_eq!((has(&with, event), has(&without, b"VGEN")), (true, false));
    }

    #[test]
    fn hotpluggable_processors_are_in_the_tables_at_boot() {
        let image = build(&TableConfig { vcpus: 2, max_vcpus: 35, ..config() }, 0).rest;
        let start = image.windows(4).position(|window| window == b"APIC").unwrap();
        // Entries after 44 bytes of header. Each entry has a type, a length, a UID, an APIC ID and flags.
        let entries = table(&image, start as u64)[44..].chunks(8).take(35).map(|entry| (entry[0], entry[3], entry[4]));
        let wanted = (0..35).map(|id| (0, id, if id < 2 { 1 } else { 2 }));
        assert_eq!(entries.collect::<Vec<_>>(), wanted.collect::<Vec<_>>());
        let has = |image: &[u8], name: &str| image.windows(4).any(|window| window == name.as_bytes());
        assert_eq!(
            ["C000", "C022", "P022", "GW01", "C023"].map(|name| has(&image, name)),
            [true, true, true, true, false]
        );
        let one = build(&TableConfig { vcpus: 1, max_vcpus: 1, ..config() }, 0).rest;
        assert!(!has(&one, "CHPC") && !has(&one, "C000"));
    }

    #[test]
    fn numa_nodes_are_in_tables_and_at_their_host_bridges() {
        let numa = vec!["guest_numa_id=5,pci_segments=1".parse().unwrap()];
        let vm = carom_api::VmConfig { numa, ..carom_api::VmConfig::default() };
        let image = build(&TableConfig { nodes: Nodes::of(&vm), segments: segments(2), ..config() }, 0).rest;
        let has = |bytes: &[u8]| image.windows(bytes.len()).filter(|window| *window == bytes).count();
        assert_eq!((has(b"SRAT"), has(b"SLIT"), has(b"_PXM"), has(b"_PXM\x0a\x05")), (1, 1, 1, 1));
        let without = build(&config(), 0).rest;
        assert!(!without.windows(4).any(|window| [b"SRAT", b"SLIT", b"_PXM"].iter().any(|name| window == *name)));
    }

    #[test]
    fn machine_without_iommu_has_no_viot() {
        let image = build(&TableConfig { iommu: None, ..config() }, 0).rest;
        assert!(!image.windows(4).any(|window| window == b"VIOT"));
    }

    #[test]
    fn tables_of_the_largest_machine_fit() {
        // A machine with NUMA nodes has zones. Because RAM cannot be added to a machine with zones, such a machine has no memory devices.
        for nodes in [None, most_nodes()] {
            let (segments, memory_devices) = (segments(MAX_PCI_SEGMENTS), nodes.is_none());
            let largest = TableConfig { vcpus: 1, max_vcpus: 254, segments, memory_devices, nodes, ..config() };
            let (len, room) = (build(&largest, ACPI_TABLES).rest.len() as u64, ACPI_TABLES_END - ACPI_TABLES);
            assert!(len <= room, "{len:#x} bytes do not fit in {room:#x}; memory devices: {memory_devices}");
        }
    }
}
