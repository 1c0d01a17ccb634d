// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of mappings of device memory.

use super::*;
use crate::test_utils::*;
use crate::{EngineState, Limits};

const MMIO: u32 = 4;
const DEVICE: u64 = 0xc000_0000;
const SIZE: usize = 0x4000;

/// Returns a rig like `Rig::standard`, with device memory at `DEVICE`.
fn rig(read_only: bool) -> Rig {
    let mut rig = Rig::standard();
    let ram = TestRam::new(&[(0, 0x10_0000)]).with_device(DEVICE, SIZE, read_only);
    rig.ram = Arc::new(ram);
    rig.engine = Engine::new(EngineConfig::default(), rig.ram.clone(), None).expect("the configuration is valid");
    for id in 1..=3 {
        let mapper = RecordingMapper::new();
        rig.mappers.insert(id, mapper.probe());
        rig.engine.add_endpoint(id, Box::new(mapper)).expect("the endpoint is valid");
    }
    rig.engine.accept_features(rig.engine.features());
    rig
}

/// Returns a rig with a file at `DEVICE` that the guest sees as memory.
fn rig_with_file(limits: Limits) -> Rig {
    let mut rig = rig(false);
    rig.ram = Arc::new(TestRam::new(&[(0, 0x10_0000)]).with_file(DEVICE, SIZE));
    let config = EngineConfig { limits, ..EngineConfig::default() };
    rig.engine = Engine::new(config, rig.ram.clone(), None).expect("the configuration is valid");
    for id in 1..=2 {
        let mapper = RecordingMapper::new().with_page_tables();
        rig.mappers.insert(id, mapper.probe());
        rig.engine.add_endpoint(id, Box::new(mapper)).expect("the endpoint is valid");
    }
    rig.engine.accept_features(rig.engine.features());
    rig
}

/// Returns a MAP of device pages, without the MMIO flag.
fn map_plainly(iova_page: u64, pages: u64, device_page: u64, flags: u32) -> Vec<u8> {
    let start = iova_page * PAGE;
    map(1, start, start + pages * PAGE - 1, DEVICE + device_page * PAGE, flags)
}

/// Returns a MAP of device pages, with the MMIO flag.
fn map_device(iova_page: u64, pages: u64, device_page: u64, flags: u32) -> Vec<u8> {
    let start = iova_page * PAGE;
    map(1, start, start + pages * PAGE - 1, DEVICE + device_page * PAGE, flags | MMIO)
}

fn unmap_pages(start: u64, pages: u64) -> Vec<u8> {
    unmap(1, start * PAGE, (start + pages) * PAGE - 1)
}

#[test]
fn failed_map_list_unmaps_its_device_memory() {
    let mut rig = rig(false);
    rig.all_ok([attach(1, 1)]);
    let (device, ram) = ((DEVICE, PAGE), (0x1000, PAGE));
    assert_eq!(rig.status(&map_list(1, 0, BOTH, &[ram, device, ram, (0x5000_0000, PAGE)])), INVAL);
    assert!(rig.mapper(1).is_empty());
    assert_eq!(rig.engine.counters().mappings, 0);
    rig.all_ok([map_list(1, 0, BOTH, &[ram, device, ram]), unmap_pages(0, 3)]);
    assert!(rig.mapper(1).is_empty());
    assert_eq!(rig.status(&map_list(1, 0, BOTH | MMIO, &[device, ram])), INVAL, "RAM is no device memory");
    assert!(rig.mapper(1).is_empty());
}

#[test]
fn mmio_maps_device_memory_and_nothing_else() {
    let mut rig = rig(false);
    assert_ne!(rig.engine.features() & feature::MMIO, 0);
    assert_eq!(Rig::new().engine.features() & feature::MMIO, 0, "the VM has no devices");
    rig.all_ok([attach(1, 1), map_device(5, 2, 1, BOTH)]);
    let (address, permissions) = rig.mapper(1).translate(6 * PAGE).expect("it is mapped");
    assert_eq!(address, rig.ram.host_address(DEVICE + 2 * PAGE));
    assert_eq!(permissions.bits(), BOTH);
    let counters = rig.engine.counters();
    assert_eq!((counters.mappings, counters.mapped_bytes), (1, 0), "it is not RAM");
    // A MAP with the MMIO flag cannot map RAM, and its range must not exceed the device memory.
    assert_eq!(rig.status(&map(1, 0, PAGE - 1, 0, BOTH | MMIO)), INVAL);
    assert_eq!(rig.status(&map_device(0x10, 2, 3, READ)), INVAL);
    // Other rules are the same as for RAM.
    assert_eq!(rig.status(&map_device(6, 1, 0, READ)), INVAL, "it overlaps a mapping");
    assert_eq!(rig.status(&map(1, 4 * PAGE, 6 * PAGE - 1, 0, READ)), INVAL, "it overlaps a mapping");
    assert_eq!(rig.status(&map_device(0x10, 1, 0, 0)), INVAL, "no permission");
    assert_eq!(rig.status(&map_device(0x10, 1, 0, READ | 8)), INVAL, "an unknown flag");
}

#[test]
fn mmio_is_an_unknown_flag_without_the_feature() {
    let mut rig = rig(false);
    rig.engine.accept_features(rig.engine.features() & !feature::MMIO);
    rig.all_ok([attach(1, 1)]);
    assert_eq!(rig.status(&map_device(0, 1, 0, READ)), INVAL);
}

#[test]
fn read_only_device_memory_is_not_mapped_for_writing() {
    let mut rig = rig(true);
    rig.all_ok([attach(1, 1), map_device(0, 1, 0, READ)]);
    assert_eq!(rig.status(&map_device(1, 1, 0, BOTH)), INVAL);
    assert_eq!(rig.status(&map_device(1, 1, 0, WRITE)), INVAL);
}

#[test]
fn unmap_that_splits_device_memory_is_refused() {
    let mut rig = rig(false);
    rig.all_ok([attach(1, 1), attach(2, 1), map(1, 0, PAGE - 1, 0, BOTH), map_device(1, 2, 0, READ)]);
    rig.all_ok([map(1, 3 * PAGE, 4 * PAGE - 1, 0, BOTH)]);
    assert_eq!(rig.status(&unmap_pages(0, 2)), RANGE, "it would split a mapping");
    assert_eq!(rig.status(&unmap_pages(2, 2)), RANGE, "it would split a mapping");
    assert_eq!(rig.mapper(2).mappings().len(), 3);
    rig.all_ok([unmap_pages(0, 4)]);
    rig.assert_host_is_clean();
}

#[test]
fn endpoints_get_and_lose_device_memory_with_the_domain() {
    let mut rig = rig(false);
    rig.all_ok([attach(1, 1), map_device(1, 1, 0, READ), attach(2, 1)]);
    assert_eq!(rig.mapper(2).mappings().len(), 1);
    rig.all_ok([detach(2, 1)]);
    assert!(rig.mapper(2).is_empty());
    rig.assert_reset_cleans_host();
}

#[test]
fn revoked_device_memory_is_unmapped_for_all_endpoints() {
    let mut rig = rig(false);
    rig.all_ok([attach(1, 1), attach(2, 1), map_device(1, 1, 0, READ), map_device(2, 1, 3, READ)]);
    // Memory outside of the range is not affected.
    assert!(rig.engine.revoke_device_memory(DEVICE + PAGE, 2 * PAGE));
    assert_eq!(rig.mapper(1).mappings().len(), 2);
    assert!(rig.engine.revoke_device_memory(DEVICE + 3 * PAGE, u64::MAX));
    rig.ram.show_device(false);
    for id in [1, 2] {
        assert_eq!(rig.mapper(id).mappings().keys().copied().collect::<Vec<_>>(), [PAGE]);
    }
    // An endpoint that is attached later has no access to the revoked memory. The driver can remove the mapping as usual.
    rig.all_ok([detach(2, 1)]);
    assert!(rig.engine.revoke_device_memory(0, u64::MAX));
    rig.all_ok([attach(2, 1)]);
    assert!(rig.mapper(2).is_empty());
    assert_eq!(rig.status(&map(1, PAGE, 2 * PAGE - 1, 0, READ)), INVAL, "the driver has not removed it");
    rig.all_ok([unmap_pages(1, 1), unmap_pages(2, 1), map(1, PAGE, 2 * PAGE - 1, 0, READ)]);
    assert_eq!(rig.engine.counters().mappings, 1);
    assert_eq!(rig.status(&map_device(5, 1, 0, READ)), INVAL, "the guest does not see it");
}

#[test]
fn revoke_fails_while_the_host_cannot_unmap() {
    let mut rig = rig(false);
    rig.all_ok([attach(1, 1), map_device(1, 1, 0, READ)]);
    rig.mapper(1).refuse_unmaps(true);
    assert!(!rig.engine.revoke_device_memory(DEVICE, SIZE as u64));
    assert!(!rig.engine.revoke_device_memory(DEVICE, SIZE as u64));
    assert_eq!(rig.status(&unmap_pages(1, 1)), DEVERR);
    rig.mapper(1).refuse_unmaps(false);
    assert!(rig.engine.revoke_device_memory(DEVICE, SIZE as u64));
    rig.all_ok([unmap_pages(1, 1)]);
    rig.assert_host_is_clean();
}

#[test]
fn device_memory_is_mapped_for_all_endpoints_or_none() {
    let mut rig = rig(false);
    rig.all_ok([attach(1, 1), attach(2, 1)]);
    rig.mapper(2).fail_map(0);
    assert_eq!(rig.status(&map_device(1, 1, 0, READ)), DEVERR);
    rig.assert_host_is_clean();
    rig.mapper(2).exhaust_map(0);
    assert_eq!(rig.status(&map_device(1, 1, 0, READ)), NOMEM);
    rig.all_ok([map_device(1, 1, 0, READ)]);
}

#[test]
fn batch_with_device_memory_is_unmapped_completely() {
    let mut rig = rig(false);
    rig.all_ok([attach(1, 1), map(1, 0, PAGE - 1, 0, BOTH), map_device(1, 1, 0, READ)]);
    let decode = |(tag, request): (u16, Vec<u8>)| UnmapRequest::decode(&request, 4, tag);
    let mut unmaps: Vec<_> = (0..).zip([unmap_pages(0, 1), unmap_pages(1, 1)]).filter_map(decode).collect();
    rig.engine.handle_unmaps(&mut unmaps);
    assert!(unmaps.iter().all(|unmap| unmap.reply() == [OK, 0, 0, 0]));
    rig.assert_host_is_clean();
}

#[test]
fn device_memory_is_part_of_the_state() {
    let mut saved = rig(false);
    saved.all_ok([attach(1, 1), map_device(1, 1, 2, READ), map_device(2, 1, 0, READ)]);
    assert!(saved.engine.revoke_device_memory(DEVICE, PAGE));
    let state: EngineState = saved.engine.state();
    let mut restored = rig(false);
    restored.engine.restore(&state).expect("the state is valid");
    assert!(restored.mapper(1).is_empty(), "the guest may not see the device yet");
    restored.engine.restore_device_memory().expect("the guest sees the device at the same place");
    let mappings = restored.mapper(1).mappings();
    assert_eq!(mappings.keys().copied().collect::<Vec<_>>(), [PAGE], "a dead mapping is not restored");
    assert_eq!(mappings[&PAGE].host_address, restored.ram.host_address(DEVICE + 2 * PAGE));
    let hidden = rig(false);
    hidden.ram.show_device(false);
    let mut engine = hidden.engine;
    engine.restore(&state).expect("the guest may see the device later");
    let error = engine.restore_device_memory().expect_err("the guest does not see the device");
    assert!(error.to_string().contains("mapping of device memory at 0x1000"), "{error}");
}

#[test]
fn map_without_the_flag_finds_device_memory() {
    for features in [u64::MAX, !feature::MMIO] {
        let mut rig = rig(false);
        rig.engine.accept_features(rig.engine.features() & features);
        rig.all_ok([attach(1, 1), map_plainly(5, 2, 1, BOTH)]);
        let found = rig.mapper(1).translate(6 * PAGE).map(|(address, allowed)| (address, allowed.bits()));
        assert_eq!(found, Some((rig.ram.host_address(DEVICE + 2 * PAGE), BOTH)));
        assert_eq!(rig.status(&map_plainly(0x10, 2, 3, READ)), INVAL, "the device memory ends before the range");
        assert_eq!(rig.status(&map(1, 0, PAGE - 1, DEVICE - PAGE, READ)), INVAL, "nothing is there");
        assert_eq!(rig.status(&map(1, 0, 2 * PAGE - 1, 0xf_f000, READ)), INVAL, "RAM ends before the range");
        assert!(rig.engine.revoke_device_memory(DEVICE, SIZE as u64));
        assert!(rig.mapper(1).is_empty());
        rig.all_ok([unmap_pages(5, 2)]);
        rig.assert_host_is_clean();
    }
    let mut read_only = rig(true);
    read_only.all_ok([attach(1, 1), map_plainly(0, 1, 0, READ)]);
    assert_eq!(read_only.status(&map_plainly(1, 1, 0, BOTH)), INVAL);
}

#[test]
fn map_fails_if_the_host_cannot_map_device_memory() {
    let mut rig = rig(false);
    rig.all_ok([attach(1, 1), attach(2, 1)]);
    rig.mapper(2).fail_map(0);
    assert_eq!(rig.status(&map_plainly(1, 1, 0, READ)), DEVERR);
    rig.assert_host_is_clean();
    rig.all_ok([map_plainly(1, 1, 0, READ)]);
}

#[test]
fn pages_of_files_count_toward_the_cap_and_registers_do_not() {
    let limits = Limits { max_mapped_bytes: 2 * PAGE, ..Limits::default() };
    let mut rig = rig_with_file(limits);
    rig.all_ok([attach(1, 1), map_plainly(0, 1, 0, BOTH), map_device(1, 1, 1, READ)]);
    let counters = rig.engine.counters();
    assert_eq!((counters.mapped_bytes, counters.pinned_bytes), (2 * PAGE, 2 * PAGE));
    assert_eq!(rig.status(&map_plainly(2, 1, 2, READ)), NOMEM);
    assert_eq!(rig.status(&map_device(2, 1, 2, READ)), NOMEM);
    assert_eq!(rig.status(&map(1, 2 * PAGE, 3 * PAGE - 1, 0, READ)), NOMEM);
    assert_eq!(rig.status(&attach(2, 1)), NOMEM, "each address space counts");
    assert!(rig.engine.revoke_device_memory(DEVICE, PAGE));
    assert_eq!(rig.engine.counters().mapped_bytes, PAGE);
    rig.all_ok([attach(2, 1), unmap_pages(0, 2)]);
    let counters = rig.engine.counters();
    assert_eq!((counters.mapped_bytes, counters.pinned_bytes, counters.mappings), (0, 0, 0));
    rig.all_ok([map(1, 0, PAGE - 1, 0, READ)]);

    let mut registers = self::rig(false);
    registers.engine.set_max_mapped_bytes(Some(PAGE)).expect("it is not 0");
    registers.all_ok([attach(1, 1), map(1, 0, PAGE - 1, 0, READ), map_plainly(1, 4, 0, READ)]);
    assert_eq!(registers.engine.counters().mapped_bytes, PAGE);
}

#[test]
fn files_are_mapped_in_pieces_that_can_be_interrupted() {
    let mut rig = rig_with_file(Limits { max_step: PAGE, ..Limits::default() });
    rig.all_ok([attach(1, 1), map_plainly(0, 4, 0, BOTH)]);
    assert_eq!(rig.mapper(1).mappings().len(), 4);
    rig.all_ok([unmap_pages(0, 4)]);
    rig.engine.interrupt().want(true);
    let mut reply = [0; 4];
    assert_eq!(rig.engine.handle(&map_plainly(0, 4, 0, BOTH), &mut reply), 0);
    assert!(rig.engine.take_interrupted());
    rig.assert_host_is_clean();
    rig.engine.interrupt().want(false);
    rig.mapper(1).fail_map(2);
    assert_eq!(rig.status(&map_plainly(0, 4, 0, BOTH)), DEVERR);
    rig.assert_host_is_clean();
    rig.all_ok([map_plainly(0, 4, 0, BOTH)]);
}
