// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests with host calls that fail. The engine undoes the earlier steps of the request, or handles a failure of the undo.

use super::*;
use crate::test_utils::*;

/// Returns a rig with endpoints 1 and 2 in domain 1, which has two mappings.
fn pair() -> Rig {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), attach(2, 1), map(1, 0x1000, 0x1fff, 0, READ), map(1, 0x3000, 0x4fff, 0x8000, BOTH)]);
    rig
}

/// Sends a request that must fail with this status and leave every mapper unchanged.
fn fails_without_trace(rig: &mut Rig, request: &[u8], status: u8) {
    let before: Vec<_> = rig.mappers.values().map(MapperProbe::mappings).collect();
    let counted = rig.engine.counters();
    assert_eq!(rig.status(request), status);
    let after: Vec<_> = rig.mappers.values().map(MapperProbe::mappings).collect();
    assert_eq!(before, after);
    let now = rig.engine.counters();
    assert_eq!(counted.mappings, now.mappings);
    assert_eq!(counted.mapped_bytes, now.mapped_bytes);
    assert_eq!(counted.window_bytes, now.window_bytes);
    assert_eq!(now.stuck_ranges, 0);
}

#[test]
fn map_that_fails_in_one_endpoint_is_undone_in_all() {
    for (id, status) in [(1, DEVERR), (2, DEVERR), (1, NOMEM), (2, NOMEM)] {
        let mut rig = pair();
        match status {
            NOMEM => rig.mapper(id).exhaust_map(0),
            _ => rig.mapper(id).fail_map(0),
        }
        fails_without_trace(&mut rig, &map(1, 0x6000, 0x6fff, 0, READ), status);
        rig.all_ok([map(1, 0x6000, 0x6fff, 0, READ)]);
    }
}

#[test]
fn map_in_parts_that_fails_is_undone() {
    let mut rig = pair();
    rig.mapper(2).fail_map(1);
    let request = map(1, 0x6000, 0x7fff, SECOND_REGION - PAGE, READ);
    fails_without_trace(&mut rig, &request, DEVERR);
}

#[test]
fn unmap_that_fails_keeps_the_mapping() {
    for id in [1, 2] {
        let mut rig = pair();
        rig.mapper(id).fail_unmap(0);
        fails_without_trace(&mut rig, &unmap(1, 0x1000, 0x1fff), DEVERR);
        assert_eq!(rig.status(&map(1, 0x1000, 0x1fff, 0, READ)), INVAL);
        rig.all_ok([unmap(1, 0x1000, 0x1fff)]);
    }
}

#[test]
fn failed_unmap_keeps_earlier_mappings_removed() {
    let mut rig = pair();
    rig.mapper(2).fail_unmap(1);
    assert_eq!(rig.status(&unmap(1, 0, 0xffff)), DEVERR);
    assert_eq!(rig.mapper(1).mappings(), rig.mapper(2).mappings());
    assert_eq!(rig.mapper(1).mappings().len(), 1);
    assert_eq!(rig.engine.counters().mappings, 1);
    rig.all_ok([unmap(1, 0, 0xffff)]);
    assert_eq!(rig.engine.counters().mapped_bytes, 0);
}

#[test]
fn unmap_that_cannot_be_undone_succeeds_after_host_recovers() {
    let mut rig = pair();
    rig.mapper(2).refuse_unmaps(true);
    rig.mapper(1).fail_map(0);
    assert_eq!(rig.status(&unmap(1, 0x1000, 0x1fff)), DEVERR);
    assert_eq!(rig.mapper(1).mappings().len(), 1);
    assert_eq!(rig.mapper(2).mappings().len(), 2, "it is stuck");
    assert_eq!(rig.engine.counters().mappings, 1);
    assert_eq!(rig.engine.counters().stuck_ranges, 1);
    // The domain accepts no more mappings, and an UNMAP of the stuck range fails.
    assert_eq!(rig.status(&map(1, 0x1000, 0x1fff, 0, READ)), DEVERR);
    assert_eq!(rig.status(&window_add(1, BOTH, APERTURE)), DEVERR);
    assert_eq!(rig.status(&unmap(1, 0x1000, 0x1fff)), DEVERR);
    assert_eq!(rig.status(&unmap(1, 0x8000, 0x8fff)), OK);
    rig.mapper(2).heal();
    rig.all_ok([unmap(1, 0x1000, 0x1fff)]);
    assert_eq!(rig.engine.counters().stuck_ranges, 0);
    assert_eq!(rig.mapper(1).mappings(), rig.mapper(2).mappings());
    rig.all_ok([map(1, 0x1000, 0x1fff, 0, READ)]);
}

#[test]
fn map_that_cannot_be_undone_is_retried() {
    let mut rig = pair();
    rig.mapper(1).refuse_unmaps(true);
    rig.mapper(2).fail_map(0);
    assert_eq!(rig.status(&map(1, 0x6000, 0x6fff, 0, READ)), DEVERR);
    assert_eq!(rig.engine.counters().mappings, 2);
    assert_eq!(rig.engine.counters().stuck_ranges, 1);
    rig.mapper(1).heal();
    rig.all_ok([map(1, 0x6000, 0x6fff, 0, READ)]);
    assert_eq!(rig.mapper(1).mappings(), rig.mapper(2).mappings());
    assert_eq!(rig.engine.counters().stuck_ranges, 0);
}

/// Returns a rig with endpoints 1 and 2 in domain 1, and endpoint 3 in domain 2. Both domains have a mapping at the same IOVA,
/// and a chunk.
fn two_domains() -> Rig {
    let mut rig = pair();
    rig.all_ok([attach(3, 2), map(2, 0x1000, 0x2fff, 0x2000, WRITE)]);
    rig.add_chunk(1, APERTURE);
    rig.add_chunk(2, APERTURE);
    rig
}

#[test]
fn first_attach_that_fails_changes_nothing() {
    for after in 0..3 {
        let mut rig = two_domains();
        rig.all_ok([detach(2, 1)]);
        rig.mapper(2).fail_map(after);
        fails_without_trace(&mut rig, &attach(2, 1), DEVERR);
        assert_eq!(rig.status(&detach(2, 1)), INVAL, "it is not attached");
        rig.all_ok([attach(2, 1)]);
    }
}

#[test]
fn attach_elsewhere_that_fails_changes_nothing() {
    for (id, to) in [(3, 1), (1, 2), (2, 2)] {
        for after in 0..2 {
            let mut rig = two_domains();
            rig.mapper(id).exhaust_map(after);
            fails_without_trace(&mut rig, &attach(id, to), NOMEM);
            let mut rig = two_domains();
            rig.mapper(id).fail_unmap(after);
            fails_without_trace(&mut rig, &attach(id, to), DEVERR);
            rig.all_ok([attach(id, to)]);
        }
    }
}

#[test]
fn attach_that_cannot_be_undone_leaves_the_endpoint_detached() {
    let mut rig = two_domains();
    // Endpoint 3 moves to domain 1. The first two map calls succeed, the third map call fails, and the undo fails too.
    rig.mapper(3).fail_map(2);
    rig.mapper(3).fail_unmap(2);
    assert_eq!(rig.status(&attach(3, 1)), DEVERR);
    assert_eq!(rig.status(&detach(3, 2)), INVAL, "it is not attached");
    assert!(rig.mapper(3).is_empty(), "the unmap was retried");
    assert_eq!(rig.status(&map(2, 0, 0xfff, 0, READ)), NOENT);
    assert_eq!(rig.chunks.backed(), 1, "the chunk of domain 2 is released");
    rig.all_ok([attach(3, 1)]);
    assert_eq!(rig.mapper(3).mappings(), rig.mapper(1).mappings());
}

#[test]
fn restoring_that_fails_leaves_the_endpoint_detached() {
    let mut rig = two_domains();
    // Endpoint 3 leaves domain 2. The mapping is unmapped, but the unmap of the chunk fails. Mapping the range again fails too.
    rig.mapper(3).fail_unmap(1);
    rig.mapper(3).fail_map(0);
    assert_eq!(rig.status(&attach(3, 1)), DEVERR);
    assert_eq!(rig.chunks.backed(), 2, "the device can still access the chunk");
    assert_eq!(rig.engine.counters().stuck_ranges, 1);
    rig.all_ok([attach(3, 1)]);
    assert_eq!(rig.chunks.backed(), 1);
    assert_eq!(rig.mapper(3).mappings(), rig.mapper(1).mappings());
    rig.assert_reset_cleans_host();
}

#[test]
fn failed_detach_still_detaches_and_blocks_memory_reuse() {
    let mut rig = two_domains();
    rig.mapper(3).refuse_unmaps(true);
    assert_eq!(rig.status(&detach(3, 2)), DEVERR);
    assert_eq!(rig.engine.counters().stuck_ranges, 2);
    assert_eq!(rig.chunks.backed(), 2, "the device can still access one");
    let counters = rig.engine.counters();
    assert_eq!(counters.window_bytes, 2 * CHUNK, "it counts in the budget");
    assert_eq!(counters.mapped_bytes, 2 * 0x3000 + 0x2000, "it is pinned");
    assert_eq!(rig.status(&attach(3, 1)), DEVERR);
    assert_eq!(rig.status(&attach(3, 2)), DEVERR);
    let offset = rig.add_chunk(1, APERTURE + CHUNK);
    assert_eq!(offset, 2 * CHUNK, "not the one that the device can still access");
    rig.mapper(3).heal();
    rig.all_ok([attach(3, 2)]);
    assert!(rig.mapper(3).is_empty());
    assert_eq!(rig.chunks.backed(), 2);
    rig.assert_reset_cleans_host();
}

#[test]
fn reset_that_fails_is_finished_later() {
    let mut rig = two_domains();
    rig.mapper(1).refuse_unmaps(true);
    rig.engine.reset();
    assert!(rig.mapper(2).is_empty() && rig.mapper(3).is_empty());
    assert_eq!(rig.engine.counters().mappings, 0);
    assert_eq!(rig.chunks.backed(), 1);
    rig.mapper(1).heal();
    rig.assert_reset_cleans_host();
}

#[test]
fn endpoint_removed_with_a_stuck_range_loses_the_chunk() {
    let mut rig = two_domains();
    rig.mapper(3).refuse_unmaps(true);
    let mapper = rig.engine.remove_endpoint(3).expect("it exists");
    assert_eq!(rig.engine.counters().stuck_ranges, 0);
    assert_eq!(rig.engine.counters().lost_chunks, 1);
    drop(mapper);
    rig.engine.reset();
    assert_eq!(rig.chunks.backed(), 1, "it is never reused");
    assert_eq!(rig.engine.counters().window_bytes, CHUNK);
    assert_eq!(rig.engine.counters().mapped_bytes, 0);
}

#[test]
fn chunk_stuck_in_removed_endpoint_is_lost_at_window_del() {
    let mut rig = two_domains();
    rig.mapper(1).refuse_unmaps(true);
    assert_eq!(rig.status(&detach(1, 1)), DEVERR);
    rig.engine.remove_endpoint(1).expect("it exists");
    assert_eq!(rig.engine.counters().lost_chunks, 0, "domain 1 still has it");
    rig.all_ok([window_del(1, APERTURE)]);
    assert_eq!(rig.engine.counters().lost_chunks, 1);
    assert_eq!(rig.chunks.backed(), 2);
}

#[test]
fn window_add_that_fails_is_undone() {
    for (id, status) in [(1, DEVERR), (2, DEVERR), (1, NOMEM), (2, NOMEM)] {
        let mut rig = pair();
        match status {
            NOMEM => rig.mapper(id).exhaust_map(0),
            _ => rig.mapper(id).fail_map(0),
        }
        fails_without_trace(&mut rig, &window_add(1, BOTH, APERTURE), status);
        assert_eq!(rig.chunks.backed(), 0);
        rig.add_chunk(1, APERTURE);
    }
}

#[test]
fn window_add_without_memory_changes_nothing() {
    let mut rig = pair();
    rig.chunks.exhaust_back();
    fails_without_trace(&mut rig, &window_add(1, BOTH, APERTURE), NOMEM);
    rig.chunks.fail_back();
    fails_without_trace(&mut rig, &window_add(1, BOTH, APERTURE), DEVERR);
    rig.add_chunk(1, APERTURE);
}

#[test]
fn window_add_that_cannot_be_undone_keeps_the_chunk_from_reuse() {
    let mut rig = pair();
    rig.mapper(1).refuse_unmaps(true);
    rig.mapper(2).fail_map(0);
    assert_eq!(rig.status(&window_add(1, BOTH, APERTURE)), DEVERR);
    assert_eq!(rig.chunks.backed(), 1);
    assert_eq!(rig.status(&window_del(1, APERTURE)), NOENT);
    rig.mapper(1).heal();
    assert_eq!(rig.status(&window_del(1, APERTURE)), NOENT);
    assert_eq!(rig.chunks.backed(), 0);
    assert_eq!(rig.engine.counters().window_bytes, 0);
}

#[test]
fn window_del_that_fails_keeps_the_chunk() {
    for id in [1, 2] {
        let mut rig = pair();
        rig.add_chunk(1, APERTURE);
        rig.mapper(id).fail_unmap(0);
        fails_without_trace(&mut rig, &window_del(1, APERTURE), DEVERR);
        assert_eq!(rig.chunks.backed(), 1);
        rig.all_ok([window_del(1, APERTURE)]);
        assert_eq!(rig.chunks.backed(), 0);
    }
}

#[test]
fn stuck_window_del_frees_the_chunk_after_host_recovers() {
    let mut rig = pair();
    rig.add_chunk(1, APERTURE);
    rig.mapper(2).refuse_unmaps(true);
    rig.mapper(1).fail_map(0);
    assert_eq!(rig.status(&window_del(1, APERTURE)), DEVERR);
    assert_eq!(rig.chunks.backed(), 1);
    rig.mapper(2).heal();
    assert_eq!(rig.status(&window_del(1, APERTURE)), NOENT);
    assert_eq!(rig.chunks.backed(), 0);
    rig.add_chunk(1, APERTURE);
}

#[test]
fn chunk_that_cannot_be_released_counts_in_the_budget() {
    let mut rig = pair();
    rig.add_chunk(1, APERTURE);
    rig.chunks.fail_release();
    rig.all_ok([window_del(1, APERTURE)]);
    assert_eq!(rig.engine.counters().lost_chunks, 1);
    assert_eq!(rig.engine.counters().window_bytes, CHUNK);
    for place in 1..BUDGET_CHUNKS {
        assert_ne!(rig.add_chunk(1, APERTURE + place * CHUNK), 0);
    }
    assert_eq!(rig.status(&window_add(1, BOTH, APERTURE)), NOMEM);
    rig.engine.reset();
    assert_eq!(rig.engine.counters().window_bytes, CHUNK);
    assert_eq!(rig.chunks.backed(), 1);
}

/// Returns a rig with `chunks` lost chunks. The chunks were lost in the order of their IOVAs.
fn lost(chunks: u64) -> Rig {
    let mut rig = pair();
    for place in 0..chunks {
        rig.add_chunk(1, APERTURE + place * CHUNK);
    }
    for place in 0..chunks {
        rig.chunks.fail_release();
        rig.all_ok([window_del(1, APERTURE + place * CHUNK)]);
    }
    assert_eq!(rig.engine.counters().lost_chunks, chunks);
    rig
}

#[test]
fn lost_chunk_is_retried_per_window_request_until_released() {
    let mut rig = lost(1);
    let before = rig.chunks.recoveries();
    rig.add_chunk(1, APERTURE);
    rig.all_ok([window_del(1, APERTURE)]);
    assert_eq!(rig.chunks.recoveries(), before + 2, "once per request");
    assert_eq!((rig.engine.counters().lost_chunks, rig.engine.counters().window_bytes), (1, CHUNK));

    rig.chunks.set_recovers(true);
    for place in 0..BUDGET_CHUNKS {
        rig.add_chunk(1, APERTURE + place * CHUNK);
    }
    assert_eq!((rig.engine.counters().lost_chunks, rig.chunks.recoveries()), (0, before + 3));
    assert_eq!(rig.engine.counters().window_bytes, BUDGET_CHUNKS * CHUNK, "the whole budget is available again");
}

#[test]
fn window_request_recovers_one_lost_chunk_and_a_reset_all() {
    let mut rig = lost(3);
    rig.chunks.set_recovers(true);
    let before = rig.chunks.recoveries();
    rig.add_chunk(1, APERTURE);
    assert_eq!((rig.engine.counters().lost_chunks, rig.chunks.recoveries()), (2, before + 1));
    rig.engine.reset();
    assert_eq!(rig.engine.counters().lost_chunks, 0);
    assert_eq!((rig.chunks.backed(), rig.engine.counters().window_bytes), (0, 0));
}

#[test]
fn refused_request_does_not_retry_lost_chunks() {
    let mut rig = lost(1);
    let before = rig.chunks.recoveries();
    assert_eq!(rig.status(&window_del(1, APERTURE)), NOENT);
    assert_eq!(rig.status(&window_del(9, APERTURE)), NOENT);
    assert_eq!(rig.chunks.recoveries(), before);
}
