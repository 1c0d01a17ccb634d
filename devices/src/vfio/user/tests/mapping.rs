// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the memory that a server can access, and of the mapping messages that the server gets.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use iommu_bounce::{ChunkStore, DmaMapper, MapError, Permissions, UnmapError};
use vm_memory::{Bytes, FileOffset, GuestAddress, VolatileSlice};

use super::*;
use crate::guest_visible::test_support::showing;
use crate::host_range::DeviceContent;
use crate::host_range::test_support::{pages, range};
use crate::pci::{PciDevice, regs};
use crate::vfio::function::fake::{FakeAllocator, FakeSlots};
use crate::vfio::user::UserServer;
use crate::vfio::user::scripted_server::{Instead, Server};
use crate::vfio::user::wire::{self, Command};
use crate::windows::{WindowMemory, WindowMemoryConfig};

#[test]
fn ram_has_no_descriptor_and_is_reached_by_messages() {
    let mut rig = rig(Server::good());
    rig.ram.write_slice(&[1, 2, 3, 4], GuestAddress(0x2ffe)).unwrap();
    rig.map(0x10_0000, 0x2000, 0x1000, RW).unwrap();
    rig.map(0x10_1000, 0x3000, 0x1000, Permissions::READ).unwrap();
    let received = rig.server.received();
    assert_eq!(commands(&received), [2, 2]);
    assert!(received.iter().all(|received| received.descriptors.is_empty()), "{received:?}");
    let flags = wire::DmaFlags { read: true, write: false };
    assert_eq!(received[1].payload, wire::dma_map(flags, 0, 0x10_1000, 0x1000));
    assert_eq!(rig.read(0x10_0ffe, 4), Some(vec![1, 2, 3, 4]));
    assert!(rig.write(0x10_0000, &[9; 16]));
    assert_eq!(rig.ram.read_obj::<u8>(GuestAddress(0x200f)).unwrap(), 9);
    assert!(!rig.write(0x10_1000, &[9]));
    assert_eq!(rig.read(0x2000, 4), None, "a guest-physical address is not mapped as an IOVA");
    let faults: Vec<_> = rig.relay.take().0.iter().map(|fault| (fault.endpoint, fault.iova, fault.access)).collect();
    assert_eq!(faults, [(ENDPOINT, 0x10_1000, Permissions::WRITE), (ENDPOINT, 0x2000, Permissions::READ)]);
    rig.mapper.unmap(0x10_0000, 0x2000).unwrap();
    let received = rig.server.received();
    let unmaps: Vec<_> = received.iter().map(|received| received.payload.clone()).collect();
    assert_eq!(
        unmaps,
        [wire::dma_unmap(0x10_0000, 0x1000), wire::dma_unmap(0x10_1000, 0x1000)],
        "each DMA_UNMAP has the range of one DMA_MAP"
    );
    assert_eq!(rig.read(0x10_0000, 1), None);
}

#[test]
fn refused_map_is_an_error_and_leaves_nothing() {
    for (errno, exists, full) in
        [(libc::EEXIST, true, false), (libc::ENOMEM, false, true), (libc::EINVAL, false, false), (0, false, false)]
    {
        let mut rig = rig(Server::that(Command::DmaMap, move || Instead::Refuse(errno.unsigned_abs())));
        let error = rig.map(0x1000, 0x1000, 0x1000, RW).unwrap_err();
        assert_eq!(matches!(error, MapError::Exists), exists, "{error}");
        assert_eq!(matches!(error, MapError::NoResources), full, "{error}");
        assert!(rig.client.gone().is_none());
        assert_eq!(rig.read(0x1000, 1), None);
        assert!(matches!(rig.mapper.unmap(0x1000, 0x1000), Err(UnmapError::NotMapped)));
    }
}

#[test]
fn server_that_rejects_an_unmap_is_given_up() {
    let mut rig = rig(Server::that(Command::DmaUnmap, || Instead::Refuse(16)));
    rig.map(0x1000, 0x1000, 0x1000, RW).unwrap();
    rig.mapper.unmap(0x1000, 0x1000).unwrap();
    assert!(rig.client.gone().unwrap().contains("did not unmap memory at DMA_UNMAP"));
    assert!(!rig.table.read(0x1000, &mut [0]));
}

#[test]
fn domain_keeps_working_when_a_server_is_gone() {
    let mut rig = rig(Server::that(Command::Reset, || Instead::Close));
    rig.map(0x1000, 0x1000, 0x1000, RW).unwrap();
    let _ = rig.client.reset();
    rig.wait_until_gone();
    rig.map(0x2000, 0x2000, 0x1000, RW).unwrap();
    assert!(matches!(rig.map(0x2000, 0x3000, 0x1000, RW), Err(MapError::Exists)));
    rig.mapper.unmap(0x1000, 0x2000).unwrap();
    assert!(matches!(rig.mapper.unmap(0x1000, 0x1000), Err(UnmapError::NotMapped)));
}

#[test]
fn map_fails_if_the_server_dies_meanwhile() {
    let mut rig = rig(Server::that(Command::DmaMap, || Instead::Close));
    assert!(matches!(rig.map(0x1000, 0x1000, 0x1000, RW), Err(MapError::Host(_))));
    assert!(matches!(rig.mapper.unmap(0x1000, 0x1000), Err(UnmapError::NotMapped)));
}

#[test]
fn limits_of_the_server_are_reported_and_enforced() {
    let mut rig = rig(Server::good());
    let limits = rig.mapper.limits();
    assert_eq!((limits.page_size_mask, limits.max_mappings), (!0xfff, Some(6)));
    for page in 0..6 {
        rig.map(page << 12, page << 12, 0x1000, RW).unwrap();
    }
    assert!(matches!(rig.map(0x6000, 0x6000, 0x1000, RW), Err(MapError::NoResources)));
    rig.mapper.unmap(0x5000, 0x1000).unwrap();
    rig.map(0x6000, 0x6000, 0x1000, RW).unwrap();
}

#[test]
fn memory_invisible_to_the_guest_is_not_mapped() {
    let mut rig = rig(Server::good());
    let mut registers = [0u8; 4096];
    assert!(matches!(rig.mapper.map(0, VolatileSlice::from(&mut registers[..]), RW), Err(MapError::Host(_))));
    assert!(rig.server.received().is_empty());
}

#[test]
fn messages_reach_guest_visible_files_but_not_registers() {
    let mut rig = rig(Server::good());
    let (file, _) = pages(0x2000);
    let (registers, _) = range(0x1000, false, DeviceContent::Registers);
    rig.table.connect(None, Some(&showing(&[&file, &registers])));
    rig.mapper.map(0x1000, file.part(0x1000, 0x1000).unwrap(), RW).unwrap();
    rig.mapper.map(0x2000, registers.part(0, 0x1000).unwrap(), RW).unwrap();
    let received = rig.server.received();
    assert_eq!(commands(&received), [2, 2]);
    assert!(received.iter().all(|received| received.descriptors.is_empty()), "{received:?}");
    assert!(rig.write(0x1ffe, &[3; 2]));
    assert_eq!(file.pages(0x1ffe, 2).unwrap().read_obj::<u16>(0).unwrap(), 0x0303);
    assert_eq!(rig.read(0x1ffe, 2), Some(vec![3; 2]));
    assert_eq!(rig.read(0x2000, 4), None);
    let faults: Vec<_> = rig.relay.take().0.iter().map(|fault| (fault.iova, fault.access)).collect();
    assert_eq!(faults, [(0x2000, Permissions::READ)]);
    rig.mapper.unmap(0x1000, 0x2000).unwrap();
    assert_eq!(rig.read(0x1000, 1), None);
}

fn windows() -> (Arc<WindowMemory>, Arc<FakeSlots>) {
    let slots = Arc::new(FakeSlots::default());
    let config = WindowMemoryConfig {
        region_size: 8 * CHUNK,
        chunk_size: CHUNK,
        budget: 8 * CHUNK,
        hugepages: false,
        slots: slots.clone(),
    };
    let windows = Arc::new(WindowMemory::new(&config).unwrap());
    windows.moved(0x40_0000_0000).unwrap();
    (windows, slots)
}

#[test]
fn chunks_carry_their_own_descriptors_and_permissions() {
    let mut rig = rig(Server::good());
    let (windows, _slots) = windows();
    rig.table.connect(Some(&windows), None);
    let mut store = windows.store();
    let kinds = [RW, Permissions::READ, Permissions::WRITE];
    let mut chunks = Vec::new();
    for (iova, permissions) in (0u64..).step_by(4096).zip(kinds) {
        let index = store.back().unwrap();
        rig.mapper.map(iova, store.memory(index).unwrap(), permissions).unwrap();
        chunks.push(index);
    }
    let received = rig.server.received();
    assert_eq!(received.iter().map(|received| received.descriptors.len()).collect::<Vec<_>>(), [1, 1, 0]);
    let file = |place: usize| File::from(received[place].descriptors[0].try_clone().unwrap());
    let (both, read) = (file(0), file(1));
    assert!([&both, &read].into_iter().all(|file| file.metadata().unwrap().len() == CHUNK && file.set_len(0).is_err()));
    both.write_all_at(&[7; 8], 0).unwrap();
    assert_eq!(store.memory(chunks[0]).unwrap().read_obj::<u64>(0).unwrap(), 0x0707_0707_0707_0707);
    store.memory(chunks[1]).unwrap().write_obj(0x1122u16, 4094).unwrap();
    let mut bytes = [0; 2];
    read.read_exact_at(&mut bytes, 4094).unwrap();
    assert_eq!(bytes, [0x22, 0x11]);
    assert!(read.write_at(&[1], 0).is_err());
    assert!(vm_memory::MmapRegion::<()>::from_file(FileOffset::new(read, 0), 4096).is_err(), "mapped for writing");
    // With DMA_READ and DMA_WRITE, the server can access all chunks, as the permissions of their mappings allow.
    assert_eq!(rig.read(0xffe, 4), Some(vec![0; 4]));
    assert!(rig.write(0x2000, &[3; 4]) && !rig.write(0x1000, &[3; 4]));
    assert_eq!(rig.read(0x2000, 4), None);
    assert_eq!(store.memory(chunks[2]).unwrap().read_obj::<u8>(3).unwrap(), 3);
    // If the server has a descriptor of a chunk, the chunk cannot be parked, because no other driver may get this chunk.
    assert!(store.park(chunks[0]).is_err() && store.park(chunks[1]).is_err());
    assert!(store.park(chunks[2]).is_ok());
    rig.mapper.unmap(0, 4096).unwrap();
    store.release(chunks[0]).unwrap();
    assert_eq!(rig.read(0, 1), None);
    let again = store.back().unwrap();
    both.write_all_at(&[9; 8], 0).unwrap();
    assert_eq!(store.memory(again).unwrap().read_obj::<u64>(0).unwrap(), 0, "the next chunk has no previous user");
}

/// No server gets the descriptor of a chunk that devices may only write. So Carom may reuse the chunk's memory for the next driver. After a
/// reset, the server cannot access the chunk, because the device is not a bus master. When the device is a bus master again, the chunk is
/// not mapped any more.
#[test]
fn chunk_written_before_reset_reads_zero_for_next_driver() {
    let (server, socket) = Server::good();
    let (sender, relay) = fault_relay();
    let host = UserServer::start("/run/x", socket, ram(), Some((ENDPOINT, sender))).unwrap();
    let device = host.function("user0", &FakeAllocator::default(), Arc::new(FakeSlots::default())).unwrap();
    let (windows, _slots) = windows();
    host.table.connect(Some(&windows), None);
    let (mut store, mut mapper) = (windows.store(), host.mapper());
    let chunk = store.back().unwrap();
    mapper.map(0x8000, store.memory(chunk).unwrap(), Permissions::WRITE).unwrap();
    let mut message = wire::dma_access(0x8000, 8);
    message.extend([0x5a; 8]);
    let writes = || server.ask(Command::DmaWrite, &message).0.kind == Kind::Reply { refused: None };
    device.write_config(regs::COMMAND, &[6, 0]);
    assert!(writes());
    assert_eq!(store.memory(chunk).unwrap().read_obj::<u64>(0).unwrap(), 0x5a5a_5a5a_5a5a_5a5a);
    device.reset().unwrap();
    assert!(!writes(), "the chunk is still mapped, but the device is not a bus master");
    store.park(chunk).unwrap();
    assert!(!writes(), "while the chunk has no user");
    mapper.unmap(0x8000, CHUNK).unwrap();
    device.write_config(regs::COMMAND, &[6, 0]);
    assert!(!writes(), "nothing is mapped");
    store.unpark(chunk).unwrap();
    assert!(!writes(), "the next driver has the chunk, but has not mapped it");
    let memory = store.memory(chunk).unwrap();
    assert!((0..512).all(|word| memory.read_obj::<u64>(8 * word).unwrap() == 0));
    drop(relay);
}
