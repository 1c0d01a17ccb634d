// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The PVH boot protocol (Xen's `docs/misc/pvh.pandoc`, `xen/include/public/arch-x86/hvm/start_info.h`).

use devices::ram::Ram;
use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::elf::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use vm_memory::GuestAddress;

use super::BootError;
use super::memory_map::Range;
use crate::arch::layout::{CMDLINE, PVH_MEMORY_MAP, PVH_MODULES, PVH_START_INFO};

/// `hvm_start_info.magic`: "xEn3" with the top bit of the E set.
const MAGIC: u32 = 0x336e_c578;

/// Writes the start information: command line, initramfs (address, size), memory map, ACPI root.
pub(super) fn write_start_info(
    memory: &Ram,
    initramfs: Option<(u64, u64)>,
    map: &[Range],
    rsdp: u64,
) -> Result<(), BootError> {
    let fail = |message: String| BootError::Write { what: "PVH start information", message };
    let info = hvm_start_info {
        magic: MAGIC,
        version: 1,
        cmdline_paddr: CMDLINE,
        rsdp_paddr: rsdp,
        nr_modules: u32::from(initramfs.is_some()),
        modlist_paddr: initramfs.map_or(0, |_| PVH_MODULES),
        memmap_paddr: PVH_MEMORY_MAP,
        memmap_entries: u32::try_from(map.len()).map_err(|e| fail(e.to_string()))?,
        ..Default::default()
    };
    let mut params = BootParams::new(&info, GuestAddress(PVH_START_INFO));
    if let Some((paddr, size)) = initramfs {
        params.set_modules(&[hvm_modlist_entry { paddr, size, ..Default::default() }], GuestAddress(PVH_MODULES));
    }
    let entries: Vec<_> = map
        .iter()
        .map(|range| hvm_memmap_table_entry { addr: range.start, size: range.size, type_: range.kind, reserved: 0 })
        .collect();
    params.set_sections(&entries, GuestAddress(PVH_MEMORY_MAP));
    PvhBootConfigurator::write_bootparams(&params, memory).map_err(|e| fail(e.to_string()))
}
