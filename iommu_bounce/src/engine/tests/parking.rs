// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of parking: chunks that survive a reset of the VM.

use vm_memory::Bytes;

use super::*;
use crate::DmaMapper;
use crate::test_utils::*;

/// Returns a rig whose VM was not reset yet. Endpoints 1 and 2 are in separate domains, and each domain has a chunk.
fn windowed() -> Rig {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), attach(2, 2), map(1, 0, 0xfff, 0, READ)]);
    rig.add_chunk(1, APERTURE);
    rig.add_chunk(2, APERTURE);
    rig
}

/// Resets the VM. Then does what the next driver does, up to the negotiation of features.
fn reboot(rig: &mut Rig) {
    rig.engine.system_reset();
    // A driver starts with its own reset of the device.
    rig.engine.reset();
    rig.engine.accept_features(u64::MAX);
}

#[test]
fn rebooted_guest_reuses_parked_chunks_without_host_calls() {
    let mut rig = windowed();
    let host = rig.mapper(1).translate(APERTURE).expect("it is mapped");
    reboot(&mut rig);
    assert_eq!((rig.chunks.parked(), rig.chunks.backed()), (2, 2));
    assert_eq!(rig.mapper(1).mappings().len(), 1, "only the chunk is left");
    let parked = |rig: &Rig| rig.engine.report().endpoints.iter().map(|of| of.parked_bytes).collect::<Vec<_>>();
    assert_eq!(parked(&rig), [CHUNK, CHUNK, 0], "by endpoint");
    rig.all_ok([attach(1, 7)]);
    assert_eq!(rig.status(&window_del(7, APERTURE)), NOENT, "a parked chunk does not belong to the domain");
    let before = rig.engine.counters();
    let offset = rig.add_chunk(7, APERTURE);
    let after = rig.engine.counters();
    assert_eq!((before.host_maps, before.host_unmaps), (after.host_maps, after.host_unmaps));
    assert_eq!((after.parked_chunks, after.unparked_chunks), (1, 1));
    assert_eq!(parked(&rig), [0, CHUNK, 0]);
    assert_eq!(rig.mapper(1).translate(APERTURE), Some(host));
    assert_eq!(offset, 0, "the chunk is at the same place");
    rig.all_ok([window_del(7, APERTURE)]);
    assert!(rig.mapper(1).is_empty());
}

#[test]
fn parked_chunks_are_released_before_the_budget_is_exhausted() {
    let mut rig = windowed();
    reboot(&mut rig);
    rig.all_ok([attach(3, 1)]);
    for chunk in 0..BUDGET_CHUNKS {
        rig.add_chunk(1, APERTURE + chunk * CHUNK);
        assert!(u64::from(rig.chunks.backed()) <= BUDGET_CHUNKS);
    }
    assert_eq!(rig.status(&window_add(1, BOTH, APERTURE + BUDGET_CHUNKS * CHUNK)), NOMEM);
    assert_eq!(rig.chunks.parked(), 0);
    assert!(rig.mapper(1).is_empty() && rig.mapper(2).is_empty());
}

#[test]
fn parked_chunk_is_released_before_a_request_is_refused() {
    for (id, request) in [(3, map(1, 0x1000, 0x1fff, 0, READ)), (3, window_add(1, BOTH, APERTURE)), (2, attach(2, 1))] {
        let mut rig = windowed();
        reboot(&mut rig);
        rig.all_ok([attach(3, 1), map(1, 0, 0xfff, 0, READ)]);
        rig.mapper(id).exhaust_map(0);
        let tail = rig.send(&request).last_chunk::<4>().copied().expect("there is a tail");
        assert_eq!(tail[0], OK, "{request:x?}");
        assert_eq!(rig.chunks.parked(), 1, "one is enough");
    }
}

#[test]
fn refused_request_with_stuck_range_evicts_no_parked_chunks() {
    for request in [map(9, 0x1000, 0x1fff, 0, READ), window_add(9, BOTH, APERTURE + CHUNK)] {
        let mut rig = windowed();
        reboot(&mut rig);
        rig.all_ok([attach(1, 9), attach(3, 9)]);
        // The map call for endpoint 3 fails. The undo for endpoint 1 fails too.
        rig.mapper(3).exhaust_map(0);
        rig.mapper(1).refuse_unmaps(true);
        let tail = rig.send(&request).last_chunk::<4>().copied().expect("there is a tail");
        assert_eq!(tail[0], NOMEM, "{request:x?}");
        assert_eq!(rig.engine.counters().stuck_ranges, 1);
        assert_eq!((rig.mapper(3).is_empty(), rig.chunks.parked()), (true, 2));
        rig.mapper(1).heal();
        let tail = rig.send(&request).last_chunk::<4>().copied().expect("there is a tail");
        assert_eq!((tail[0], rig.engine.counters().stuck_ranges), (OK, 0), "{request:x?}");
    }
}

#[test]
fn lowered_budget_evicts_parked_chunks() {
    let mut rig = windowed();
    reboot(&mut rig);
    assert!(rig.engine.set_budget(CHUNK).expect("it fits"));
    assert_eq!((rig.chunks.parked(), rig.chunks.backed()), (1, 1));
    assert!(rig.engine.set_budget(0).expect("it fits"));
    rig.assert_host_is_clean();
}

#[test]
fn lowered_budget_evicts_guest_chunks_once_reset_parks_them() {
    let mut rig = windowed();
    rig.engine.set_budget(CHUNK).expect("it fits");
    assert_eq!(rig.chunks.backed(), 2, "nothing is taken away from a domain");
    reboot(&mut rig);
    assert_eq!((rig.chunks.parked(), rig.chunks.backed()), (1, 1));
    rig.engine.set_budget(0).expect("it fits");
    rig.all_ok([attach(1, 1)]);
    assert_eq!(rig.status(&window_add(1, BOTH, APERTURE)), NOMEM);
    rig.assert_host_is_clean();
}

#[test]
fn other_permissions_take_a_new_chunk() {
    let mut rig = windowed();
    reboot(&mut rig);
    rig.all_ok([attach(1, 1)]);
    let reply = rig.send(&window_add(1, READ, APERTURE));
    assert_eq!(reply[8], OK);
    assert_eq!(rig.mapper(1).mappings()[&APERTURE].permissions, crate::Permissions::READ);
    assert_eq!((rig.chunks.parked(), rig.chunks.backed()), (1, 2));
}

#[test]
fn device_reset_unmaps_chunks_at_once() {
    let mut rig = windowed();
    rig.assert_reset_cleans_host();
    // A device reset also unmaps chunks that were parked before the current driver started.
    let mut rig = windowed();
    reboot(&mut rig);
    rig.assert_reset_cleans_host();
}

#[test]
fn driver_without_windows_finds_the_aperture_empty() {
    let mut rig = windowed();
    rig.engine.system_reset();
    rig.engine.accept_features(!feature::ANY_BOUNCE_WINDOW);
    rig.assert_host_is_clean();
    rig.all_ok([attach(1, 1), map(1, APERTURE, APERTURE + 0xfff, 0, READ)]);
}

#[test]
fn chunk_shared_by_separate_address_spaces_is_not_parked() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), attach(2, 1)]);
    rig.add_chunk(1, APERTURE);
    rig.engine.system_reset();
    rig.assert_host_is_clean();
}

#[test]
fn chunk_of_endpoint_without_hidden_chunks_is_not_parked() {
    let mut rig = Rig::new();
    let mapper = RecordingMapper::new().without_hidden_chunks();
    let emulated = mapper.probe();
    rig.engine.add_endpoint(11, Box::new(mapper)).unwrap();
    rig.all_ok([attach(11, 1), attach(1, 2)]);
    rig.add_chunk(1, APERTURE);
    rig.add_chunk(2, APERTURE);

    reboot(&mut rig);

    assert!(emulated.is_empty(), "it could access memory of other domains at places without a chunk");
    assert_eq!((rig.chunks.parked(), rig.chunks.backed()), (1, 1));
}

#[test]
fn endpoint_that_joins_a_domain_loses_its_parked_chunk() {
    let mut rig = windowed();
    reboot(&mut rig);
    rig.all_ok([attach(3, 1)]);
    rig.add_chunk(1, APERTURE);
    rig.all_ok([attach(1, 1)]);
    assert_eq!(rig.mapper(1).mappings(), rig.mapper(3).mappings());
    assert_eq!(rig.engine.counters().parked_chunks, 1);
    // Endpoint 2 still has a parked chunk at the IOVA of the new chunk in domain 4.
    rig.all_ok([attach(2, 4), attach(1, 4)]);
    let host = |rig: &Rig, id| rig.mapper(id).translate(APERTURE);
    let parked = host(&rig, 2);
    rig.add_chunk(4, APERTURE);
    assert!(host(&rig, 2) == host(&rig, 1) && host(&rig, 2) != parked);
}

#[test]
fn endpoint_joining_address_space_cannot_reach_parked_chunks() {
    let mut rig = Rig::new();
    let group = TestGroup::default();
    for id in [11, 12] {
        let limits = RecordingMapper::new().limits();
        let mapper = group.mapper(id, limits);
        rig.chunks.watch(mapper.probe());
        rig.mappers.insert(id, mapper.probe());
        rig.engine.add_endpoint(id, Box::new(mapper)).expect("it is valid");
    }
    rig.all_ok([attach(11, 1)]);
    rig.add_chunk(1, APERTURE);
    rig.add_chunk(1, APERTURE + CHUNK);
    reboot(&mut rig);
    rig.all_ok([attach(11, 1)]);
    rig.add_chunk(1, APERTURE);
    assert_eq!(rig.engine.counters().parked_chunks, 1);
    rig.all_ok([attach(12, 1)]);
    assert!(group.mapper_of(12).translate(APERTURE).is_some());
    assert!(group.mapper_of(12).translate(APERTURE + CHUNK).is_none());
    // The chunk of both endpoints is parked in the address space that the endpoints share. An endpoint that leaves this address space loses
    // the chunk.
    reboot(&mut rig);
    assert_eq!(rig.engine.counters().parked_chunks, 1);
    rig.all_ok([attach(11, 1), attach(12, 2)]);
    assert!(group.mapper_of(11).is_empty());
    rig.add_chunk(2, APERTURE);
    assert_eq!(rig.engine.counters().unparked_chunks, 2);
}

#[test]
fn failed_park_or_unpark_replaces_only_that_chunk() {
    let mut rig = windowed();
    rig.chunks.fail_park();
    reboot(&mut rig);
    assert_eq!((rig.chunks.parked(), rig.chunks.backed()), (1, 1));
    rig.chunks.fail_park();
    rig.all_ok([attach(1, 1), attach(2, 2)]);
    rig.add_chunk(2, APERTURE);
    rig.add_chunk(1, APERTURE);
    assert_eq!((rig.chunks.parked(), rig.chunks.backed()), (0, 2));
    assert_eq!(rig.engine.counters().unparked_chunks, 0);
}

#[test]
fn parked_chunk_that_cannot_be_unmapped_is_not_reused() {
    let mut rig = windowed();
    reboot(&mut rig);
    rig.mapper(1).refuse_unmaps(true);
    assert!(rig.engine.set_budget(0).expect("it fits"));
    assert_eq!((rig.chunks.backed(), rig.engine.counters().stuck_ranges), (1, 1));
    rig.mapper(1).heal();
    rig.assert_reset_cleans_host();
}

#[test]
fn removed_endpoint_releases_its_parked_chunks() {
    let mut rig = windowed();
    reboot(&mut rig);
    rig.engine.remove_endpoint(1).expect("it exists");
    assert!(rig.mapper(1).is_empty());
    assert_eq!((rig.chunks.parked(), rig.engine.counters().parked_chunks), (1, 1));
}

#[test]
fn parked_memory_is_zero_after_each_reset() {
    let mut store = TestChunks::new(CHUNK, 1);
    use crate::ChunkStore;
    let index = store.back().expect("there is room");
    store.memory(index).expect("it is backed").write_obj(7u8, 5).expect("it is inside");
    store.park(index).expect("it parks");
    assert!(store.memory(index).is_none());
    store.unpark(index).expect("it is shown");
    let byte: u8 = store.memory(index).expect("it is backed").read_obj(5).expect("it is inside");
    assert_eq!(byte, 0);
}
