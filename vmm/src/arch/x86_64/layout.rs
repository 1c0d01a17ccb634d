// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest-physical address map.
//!
//! ```text
//! 0            RAM, with boot data structures in its first MiB
//! 0xc000_0000  32-bit PCI hole: bounce-window aperture (IOVA only), then 32-bit BARs; with firmware the BARs come first
//! 0xf800_0000  ECAM of bus 0 of each segment
//! 0xfec0_0000  I/O APIC, local APICs (MSI), KVM's own pages
//! 4 GiB        the rest of RAM
//! above        64-bit BARs
//! ```

use std::ops::RangeInclusive;

use carom_api::config::{MemoryConfig, MemoryZoneConfig};
use carom_api::limits;
pub use carom_api::limits::{GIB, MIB};

/// Global descriptor table of the boot processor.
pub const BOOT_GDT: u64 = 0x500;
/// Address of the boot processor's interrupt descriptor table, which is empty.
pub const BOOT_IDT: u64 = 0x520;
/// PVH `hvm_start_info`. Its modules and memory map follow.
pub const PVH_START_INFO: u64 = 0x6000;
/// PVH list of modules.
pub const PVH_MODULES: u64 = 0x6040;
/// PVH memory map.
pub const PVH_MEMORY_MAP: u64 = 0x6100;
/// Linux `boot_params` (the "zero page").
pub const ZERO_PAGE: u64 = 0x7000;
/// Stack of the boot processor, growing down.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Top-level page table of the boot processor. The next two pages contain the lower levels.
pub const BOOT_PML4: u64 = 0x9000;
/// Kernel command line, with room for [`limits::CMDLINE_MAX`] bytes.
pub const CMDLINE: u64 = 0x2_0000;
/// End of conventional memory. The legacy VGA and BIOS areas follow.
pub const LOW_RAM_END: u64 = 0xa_0000;
/// SMBIOS tables. Their area ends at the ACPI tables.
pub const SMBIOS_TABLES: u64 = 0xc_0000;
/// End of the area for SMBIOS tables.
pub const SMBIOS_TABLES_END: u64 = ACPI_TABLES;
/// ACPI tables except the RSDP.
pub const ACPI_TABLES: u64 = 0xd_0000;
/// End of the area for ACPI tables.
pub const ACPI_TABLES_END: u64 = 0xf_0000;
/// SMBIOS entry point. EDK2 expects it at exactly this address (`OvmfPkg/Include/IndustryStandard/CloudHv.h`). A kernel that is booted
/// without firmware searches for it from this address on.
pub const SMBIOS_ENTRY: u64 = 0xf_0000;
/// ACPI's root pointer (RSDP), on a 16-byte boundary. It is in the range that a kernel searches if the kernel is booted without firmware.
pub const RSDP: u64 = 0xf_0040;
/// Target of a real-mode jump to the firmware's entry (0xf000:0xfff0).
pub const RESET_VECTOR: u64 = 0xf_fff0;
/// Lowest address for loading kernels.
pub const HIGH_RAM_START: u64 = 0x10_0000;

/// End of RAM below 4 GiB, where the 32-bit PCI hole starts.
pub const LOW_MEMORY_END: u64 = limits::LOW_MEMORY;
/// Start of RAM above 4 GiB.
pub const HIGH_MEMORY_START: u64 = 4 * GIB;

/// Division of the 32-bit PCI hole below ECAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciHole {
    /// IOVA aperture of bounce windows. It lies in the PCI hole, where the guest's DMA layer never allocates IOVAs, so no mapping's IOVA
    /// can fall into it. The aperture also contains no BAR.
    pub aperture: RangeInclusive<u64>,
    /// Addresses for the 32-bit BARs of all segments.
    pub mem32: RangeInclusive<u64>,
}

/// Hole of a VM that boots a kernel.
const HOLE_OF_KERNEL: PciHole = PciHole { aperture: 0xc000_0000..=0xdfff_ffff, mem32: 0xe000_0000..=0xf7ff_ffff };
/// Hole of a VM that boots firmware. The BARs come first, because firmware ignores ACPI and assigns BARs from the start of the hole
/// upwards.
const HOLE_OF_FIRMWARE: PciHole = PciHole { aperture: 0xd800_0000..=0xf7ff_ffff, mem32: 0xc000_0000..=0xd7ff_ffff };

impl PciHole {
    /// Returns the hole of a VM. `firmware` is true if the VM boots firmware, and false if it boots a kernel.
    pub fn of(firmware: bool) -> Self {
        if firmware { HOLE_OF_FIRMWARE } else { HOLE_OF_KERNEL }
    }
}

/// Ports for the I/O BARs of all segments.
pub const PCI_IO: RangeInclusive<u64> = 0x1000..=0xffff;
/// ECAM of segment 0, bus 0 only. The ECAM of the other segments follows.
pub const PCI_ECAM: u64 = 0xf800_0000;
/// Bytes of ECAM for one bus.
pub const PCI_ECAM_SIZE: u64 = MIB;
/// Bytes of ECAM for the maximum number of segments.
pub const PCI_ECAM_MAX_SIZE: u64 = PCI_ECAM_SIZE * limits::MAX_PCI_SEGMENTS as u64;
/// Number of the last slot for devices. On segment 0, pvpanic is in this slot, and the watchdog is in the previous slot. In a VM without
/// pvpanic, the watchdog is in this slot.
pub const LAST_SLOT: u8 = 31;
/// Legacy PCI configuration ports.
pub const PCI_CONFIG_PORTS: RangeInclusive<u64> = 0xcf8..=0xcff;

/// I/O APIC.
pub const IO_APIC: u32 = 0xfec0_0000;
/// Local APIC of each CPU.
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// MSI doorbells, which the virtio-iommu reports as the MSI window.
pub const MSI_WINDOW: RangeInclusive<u64> = 0xfee0_0000..=0xfeef_ffff;
/// Three pages that KVM needs on Intel hosts for real-mode emulation.
pub const KVM_TSS: usize = 0xfffb_d000;
/// One page that KVM needs on Intel hosts, for an identity-mapped page table.
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;

/// System control port B.
pub const CONTROL_PORT: u64 = 0x61;
/// Command port of the keyboard controller, which can reset the machine.
pub const KEYBOARD_COMMAND_PORT: u64 = 0x64;
/// CMOS, in a VM with firmware.
pub const CMOS_PORTS: u64 = 0x70;
/// First COM port.
pub const SERIAL_PORT: u64 = 0x3f8;
/// Interrupt line of the first COM port.
pub const SERIAL_IRQ: u32 = 4;
/// Interrupt line of ACPI events: the power button.
pub const ACPI_EVENT_IRQ: u32 = 5;
/// Interrupt line of PCI hotplug, level-triggered. It is above the ISA lines (0 to 15), because guests assume that ISA lines are
/// edge-triggered.
pub const PCI_HOTPLUG_IRQ: u32 = 16;
/// PCI hotplug registers of segment 0.
const PCI_HOTPLUG_PORTS: u64 = 0x610;
/// PCI hotplug registers of the other segments.
const PCI_HOTPLUG_PORTS_OF_OTHERS: u64 = 0xc00;
/// Distance in ports between the registers of two segments.
const PCI_HOTPLUG_STRIDE: u64 = 16;
/// Registers of processor hotplug.
pub const CPU_HOTPLUG_PORTS: u64 = 0x620;
/// Interrupt line of processor hotplug, level-triggered.
pub const CPU_HOTPLUG_IRQ: u32 = 18;
/// Registers of memory devices.
pub const MEMORY_DEVICE_PORTS: u64 = 0x700;
/// Interrupt line of memory devices, level-triggered.
pub const MEMORY_DEVICE_IRQ: u32 = 17;
/// Granularity of addresses and sizes of memory devices: the smallest unit that Linux adds (`memory_block_size_bytes()`).
pub const MEMORY_DEVICE_GRANULE: u64 = limits::HOTPLUG_GRANULE;
/// Address of the page that contains the VM Generation ID. The memory map reserves this page. The page lies above the SMBIOS entry point
/// and the RSDP, because guests search for these structures from 0xf0000 on.
pub const GENERATION_ID: u64 = 0xf_1000;
/// Register that reports a new VM Generation ID.
pub const GENERATION_ID_PORT: u64 = 0x60c;
/// Interrupt line of the VM Generation ID, level-triggered.
pub const GENERATION_ID_IRQ: u32 = 19;
/// ACPI sleep control, sleep status and reset registers, a byte each.
pub const ACPI_PORTS: u64 = 0x600;
/// ACPI's power management timer, in a VM with firmware. EDK2 expects it at this port (`OvmfPkg/Include/IndustryStandard/CloudHv.h`).
pub const PM_TIMER_PORTS: u64 = 0x608;
/// Interrupt lines of PCI INTx, level-triggered. Each line is shared by a quarter of the slots.
pub const INTX_IRQS: RangeInclusive<u32> = 20..=23;
/// Number of interrupt lines of the I/O APIC. This is also the number (GSI) of the first message-signalled interrupt.
pub const FIRST_MSI_GSI: u32 = 24;

/// Size of a page of guest and host.
pub const PAGE_SIZE: u64 = 4096;

/// Returns the PCI hotplug registers of a segment.
pub const fn pci_hotplug_ports(segment: u16) -> u64 {
    match segment {
        0 => PCI_HOTPLUG_PORTS,
        _ => PCI_HOTPLUG_PORTS_OF_OTHERS + (segment as u64 - 1) * PCI_HOTPLUG_STRIDE,
    }
}

/// Returns the ranges of RAM as (guest-physical address, bytes), for `size` bytes in total.
pub fn ram_ranges(size: u64) -> Vec<(u64, u64)> {
    let low = size.min(LOW_MEMORY_END);
    let mut ranges = vec![(0, low)];
    if size > low {
        ranges.push((HIGH_MEMORY_START, size - low));
    }
    ranges
}

/// Returns the first address that is above both the 32-bit hole and RAM of `size` bytes.
pub fn ram_end(size: u64) -> u64 {
    HIGH_MEMORY_START + size.saturating_sub(LOW_MEMORY_END)
}

/// Returns the zones of RAM, each with its ranges as (guest-physical address, bytes), in the order of addresses.
pub fn zone_ranges(config: &MemoryConfig) -> Vec<(MemoryZoneConfig, Vec<(u64, u64)>)> {
    let zones = config.all_zones();
    let places = MemoryZoneConfig::places(&zones, LOW_MEMORY_END..HIGH_MEMORY_START);
    zones.into_iter().zip(places).collect()
}

/// Returns the ranges of all RAM at boot, as (guest-physical address, bytes).
pub fn boot_ram(config: &MemoryConfig) -> Vec<(u64, u64)> {
    zone_ranges(config).into_iter().flat_map(|(_, ranges)| ranges).collect()
}

const fn len(range: &RangeInclusive<u64>) -> u64 {
    *range.end() - *range.start() + 1
}

// A validated configuration fits into this map.
const _: () = {
    assert!(CMDLINE + limits::CMDLINE_MAX as u64 <= LOW_RAM_END);
    // All RAM lies in the lower half of the 1 TiB that 40-bit addresses cover. The upper half is for BARs.
    assert!(limits::MAX_MEMORY <= 512 * GIB && LOW_MEMORY_END < limits::MAX_MEMORY);
    // The configuration's limit on RAM leaves addresses for the hole below 4 GiB, and 1 GiB for BARs (`mem64` in `vm/base.rs`).
    assert!(limits::ROOM_BESIDE_RAM == HIGH_MEMORY_START - LOW_MEMORY_END + GIB);
    assert!(*HOLE_OF_KERNEL.aperture.end() + 1 == *HOLE_OF_KERNEL.mem32.start());
    assert!(*HOLE_OF_FIRMWARE.mem32.end() + 1 == *HOLE_OF_FIRMWARE.aperture.start());
    assert!(*HOLE_OF_KERNEL.aperture.start() == LOW_MEMORY_END && *HOLE_OF_FIRMWARE.mem32.start() == LOW_MEMORY_END);
    assert!(*HOLE_OF_KERNEL.mem32.end() + 1 == PCI_ECAM && *HOLE_OF_FIRMWARE.aperture.end() + 1 == PCI_ECAM);
    assert!(*INTX_IRQS.start() > GENERATION_ID_IRQ && GENERATION_ID_IRQ > CPU_HOTPLUG_IRQ);
    assert!(GENERATION_ID > RSDP && GENERATION_ID + PAGE_SIZE <= RESET_VECTOR);
    assert!(GENERATION_ID_PORT > PM_TIMER_PORTS + 3 && GENERATION_ID_PORT < PCI_HOTPLUG_PORTS);
    assert!(*INTX_IRQS.start() > CPU_HOTPLUG_IRQ && *INTX_IRQS.end() < FIRST_MSI_GSI);
    assert!(PCI_HOTPLUG_IRQ < CPU_HOTPLUG_IRQ && MEMORY_DEVICE_IRQ < CPU_HOTPLUG_IRQ);
    assert!(pci_hotplug_ports(limits::MAX_PCI_SEGMENTS) <= *PCI_CONFIG_PORTS.start());
    assert!(PCI_ECAM + PCI_ECAM_MAX_SIZE <= IO_APIC as u64);
    // Local APIC ID 255 addresses all CPUs. The vCPUs use IDs up to 253, so that an ID is left for the I/O APIC.
    assert!(limits::MAX_VCPUS <= 254);
    assert!(limits::MAX_BOUNCE_SIZE == 32 * len(&HOLE_OF_KERNEL.aperture));
    assert!(limits::MAX_BOUNCE_SIZE == 32 * len(&HOLE_OF_FIRMWARE.aperture));
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ram_below_the_hole_is_one_range() {
        assert_eq!(ram_ranges(2 * GIB), [(0, 2 * GIB)]);
        assert_eq!(ram_end(2 * GIB), 4 * GIB);
    }

    #[test]
    fn ram_beyond_the_hole_continues_above_4_gib() {
        assert_eq!(ram_ranges(5 * GIB), [(0, 3 * GIB), (4 * GIB, 2 * GIB)]);
        assert_eq!(ram_end(5 * GIB), 6 * GIB);
    }
}
