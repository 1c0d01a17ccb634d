// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of framing: replies to requests that are too short, unknown, or without room for a reply.

use super::*;
use crate::test_utils::*;

/// Empty reply, because the engine does not answer the request.
const NOTHING: [u8; 0] = [];

#[test]
fn unknown_type_is_not_answered() {
    let mut rig = Rig::new();
    for kind in [0, 6, 0x3f, 0x43, 0xff] {
        assert_eq!(rig.send_with_room(&[kind; 64], 64), NOTHING);
    }
    assert_eq!(rig.engine.counters().requests.invalid, 5);
    assert_eq!(rig.engine.counters().failed.invalid, 5);
}

#[test]
fn empty_request_is_not_answered() {
    let mut rig = Rig::new();
    assert_eq!(rig.send_with_room(&[], 64), NOTHING);
}

#[test]
fn every_truncation_is_invalid_and_changes_nothing() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1)]);
    let whole = [
        attach(2, 1),
        detach(1, 1),
        map(1, 0, 0xfff, 0, BOTH),
        unmap(1, 0, 0xfff),
        probe(1),
        window_add(1, BOTH, APERTURE),
        window_del(1, APERTURE),
        map_list(1, 0, BOTH, &[(0, 0x1000), (0x2000, 0x1000)]),
    ];
    let mut sent = 0;
    for request in &whole {
        for len in 1..request.len() {
            assert_eq!(rig.status(&request[..len]), INVAL, "{len} of {request:x?}");
            sent += 1;
        }
    }
    assert_eq!(rig.engine.counters().requests.invalid, sent);
    assert!(rig.mapper(1).is_empty() && rig.mapper(2).is_empty());
    assert_eq!(rig.status(&detach(1, 1)), OK);
    assert_eq!(rig.status(&detach(2, 1)), INVAL, "it is not attached");
}

#[test]
fn longer_request_is_served() {
    let mut rig = Rig::new();
    let mut request = attach(1, 1);
    request.extend([0xff; 40]);
    assert_eq!(rig.status(&request), OK);
}

#[test]
fn reserved_bytes_of_the_head_are_ignored() {
    let mut rig = Rig::new();
    let mut request = attach(1, 1);
    request[1..4].fill(0xff);
    assert_eq!(rig.status(&request), OK);
}

#[test]
fn request_without_room_for_a_tail_does_nothing() {
    let mut rig = Rig::new();
    for room in 0..4 {
        assert_eq!(rig.send_with_room(&attach(1, 1), room), NOTHING);
        assert_eq!(rig.send_with_room(&probe(1), room), NOTHING);
    }
    assert_eq!(rig.status(&detach(1, 1)), INVAL, "it is not attached");
}

#[test]
fn longer_writable_part_has_its_tail_in_place() {
    let mut rig = Rig::new();
    assert_eq!(rig.send_with_room(&attach(1, 1), 100), [OK, 0, 0, 0]);
}

#[test]
fn short_reply_to_window_add_is_invalid_and_backs_nothing() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1)]);
    let request = window_add(1, BOTH, APERTURE);
    assert_eq!(rig.send_with_room(&request, 3), NOTHING);
    assert_eq!(rig.send_with_room(&request, 4), [INVAL, 0, 0, 0]);
    let reply = rig.send_with_room(&request, 11);
    assert_eq!(reply, [255, 255, 255, 255, 255, 255, 255, INVAL, 0, 0, 0]);
    assert_eq!(rig.chunks.backed(), 0);
}

#[test]
fn failed_window_add_has_no_offset() {
    let mut rig = Rig::new();
    let reply = rig.send(&window_add(1, BOTH, APERTURE));
    assert_eq!(reply[..8], [0xff; 8]);
    assert_eq!(reply[8..], [NOENT, 0, 0, 0]);
}

#[test]
fn short_reply_to_probe_is_invalid_without_properties() {
    let mut rig = Rig::new();
    let reply = rig.send_with_room(&probe(1), 515);
    assert_eq!(reply.len(), 515);
    assert_eq!(reply[..511], [0; 511]);
    assert_eq!(reply[511..], [INVAL, 0, 0, 0]);
}

#[test]
fn failed_probe_has_no_properties() {
    let mut rig = Rig::new();
    let reply = rig.send(&probe(77));
    assert_eq!(reply.len(), 516);
    assert_eq!(reply[..512], [0; 512]);
    assert_eq!(reply[512], NOENT);
}

#[test]
fn counters_count_requests_and_failures_of_each_kind() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), map(1, 0, 0xfff, 0, READ), unmap(1, 0, 0xfff)]);
    rig.all_ok([map(1, 0, 0x1fff, 0, BOTH), probe(1)]);
    rig.status(&map(1, 0, 0xfff, 0, READ));
    rig.status(&attach(9, 1));
    rig.add_chunk(1, APERTURE);
    let json = serde_json::to_value(rig.engine.counters()).expect("counters serialize");
    let expected = serde_json::json!({
        "requests": {"attach": 2, "detach": 0, "map": 3, "unmap": 1, "probe": 1, "window_add": 1,
                     "window_del": 0, "map_list": 0, "invalid": 0},
        "failed": {"attach": 1, "detach": 0, "map": 1, "unmap": 0, "probe": 0, "window_add": 0,
                   "window_del": 0, "map_list": 0, "invalid": 0},
        "mappings": 1, "mapped_bytes": 0x2000, "peak_mapped_bytes": 0x2000, "pinned_bytes": 0, "peak_pinned_bytes": 0,
        "window_bytes": CHUNK, "peak_window_bytes": CHUNK,
        "parked_chunks": 0, "unparked_chunks": 0,
        "host_maps": 3, "host_unmaps": 1, "merged_unmaps": 0, "host_errors": 0, "stuck_ranges": 0, "lost_chunks": 0,
        "faults": 0, "faults_dropped": 0
    });
    assert_eq!(json, expected);
}

#[test]
fn reserved_bytes_of_probe_are_ignored() {
    let mut rig = Rig::new();
    let mut request = probe(1);
    request[8..].fill(0xff);
    assert_eq!(rig.status(&request), OK);
}

#[test]
fn probe_that_is_not_offered_is_not_answered() {
    let mut rig = Rig::with_config(EngineConfig { probe_size: 0, ..engine_config() });
    assert!(rig.send(&probe(1)).is_empty());
    assert_eq!(rig.engine.counters().requests.invalid, 1);
}

#[test]
fn properties_follow_each_other_by_their_length() {
    let mut rig = Rig::new();
    let mapper = RecordingMapper::with_ranges(vec![0x1000..=0xfedf_ffff, 0xfef0_0000..=0xffff_ffff]);
    rig.engine.add_endpoint(4, Box::new(mapper)).expect("it is valid");
    let reply = rig.send(&probe(4));
    let (mut rest, tail) = reply.split_at(512);
    assert_eq!(tail, [OK, 0, 0, 0]);
    let mut regions = Vec::new();
    while rest[..2] != [0, 0] {
        let word = |at: usize| u16::from_le_bytes([rest[at], rest[at + 1]]);
        assert_eq!((word(0), word(2)), (1, 20), "RESV_MEM, and its size without the header");
        assert_eq!(rest[5..8], [0; 3]);
        let long = |at: usize| u64::from_le_bytes(*rest[at..].first_chunk().expect("it is long enough"));
        regions.push((long(8), long(16), rest[4]));
        rest = &rest[4 + 20..];
    }
    assert!(rest.iter().all(|byte| *byte == 0));
    assert_eq!(regions.len(), 4, "below, aperture, MSI, above: {regions:x?}");
    assert_eq!(regions.iter().filter(|region| region.2 == 1).count(), 1, "one MSI region");
    assert!(regions.windows(2).all(|pair| pair[0].1 < pair[1].0), "{regions:x?}");
}
