// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the counts and durations for each domain and endpoint.

use super::*;
use crate::test_utils::*;

#[test]
fn domains_and_endpoints_have_figures_of_their_own() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), attach(2, 1), map(1, 0, 0x2fff, 0, READ), attach_bypass(3, 7)]);
    rig.all_ok([map(1, 0x8000, 0x8fff, 0, READ), unmap(1, 0, 0x2fff), probe(2)]);
    rig.status(&map(1, 0x8000, 0x8fff, 0, READ));
    rig.add_chunk(1, APERTURE);
    let report = rig.engine.report();
    let [one, seven] = &report.domains[..] else { panic!("two domains: {report:?}") };
    assert_eq!((one.domain, &one.endpoints[..], one.address_spaces), (1, &[1, 2][..], 2));
    assert_eq!((one.mappings, one.mapped_bytes, one.window_bytes, one.bypass), (1, 0x1000, CHUNK, false));
    let requests = one.activity.requests;
    assert_eq!((requests.attach, requests.map, requests.unmap, requests.window_add), (2, 3, 1, 1));
    assert_eq!((one.activity.failed.map, one.activity.latency.count), (1, 7));
    assert_eq!((seven.bypass, seven.mappings, seven.mapped_bytes), (true, 0, SECOND_REGION + 0x20_0000));
    let [first, second, third] = &report.endpoints[..] else { panic!("three endpoints: {report:?}") };
    assert_eq!((first.endpoint, first.domain, first.mapped_bytes, first.window_bytes), (1, Some(1), 0x1000, CHUNK));
    assert_eq!((second.activity.requests.attach, second.activity.requests.probe), (1, 1));
    assert!(third.bypass && third.mapped_bytes == seven.mapped_bytes);
    assert_eq!(report.latency.map.count, 3);
    assert_eq!(
        (report.host.map.count, report.counters.host_maps),
        (5, 9),
        "the first call of each endpoint, one in eight, and calls that map all RAM"
    );
    assert_eq!((report.host.unmap.count, report.counters.host_unmaps), (2, 2));
    rig.engine.system_reset();
    let report = rig.engine.report();
    assert!(report.domains.is_empty());
    assert_eq!(report.endpoints[0].window_bytes, 0, "its chunk had another user, and is not parked");
}

#[test]
fn figures_serialize_flat() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), map(1, 0, 0xfff, 0, READ)]);
    let json = serde_json::to_value(rig.engine.report()).expect("it serializes");
    assert_eq!(json["requests"]["map"], 1);
    assert_eq!(json["latency"]["map"]["count"], 1);
    assert_eq!(json["host"]["map"]["buckets"].as_array().map(Vec::len), Some(32));
    assert_eq!(json["domains"][0]["mapped_bytes"], 0x1000);
    assert_eq!(json["domains"][0]["requests"]["map"], 1);
    assert_eq!(json["endpoints"][2]["domain"], serde_json::Value::Null);
}
