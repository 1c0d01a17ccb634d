// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of one device: its registers, its interrupts, and the memory that its DMA can access.

use std::sync::Arc;
use std::time::{Duration, Instant};

use devices::pci::{PciDevice, regs};
use devices::vfio::{VfioPciDevice, VfioPciError, map_guest_ram};
use iommu_bounce::{DmaMapper, MapError, Permissions, UnmapError};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
use vmm_sys_util::eventfd::EventFd;

use crate::hardware::*;

#[test]
fn nvme_identity_and_registers_are_visible() {
    let nvme = open("CAROM_NVME");
    assert_eq!(nvme.config(regs::REVISION) >> 8, 0x01_0802, "class code of NVMe");
    assert_eq!(nvme.config(regs::INTERRUPT_LINE) & 0xffff, 0x0114, "INTA# on the guest's line 20");
    assert!(nvme.capability(regs::CAP_MSIX).is_some());
    assert_eq!(nvme.config(regs::BAR0) & !0xf, 0, "the host's address is hidden");
    let bar = nvme.device.bars()[0];
    nvme.device.assign_bar(0, 0x40_0000_0000);
    nvme.command(regs::COMMAND_MEMORY);
    assert_eq!(nvme.device.bar_address(0), Some(0x40_0000_0000));
    // Read the version register first through an access that exits to the VMM, and then through the memory slot.
    let version = nvme.register(8);
    assert!((0x1_0000..0x3_0000).contains(&version), "NVMe version {version:#x}");
    nvme.device.bar_moved(0, 0x40_0000_0000).unwrap();
    let slots = nvme.platform.slots.lock().unwrap().clone();
    assert!(!slots.is_empty());
    assert!(slots.iter().map(|(_, host)| host.len as u64).sum::<u64>() < bar.size, "the table's page traps");
    let (_, host) = slots.iter().find(|(gpa, _)| *gpa == 0x40_0000_0000).unwrap();
    // SAFETY: The device keeps the range mapped. Reads of this register have no side effects.
    let seen = unsafe { std::ptr::read_volatile((host.address + 8) as *const u32) };
    assert_eq!(seen, version);
    // The guest turns decoding off. The slot stays, and accesses to the slot must not fault.
    nvme.command(0);
    // SAFETY: As above.
    let seen = unsafe { std::ptr::read_volatile((host.address + 8) as *const u32) };
    assert_eq!(seen, version);
    let pm = nvme.capability(regs::CAP_PM).unwrap();
    nvme.device.write_config(pm + 4, &[3, 0]);
    // SAFETY: As above. The guest has put the device to sleep.
    let seen = unsafe { std::ptr::read_volatile((host.address + 8) as *const u32) };
    assert_eq!(seen, version);
    nvme.device.reset().unwrap();
    assert_eq!(nvme.register(8), version);
}

#[test]
fn msix_can_be_turned_on_and_off() {
    let nvme = open("CAROM_NVME");
    let control = nvme.capability(regs::CAP_MSIX).unwrap() + 2;
    for _ in 0..2 {
        nvme.device.write_config(control, &[0, 0xc0]);
        nvme.device.write_config(control, &[0, 0x80]);
        let interrupts = std::fs::read_to_string("/proc/interrupts").unwrap();
        assert!(interrupts.contains("vfio-msix[0]"), "the host delivers:\n{interrupts}");
        nvme.device.write_config(control, &[0, 0]);
        assert!(!std::fs::read_to_string("/proc/interrupts").unwrap().contains("vfio-msix"));
    }
}

#[test]
fn msi_reaches_its_event() {
    let edu = Edu::open();
    let msi = edu.0.capability(regs::CAP_MSI).unwrap();
    edu.0.device.write_config(msi + 2, &[1, 0]);
    edu.0.set_register(0x60, 1);
    let vectors = edu.0.platform.vectors.lock().unwrap()[0].clone();
    wait_for(&vectors.0[0]);
    edu.0.set_register(0x64, 1);
    edu.0.device.write_config(msi + 2, &[0, 0]);
    edu.0.set_register(0x60, 1);
    std::thread::sleep(Duration::from_millis(200));
    assert!(vectors.0[0].read().is_err(), "interrupt after MSI was turned off");
}

/// Waits until an event is written.
#[track_caller]
fn wait_for(event: &EventFd) {
    let end = Instant::now() + Duration::from_secs(60);
    while event.read().is_err() {
        assert!(Instant::now() < end, "no interrupt");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn intx_fires_once_until_served_and_never_while_masked() {
    /// Registers of edu. A write to `RAISE` raises an interrupt, and a write to `END` ends it.
    const RAISE: u64 = 0x60;
    const END: u64 = 0x64;
    let edu = Edu::open();
    let line =
        || edu.0.platform.line.lock().unwrap().as_ref().map(|(raise, served)| (raise.try_clone(), served.try_clone()));
    let (raise, served) = line().expect("INTx is enabled from the start");
    let (raise, served) = (raise.unwrap(), served.unwrap());
    let interrupts = || std::fs::read_to_string("/proc/interrupts").unwrap();
    assert!(interrupts().contains("vfio-intx"), "the host delivers:\n{}", interrupts());
    let asks = || edu.0.config(regs::COMMAND) >> 16 & 8 != 0;
    let quiet = || {
        std::thread::sleep(Duration::from_millis(200));
        raise.read().is_err()
    };

    edu.0.set_register(RAISE, 1);
    wait_for(&raise);
    assert!(asks() && quiet(), "the host masks INTx until the guest has served the interrupt");
    // The device still asserts INTx, so the host raises the line again after the guest has served the interrupt.
    served.write(1).unwrap();
    wait_for(&raise);
    edu.0.set_register(END, 1);
    served.write(1).unwrap();
    assert!(!asks() && quiet(), "the device no longer asserts INTx");

    edu.0.command(regs::COMMAND_MEMORY | regs::COMMAND_INTX_DISABLE);
    edu.0.set_register(RAISE, 1);
    assert!(asks() && quiet(), "the guest has masked INTx");
    edu.0.command(regs::COMMAND_MEMORY);
    wait_for(&raise);

    // MSI replaces INTx. INTx returns when MSI is disabled.
    let msi = edu.0.capability(regs::CAP_MSI).unwrap();
    edu.0.device.write_config(msi + 2, &[1, 0]);
    assert!(line().is_none() && !interrupts().contains("vfio-intx"));
    edu.0.device.write_config(msi + 2, &[0, 0]);
    // QEMU's device released the pin when MSI was enabled, so raise the interrupt again.
    edu.0.set_register(RAISE, 1);
    wait_for(&line().expect("INTx is back").0.unwrap());
    edu.0.set_register(END, 1);
    edu.0.device.reset().unwrap();
    let (raise, _) = line().expect("INTx is enabled after a reset");
    edu.0.command(regs::COMMAND_MEMORY);
    edu.0.set_register(RAISE, 1);
    wait_for(&raise.unwrap());
    edu.0.set_register(END, 1);
}

#[test]
fn dma_is_limited_to_mappings_and_their_permissions() {
    let edu = Edu::open();
    let memory = memory();
    let mut mapper = edu.0.mapper(7, memory.clone());
    let limits = mapper.limits();
    println!("{limits:x?}");
    assert_ne!(limits.page_size_mask & PAGE, 0);
    assert!(!limits.iova_ranges.iter().any(|range| range.contains(&0xfee0_0000)), "the MSI window is reserved");
    let both = Permissions::READ | Permissions::WRITE;
    map(&mut mapper, &memory, 0x10_0000, 0, both).unwrap();
    map(&mut mapper, &memory, 0x10_1000, 1, Permissions::READ).unwrap();
    map(&mut mapper, &memory, 0x10_2000, 2, Permissions::WRITE).unwrap();
    // Copy page 0 to page 2.
    edu.copy(0x10_0000, true);
    edu.copy(0x10_2000, false);
    assert_eq!(page(&memory, 2), [1; 2048]);
    // Page 1 can be read but not written.
    edu.copy(0x10_1000, true);
    edu.copy(0x10_0000, false);
    assert_eq!(page(&memory, 0), [2; 2048]);
    memory.write_slice(&[9; 4096], GuestAddress(0)).unwrap();
    edu.copy(0x10_0000, true);
    edu.copy(0x10_1000, false);
    assert_eq!(page(&memory, 1), [2; 2048], "written although only READ is allowed");
    // The device cannot write to an IOVA that was never mapped, or that was unmapped.
    edu.copy(0x10_3000, false);
    assert_eq!(page(&memory, 3), [4; 2048]);
    mapper.unmap(0x10_2000, PAGE).unwrap();
    edu.copy(0x10_2000, false);
    assert_eq!(page(&memory, 2), [1; 2048], "written after unmap");
    // Without bus mastering, the device does no DMA.
    edu.0.command(regs::COMMAND_MEMORY);
    memory.write_slice(&[7; 4096], GuestAddress(0)).unwrap();
    edu.copy(0x10_0000, false);
    assert_eq!(page(&memory, 0), [7; 2048], "written without bus mastering");
}

#[test]
fn unmap_accepts_only_whole_mappings() {
    let edu = Edu::open();
    let memory = memory();
    let mut mapper = edu.0.mapper(7, memory.clone());
    let slice = memory.get_slice(GuestAddress(0), 8192).unwrap();
    mapper.map(0x10_0000, slice, Permissions::READ).unwrap();
    map(&mut mapper, &memory, 0x10_2000, 2, Permissions::READ).unwrap();
    assert!(matches!(map(&mut mapper, &memory, 0x10_1000, 3, Permissions::READ), Err(MapError::Exists)));
    assert!(matches!(mapper.unmap(0x10_0000, PAGE), Err(UnmapError::NotMapped)));
    assert!(matches!(mapper.unmap(0x20_0000, PAGE), Err(UnmapError::NotMapped)));
    mapper.unmap(0x10_0000, 3 * PAGE).unwrap();
    assert!(matches!(mapper.map(0x10_0001, slice, Permissions::READ), Err(MapError::Host(_))));
}

#[test]
fn mapping_beyond_the_host_limit_returns_no_resources() {
    if by_iommufd() {
        // IOMMUFD has no limit on the number of mappings. It limits only the amount of pinned memory.
        return;
    }
    let parameter = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
    let before = std::fs::read_to_string(parameter).unwrap();
    std::fs::write(parameter, "2").unwrap();
    let edu = Edu::open();
    std::fs::write(parameter, before.trim()).unwrap();
    let memory = memory();
    let mut mapper = edu.0.mapper(7, memory.clone());
    assert_eq!(mapper.limits().max_mappings, Some(2));
    for number in 0..2 {
        map(&mut mapper, &memory, 0x10_0000 + number * PAGE, number, Permissions::READ).unwrap();
    }
    let third = map(&mut mapper, &memory, 0x20_0000, 2, Permissions::READ);
    assert!(matches!(third, Err(MapError::NoResources)));
    mapper.unmap(0x10_0000, PAGE).unwrap();
    map(&mut mapper, &memory, 0x20_0000, 2, Permissions::READ).unwrap();
}

#[test]
fn guest_ram_is_identity_mapped_until_drop() {
    let edu = Edu::open();
    let memory = memory();
    let mapping = map_guest_ram(&edu.0.space, &memory).unwrap();
    edu.copy(0, true);
    edu.copy(0x3000, false);
    assert_eq!(page(&memory, 3), [1; 2048]);
    drop(mapping);
    edu.copy(0x2000, false);
    assert_eq!(page(&memory, 2), [3; 2048]);
}

#[test]
fn second_user_of_a_device_gets_a_busy_error() {
    let edu = Edu::open();
    let platform = Arc::new(Platform::default());
    let other = host().new_space().unwrap();
    let opened = VfioPciDevice::open("vfio1", &sysfs("CAROM_EDU"), &other, platform.clone(), None, platform);
    let error = opened.err().unwrap();
    assert!(matches!(error, VfioPciError::Busy { .. }) && error.is_user_error(), "{error}");
    drop(edu);
    Edu::open();
}
