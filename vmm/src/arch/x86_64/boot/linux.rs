// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The Linux boot protocol, 64-bit entry (Documentation/arch/x86/boot.rst).

use devices::ram::Ram;
use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::GuestAddress;

use super::BootError;
use super::memory_map::Range;
use crate::arch::layout::{CMDLINE, ZERO_PAGE};

/// First version of the protocol with the 64-bit entry and `xloadflags`: 2.12.
const VERSION_64BIT: u16 = 0x20c;
/// `xloadflags`: the kernel has a 64-bit entry at 0x200.
const XLF_KERNEL_64: u16 = 1;
/// `type_of_loader` of boot loaders without an assigned number.
const LOADER_OTHER: u8 = 0xff;

/// Checks that the kernel can be entered in 64-bit mode.
pub(super) fn check_header(header: &setup_header) -> Result<(), String> {
    let (version, flags) = (header.version, header.xloadflags);
    if version < VERSION_64BIT || flags & XLF_KERNEL_64 == 0 {
        return Err(format!(
            "the kernel has no 64-bit entry point (its boot protocol is {}.{}): it must be a 64-bit kernel with boot protocol 2.12 or newer (Linux 3.8)",
            version >> 8,
            version & 0xff
        ));
    }
    Ok(())
}

/// Returns the first address after the memory that the kernel needs to unpack itself.
pub(super) fn end_of_kernel(header: &setup_header) -> u64 {
    let (preferred, size) = (header.pref_address, u64::from(header.init_size));
    preferred.saturating_add(size)
}

/// Writes the zero page: header, command line, initramfs (address, size), memory map, ACPI root.
pub(super) fn write_zero_page(
    memory: &Ram,
    header: setup_header,
    cmdline_len: usize,
    initramfs: Option<(u64, u64)>,
    map: &[Range],
    rsdp: u64,
) -> Result<(), BootError> {
    let fail = |message: String| BootError::Write { what: "the zero page", message };
    let narrow = |value: u64| u32::try_from(value).map_err(|e| fail(e.to_string()));
    let mut params = boot_params { hdr: header, acpi_rsdp_addr: rsdp, ..Default::default() };
    params.hdr.type_of_loader = LOADER_OTHER;
    params.hdr.cmd_line_ptr = narrow(CMDLINE)?;
    params.hdr.cmdline_size = narrow(cmdline_len as u64)?;
    if let Some((address, size)) = initramfs {
        params.hdr.ramdisk_image = narrow(address)?;
        params.hdr.ramdisk_size = narrow(size)?;
    }
    for (entry, range) in params.e820_table.iter_mut().zip(map) {
        *entry = boot_e820_entry { addr: range.start, size: range.size, r#type: range.kind };
    }
    params.e820_entries = u8::try_from(map.len()).map_err(|e| fail(e.to_string()))?;
    let params = BootParams::new(&params, GuestAddress(ZERO_PAGE));
    LinuxBootConfigurator::write_bootparams(&params, memory).map_err(|e| fail(e.to_string()))
}
