// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of UNMAP requests that are served together.

use super::*;
use crate::test_utils::*;

/// Returns the pages `[start, start + count)` as first and last IOVA.
fn pages(start: u64, count: u64) -> (u64, u64) {
    (start * PAGE, (start + count) * PAGE - 1)
}

fn unmap_pages(domain: u32, start: u64, count: u64) -> Vec<u8> {
    let (start, last) = pages(start, count);
    unmap(domain, start, last)
}

impl Rig {
    /// Creates a domain with these endpoints. The domain has adjacent mappings from IOVA 0 on, one mapping of `count` pages for each
    /// `count` in `counts`.
    fn mapped(endpoints: &[EndpointId], counts: &[u64]) -> Self {
        let mut rig = Self::standard();
        for &endpoint in endpoints {
            rig.all_ok([attach(endpoint, 1)]);
        }
        let mut at = 0;
        for &count in counts {
            let (start, last) = pages(at, count);
            rig.all_ok([map(1, start, last, 0, BOTH)]);
            at += count;
        }
        rig
    }

    /// Sends UNMAPs together. Returns the statuses in the order of the requests.
    fn batch(&mut self, requests: &[Vec<u8>]) -> Vec<u8> {
        let decode = |(tag, request): (u16, &Vec<u8>)| UnmapRequest::decode(request, 4, tag).expect("it is an UNMAP");
        let mut unmaps: Vec<_> = (0..).zip(requests).map(decode).collect();
        self.engine.handle_unmaps(&mut unmaps);
        unmaps.sort_by_key(UnmapRequest::tag);
        unmaps
            .iter()
            .map(|unmap| {
                assert_eq!(unmap.reply()[1..], [0; 3]);
                unmap.reply()[0]
            })
            .collect()
    }
}

#[test]
fn neighbours_share_a_call() {
    let mut rig = Rig::mapped(&[1], &[1; 8]);
    let unmaps: Vec<_> = (0..8).map(|page| unmap_pages(1, page, 1)).collect();
    assert_eq!(rig.batch(&unmaps), [OK; 8]);
    let counters = rig.engine.counters();
    assert_eq!((counters.host_unmaps, counters.merged_unmaps), (1, 7));
    assert_eq!((counters.requests.unmap, counters.failed.unmap, counters.mappings), (8, 0, 0));
    assert!(rig.mapper(1).is_empty());
}

#[test]
fn neighbours_share_a_call_in_any_order() {
    let mut rig = Rig::mapped(&[1, 2], &[1; 6]);
    let unmaps: Vec<_> = [3, 0, 5, 1, 4, 2].iter().map(|page| unmap_pages(1, *page, 1)).collect();
    assert_eq!(rig.batch(&unmaps), [OK; 6]);
    let counters = rig.engine.counters();
    assert_eq!((counters.host_unmaps, counters.merged_unmaps), (2, 10), "one in each address space");
}

#[test]
fn gaps_and_domains_split_calls() {
    let mut rig = Rig::mapped(&[1], &[1, 1, 1]);
    rig.all_ok([unmap_pages(1, 1, 1), attach(2, 2), map(2, 3 * PAGE, 4 * PAGE - 1, 0, BOTH)]);
    let before = rig.engine.counters().host_unmaps;
    // Pages 0 and 2 are mapped, and page 1 is not. Page 3 is mapped in another domain. The domain of page 4 does not exist.
    let unmaps =
        [unmap_pages(1, 0, 1), unmap_pages(1, 1, 1), unmap_pages(1, 2, 1), unmap_pages(2, 3, 1), unmap_pages(7, 4, 1)];
    assert_eq!(rig.batch(&unmaps), [OK, OK, OK, OK, NOENT]);
    let counters = rig.engine.counters();
    assert_eq!((counters.host_unmaps - before, counters.merged_unmaps), (3, 0));
    assert_eq!(counters.failed.unmap, 1);
    assert!(rig.mappers.values().all(MapperProbe::is_empty));
}

#[test]
fn adjacent_unmaps_that_cut_a_mapping_are_refused() {
    let mut rig = Rig::mapped(&[1], &[1, 4, 1]);
    let unmaps = [unmap_pages(1, 0, 1), unmap_pages(1, 1, 2), unmap_pages(1, 3, 2), unmap_pages(1, 5, 1)];
    assert_eq!(rig.batch(&unmaps), [OK, RANGE, RANGE, OK]);
    assert_eq!(rig.mapper(1).mappings().keys().copied().collect::<Vec<_>>(), [PAGE]);
    assert_eq!(rig.engine.counters().merged_unmaps, 0);
}

#[test]
fn overlapping_requests_are_served_in_order() {
    let mut rig = Rig::mapped(&[1], &[2, 2]);
    // The first request would split a mapping. The second request removes the mapping, so the third has nothing left to split.
    let unmaps = [unmap_pages(1, 0, 1), unmap_pages(1, 0, 4), unmap_pages(1, 1, 1)];
    assert_eq!(rig.batch(&unmaps), [RANGE, OK, OK]);
    let mut rig = Rig::mapped(&[1], &[2, 2]);
    let unmaps = [unmap_pages(1, 1, 1), unmap_pages(1, 2, 2), unmap_pages(1, 0, 1), unmap_pages(1, 0, 2)];
    assert_eq!(rig.batch(&unmaps), [RANGE, OK, RANGE, OK]);
    assert!(rig.mapper(1).is_empty());
}

#[test]
fn wrong_request_has_its_own_status() {
    let mut rig = Rig::mapped(&[1], &[1; 4]);
    rig.all_ok([attach_bypass(3, 3)]);
    let mut reserved = unmap_pages(1, 1, 1);
    *reserved.last_mut().expect("it has bytes") = 1;
    let backwards = unmap(1, 2 * PAGE, PAGE - 1);
    let unmaps = [unmap_pages(1, 0, 1), reserved, backwards, unmap_pages(3, 2, 1), unmap_pages(1, 3, 1)];
    assert_eq!(rig.batch(&unmaps), [OK, INVAL, INVAL, INVAL, OK]);
    assert_eq!(rig.engine.counters().mappings, 2);
}

#[test]
fn each_request_gets_its_own_status_after_a_failure() {
    // The unmap call for all requests fails once, and then each request is served alone. If the call fails for endpoint 2, the range is
    // already unmapped for endpoint 1, and must be mapped again.
    for failing in [1, 2] {
        let mut rig = Rig::mapped(&[1, 2], &[1; 3]);
        rig.mapper(failing).fail_unmap(0);
        let unmaps: Vec<_> = (0..3).map(|page| unmap_pages(1, page, 1)).collect();
        assert_eq!(rig.batch(&unmaps), [OK; 3]);
        assert!(rig.mappers.values().all(MapperProbe::is_empty));
    }
    let mut rig = Rig::mapped(&[1], &[1; 3]);
    rig.mapper(1).refuse_unmaps(true);
    let unmaps: Vec<_> = (0..3).map(|page| unmap_pages(1, page, 1)).collect();
    assert_eq!(rig.batch(&unmaps), [DEVERR; 3]);
    assert_eq!((rig.engine.counters().mappings, rig.engine.counters().failed.unmap), (3, 3));
    rig.mapper(1).refuse_unmaps(false);
    assert_eq!(rig.batch(&unmaps), [OK; 3]);
}

#[test]
fn stuck_range_is_reported_as_a_failure() {
    // Endpoint 2 refuses to unmap, and endpoint 1 cannot map again. So the domain has lost its mappings, which are stuck for endpoint 2.
    let mut rig = Rig::mapped(&[1, 2], &[1; 3]);
    rig.mapper(1).fail_map(0);
    rig.mapper(2).refuse_unmaps(true);
    let unmaps: Vec<_> = (0..3).map(|page| unmap_pages(1, page, 1)).collect();
    assert_eq!(rig.batch(&unmaps), [DEVERR; 3]);
    assert_eq!(rig.mapper(2).mappings().len(), 3);
    rig.mapper(2).heal();
    assert_eq!(rig.batch(&unmaps), [OK; 3]);
    assert!(rig.mappers.values().all(MapperProbe::is_empty));
    assert_eq!(rig.engine.counters().stuck_ranges, 0);
}

#[test]
fn only_complete_unmaps_with_room_for_a_tail_are_batched() {
    let request = unmap_pages(1, 0, 1);
    assert!(UnmapRequest::decode(&request, 4, 0).is_some());
    assert!(UnmapRequest::decode(&request, 3, 0).is_none());
    assert!(UnmapRequest::decode(&request[..request.len() - 1], 4, 0).is_none());
    assert!(UnmapRequest::decode(&map(1, 0, PAGE - 1, 0, BOTH), 4, 0).is_none());
    assert!(UnmapRequest::decode(&[], 4, 0).is_none());
    Rig::standard().engine.handle_unmaps(&mut []);
}

#[test]
fn batch_reports_its_start_and_end() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1)]);
    rig.engine.begin_batch();
    assert_eq!(rig.engine.served_between(), None);
    let before = std::time::Instant::now();
    rig.all_ok([map(1, 0, 0xfff, 0, READ)]);
    let (first, answered) = rig.engine.served_between().expect("one was served");
    assert!(before <= first && first <= answered);
    let mut unmaps: Vec<_> = UnmapRequest::decode(&unmap(1, 0, 0xfff), 4, 0).into_iter().collect();
    rig.engine.handle_unmaps(&mut unmaps);
    let (same, later) = rig.engine.served_between().expect("two were served");
    assert!(same == first && later >= answered && later <= std::time::Instant::now());
    rig.engine.end_batch();
    rig.engine.begin_batch();
    assert_eq!(rig.engine.served_between(), None);
}
