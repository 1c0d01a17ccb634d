// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the limit on the host's page tables, with mappings at more and more addresses.

use super::*;
use crate::test_utils::*;
use crate::{EngineConfig, Limits};

/// Bytes that one page-table page translates.
const PLACE: u64 = 0x20_0000;
const MAX: u64 = 20;

/// Returns an engine with endpoint 4 in domain 1. The host keeps page tables for endpoint 4.
fn rig() -> Rig {
    let limits = Limits { max_table_pages: MAX, ..Limits::default() };
    let mut rig = Rig::with_config(EngineConfig { limits, ..engine_config() });
    let mapper = RecordingMapper::new().with_page_tables();
    rig.mappers.insert(4, mapper.probe());
    rig.engine.add_endpoint(4, Box::new(mapper)).unwrap();
    rig.all_ok([attach(4, 1)]);
    rig
}

/// Maps a page in the place with this number, and unmaps the page again. A place is the range that one page-table page translates.
fn visit(rig: &mut Rig, domain: u32, place: u64) -> u8 {
    let start = place * PLACE;
    let status = rig.status(&map(domain, start, start + PAGE - 1, 0, READ));
    if status == OK {
        rig.all_ok([unmap(domain, start, start + PAGE - 1)]);
    }
    status
}

#[test]
fn table_page_limit_holds_after_mappings_are_removed() {
    let mut rig = rig();
    let visited = (0..100).filter(|place| visit(&mut rig, 1, *place) == OK).count() as u64;
    // Two of the `MAX` page-table pages belong to higher levels.
    assert_eq!(visited, MAX - 2);
    assert_eq!(visit(&mut rig, 1, MAX), NOMEM);
    // Places with page tables can still be used, and nothing of the rejected requests remains.
    assert_eq!(visit(&mut rig, 1, 0), OK);
    assert!(rig.mapper(4).is_empty());
    assert_eq!(rig.engine.counters().mappings, 0);
}

#[test]
fn page_tables_count_across_domains_and_resets() {
    let mut rig = rig();
    (0..MAX - 2).for_each(|place| assert_eq!(visit(&mut rig, 1, place), OK));
    rig.all_ok([detach(4, 1), attach(4, 2)]);
    assert_eq!(visit(&mut rig, 2, MAX), NOMEM);
    rig.engine.reset();
    rig.engine.accept_features(rig.engine.features());
    rig.all_ok([attach(4, 1)]);
    assert_eq!((visit(&mut rig, 1, MAX), visit(&mut rig, 1, 3)), (NOMEM, OK));
}

#[test]
fn mapper_without_page_tables_has_no_limit_on_places() {
    let mut rig = rig();
    rig.all_ok([attach(1, 2)]);
    (0..2 * MAX).for_each(|place| assert_eq!(visit(&mut rig, 2, place), OK));
}

#[test]
fn exhausted_tables_refuse_map_and_attach_but_keep_mappings() {
    let mut rig = rig();
    (0..MAX - 2).for_each(|place| assert_eq!(visit(&mut rig, 1, place), OK));
    rig.all_ok([attach(1, 1)]);
    let far = MAX * PLACE;
    assert_eq!(rig.status(&map(1, far, far + PAGE - 1, 0, READ)), NOMEM);
    assert!(rig.mapper(1).is_empty() && rig.mapper(4).is_empty());
    // Endpoint 1 has a mapping in a place for which endpoint 4 has no page tables. So endpoint 4 cannot attach to the domain of endpoint 1.
    rig.all_ok([attach(1, 2), map(2, far, far + PAGE - 1, 0, READ)]);
    assert_eq!(rig.status(&attach(4, 2)), NOMEM);
    assert_eq!(rig.mapper(1).mappings().len(), 1);
}
