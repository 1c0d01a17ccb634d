// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of MAP requests for guest-visible device memory. The driver never sets the MMIO flag.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::*;
use crate::dma::{DeviceMemory, DmaTable, FaultRelay, HostIo, IoOwner, TableMapper, fault_relay};
use crate::guest_visible::GuestVisibleMemory;
use crate::host_range::test_support::range;
use crate::host_range::{DeviceContent, DeviceRange};
use crate::platform::MemorySlots;
use crate::virtio::pmem::spec::GRANULE;
use crate::virtio::pmem::{PmemParams, create as create_pmem};

/// Guest-physical addresses of the virtio-pmem device's file and of the registers.
const FILE: u64 = 0x10_0000_0000;
const REGISTERS: u64 = 0x20_0000_0000;
const IOVA: u64 = 0x40_0000;
/// Endpoint of an emulated device behind the virtio-iommu.
const EMULATED: u32 = 0x30;

struct Rig {
    guest: Guest,
    visible: Arc<GuestVisibleMemory>,
    pmem: Arc<VirtioPciDevice>,
    file: File,
    device: DeviceMemory,
    faults: FaultRelay,
    registers: DeviceRange,
    slot: u32,
}

/// Returns a guest that sees a file, as virtio-pmem memory, and registers of a device. The domain has a host device and an emulated device.
fn rig(discard_writes: bool) -> Rig {
    let memory = Arc::new(Ram::from_ranges(&[(GuestAddress(0), RAM)]).unwrap());
    let (msi, slots) = (Arc::new(FakeMsi::default()), Arc::new(FakeSlots::default()));
    let visible = Arc::new(GuestVisibleMemory::new(slots.clone()));
    let params = IommuParams { devices: Some(visible.clone()), ..params(&memory, &msi, &slots, false) };
    let (function, handle) = create(params).unwrap();
    let mapper = RecordingMapper::new().with_page_tables();
    let probe = mapper.probe();
    handle.add_endpoint(ENDPOINT, Box::new(mapper)).unwrap();
    let (sender, faults) = fault_relay();
    let table = Arc::new(DmaTable::new("disk", memory.clone(), Some((EMULATED, sender))));
    let emulated = TableMapper::new(table.clone());
    emulated.connect(handle.windows(), handle.devices());
    handle.add_endpoint(EMULATED, Box::new(emulated)).unwrap();
    function.write_config(COMMAND, &(COMMAND_BUS_MASTER | COMMAND_MEMORY).to_le_bytes());

    let file = tempfile::tempfile().unwrap();
    file.set_len(GRANULE).unwrap();
    let params = PmemParams {
        id: "_pmem0".into(),
        file: file.try_clone().unwrap(),
        path: "memory".into(),
        size: GRANULE,
        discard_writes,
        slots: visible.clone(),
        memory: DeviceMemory::all_ram(memory.clone()),
        msi: msi.clone(),
        doorbells: None,
        observer: None,
    };
    let pmem = create_pmem(params).unwrap().0;
    pmem.bar_moved(2, FILE).unwrap();
    let (registers, _) = range(0x2000, false, DeviceContent::Registers);
    // SAFETY: The rig keeps the range for as long as it keeps the slots.
    let slot = unsafe { visible.insert_device(REGISTERS, &registers) }.unwrap();

    let mut guest = Guest { memory, function, handle, slots, msi, mapper: probe, available: 0, event_idx: false };
    guest.start(BASIC);
    for request in [attach(ENDPOINT, 1), attach(EMULATED, 1)] {
        assert_eq!(guest.simple(&request), OK);
    }
    Rig { guest, visible, pmem, file, device: DeviceMemory::mapped(table), faults, registers, slot }
}

impl Rig {
    /// Maps the page at `gpa` for the host device and the emulated device. Returns the status.
    fn map(&mut self, gpa: u64) -> u8 {
        self.guest.simple(&map(1, IOVA, IOVA + 0xfff, gpa, 3))
    }

    fn unmap(&mut self) -> u8 {
        self.guest.simple(&unmap(1, IOVA, IOVA + 0xfff))
    }
}

/// Owner that ignores requests to cancel its I/O.
#[derive(Default)]
struct Deaf;

impl IoOwner for Deaf {
    fn cancel(&self, _: u64) {}
    fn give_up(&self) {}
}

fn begin(device: &DeviceMemory) -> Option<HostIo> {
    device.begin_io(&[(IOVA, 16)], Permissions::WRITE, &Arc::new(Deaf))
}

#[test]
fn file_that_the_guest_sees_is_mapped_for_all_devices() {
    let mut rig = rig(false);
    assert_eq!(rig.map(FILE + 0x3000), OK);
    rig.device.view().write_obj(0x1122_3344u32, GuestAddress(IOVA + 8)).unwrap();
    let mut bytes = [0; 4];
    rig.file.read_exact_at(&mut bytes, 0x3008).unwrap();
    assert_eq!(u32::from_le_bytes(bytes), 0x1122_3344);
    // The host device, and I/O of the host kernel for the emulated device, use the same page.
    let address = rig.guest.mapper.translate(IOVA).unwrap().0;
    let io = begin(&rig.device).unwrap();
    assert_eq!(io.ranges().iter().map(|range| (range.address, range.len)).collect::<Vec<_>>(), [(address, 16)]);
    drop(io);
    let counters = rig.guest.handle.counters();
    assert_eq!((counters.mapped_bytes, counters.pinned_bytes), (0x2000, 0x1000));
    assert_eq!(rig.unmap(), OK);
    assert!(rig.guest.mapper.is_empty() && rig.device.view().read_obj::<u8>(GuestAddress(IOVA)).is_err());
}

#[test]
fn device_writes_to_private_file_mapping_do_not_reach_file() {
    let mut rig = rig(true);
    assert_eq!(rig.map(FILE), OK);
    rig.device.view().write_obj(7u8, GuestAddress(IOVA)).unwrap();
    assert_eq!(rig.device.view().read_obj::<u8>(GuestAddress(IOVA)).unwrap(), 7);
    let mut byte = [1];
    rig.file.read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [0]);
}

#[test]
fn device_registers_map_but_fail_for_emulated_devices() {
    let mut rig = rig(false);
    assert_eq!(rig.map(REGISTERS + 0x1000), OK);
    let mapped = rig.guest.mapper.translate(IOVA).unwrap();
    assert_eq!(mapped, (rig.registers.host().address + 0x1000, Permissions::READ | Permissions::WRITE));
    assert!(rig.device.view().write_obj(1u8, GuestAddress(IOVA)).is_err());
    assert!(begin(&rig.device).is_none());
    assert_eq!(rig.faults.take().0.iter().map(|fault| fault.iova).collect::<Vec<_>>(), [IOVA, IOVA]);
    rig.visible.remove(rig.slot).unwrap();
    assert!(rig.guest.mapper.is_empty());
    assert_eq!(rig.unmap(), OK);
}

#[test]
fn address_without_memory_is_invalid_for_all_devices() {
    let mut rig = rig(false);
    for gpa in [FILE - 0x1000, FILE + GRANULE, REGISTERS + 0x2000, RAM as u64] {
        assert_eq!(rig.map(gpa), Status::Inval as u8, "{gpa:#x}");
    }
    assert!(rig.guest.mapper.is_empty());
}

#[test]
fn removed_or_moved_file_is_unmapped_for_all_devices() {
    for leaves in [true, false] {
        let mut rig = rig(false);
        assert_eq!(rig.map(FILE), OK);
        if leaves {
            rig.pmem.bar_released(2).unwrap();
        } else {
            rig.pmem.bar_moved(2, FILE + GRANULE).unwrap();
        }
        assert!(rig.guest.mapper.is_empty());
        assert!(rig.device.view().read_obj::<u8>(GuestAddress(IOVA)).is_err() && begin(&rig.device).is_none());
        assert_eq!(rig.unmap(), OK, "the guest's mapping still exists");
        assert_eq!(rig.map(FILE), Status::Inval as u8);
        assert_eq!(rig.map(FILE + GRANULE), if leaves { Status::Inval as u8 } else { OK });
    }
}

#[test]
fn window_is_not_mapped_for_other_domains() {
    let mut guest = Guest::running(BASIC | feature::BOUNCE_WINDOW);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    let (used, _) = guest.send(&window_add(1, 3, APERTURE), 12);
    assert_eq!(used, 12);
    assert_eq!(guest.simple(&map(1, 0x1000, 0x1fff, BAR, 1)), Status::Inval as u8);
}
