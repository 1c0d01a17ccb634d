// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the page tables of the host's IOMMU take of its memory.

use std::sync::Arc;

use iommu_bounce::spec::Status;
use iommu_bounce::test_utils::{TestRam, attach, map, unmap};
use iommu_bounce::{Engine, EngineConfig, Limits};

use crate::hardware::*;

/// What one page of tables of the lowest level translates.
const PLACE: u64 = 2 << 20;
const MIB: u64 = 1 << 20;
const OK: u8 = Status::Ok as u8;
const NOMEM: u8 = Status::NoMem as u8;

/// What the host could still give away, in bytes.
fn available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

fn send(engine: &mut Engine, request: &[u8]) -> u8 {
    let mut reply = [0; 4];
    assert_eq!(engine.handle(request, &mut reply), 4);
    reply[0]
}

/// What a guest takes of the host's memory that maps a page at the start of each place and unmaps it again, in bytes, and how often it
/// was refused.
fn walk(places: u64, max_table_pages: u64) -> (u64, u64) {
    let edu = Edu::open();
    let ram = Arc::new(TestRam::new(&[(0, 0x10_0000)]));
    let mapper = edu.0.mapper(7, ram.clone());
    let config = EngineConfig { limits: Limits { max_table_pages, ..Limits::default() }, ..EngineConfig::default() };
    let mut engine = Engine::new(config, ram, None).unwrap();
    engine.add_endpoint(7, Box::new(mapper)).unwrap();
    engine.accept_features(u64::MAX);
    assert_eq!(send(&mut engine, &attach(7, 1)), OK);
    let before = available();
    let mut refused = 0;
    // Not where the host's IOMMU reserves something.
    for place in (1..=places).filter(|place| !(0xfee0_0000..=0xfeef_ffff).contains(&(place * PLACE))) {
        let (start, last) = (place * PLACE, place * PLACE + PAGE - 1);
        match send(&mut engine, &map(1, start, last, 0, 3)) {
            OK => assert_eq!(send(&mut engine, &unmap(1, start, last)), OK),
            NOMEM => refused += 1,
            status => panic!("status {status} at {start:#x}"),
        }
    }
    (before.saturating_sub(available()), refused)
}

#[test]
fn mappings_in_ever_new_places_take_no_more_than_the_limit_of_the_hosts_memory() {
    // 78 MiB of tables without a limit, 11 MiB with this one. What else the kernel takes and gives back meanwhile is in the figures too:
    // the tables of the walk before, for one.
    const PLACES: u64 = 20_000;
    const BETWEEN: u64 = 40 * MIB;
    let (taken, refused) = walk(PLACES, 2800);
    println!("{PLACES} places, 2800 pages of tables: {} KiB taken, {refused} refused", taken >> 10);
    assert!(taken < BETWEEN, "{taken} bytes");
    assert!(refused > PLACES - 2800, "{refused} refused");
    // So it is the limit that does it.
    let (taken, refused) = walk(PLACES, u64::MAX);
    println!("{PLACES} places, no limit: {} KiB taken, {refused} refused", taken >> 10);
    assert!(taken > BETWEEN && refused == 0, "{taken} bytes, {refused} refused");
}
