// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Test of the host memory that the page tables of the host's IOMMU use.

use std::sync::Arc;
use std::time::Duration;

use iommu_bounce::spec::Status;
use iommu_bounce::test_utils::{TestRam, attach, map, unmap};
use iommu_bounce::{Engine, EngineConfig, Limits};

use crate::hardware::*;

/// Size of the range that one lowest-level table page translates.
const PLACE: u64 = 2 << 20;
const MIB: u64 = 1 << 20;
const OK: u8 = Status::Ok as u8;
const NOMEM: u8 = Status::NoMem as u8;

/// Returns the host's available memory in bytes.
fn available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

/// Waits until the available memory is stable, and returns it. The kernel frees the page tables of a device only some time after the device
/// was closed.
fn settled() -> u64 {
    let mut last = available();
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(100));
        let now = available();
        if now.abs_diff(last) < MIB / 4 {
            return now;
        }
        last = now;
    }
    last
}

fn send(engine: &mut Engine, request: &[u8]) -> u8 {
    let mut reply = [0; 4];
    assert_eq!(engine.handle(request, &mut reply), 4);
    reply[0]
}

/// Walks over `places` ranges of [`PLACE`] bytes. Maps one page at the start of each range and unmaps the page again, as a guest can.
/// Returns the host memory that the page tables use, in bytes, and the number of refused MAP requests.
fn walk(places: u64, max_table_pages: u64) -> (u64, u64) {
    let edu = Edu::open();
    let ram = Arc::new(TestRam::new(&[(0, 0x10_0000)]));
    let mapper = edu.0.mapper(7, ram.clone());
    let config = EngineConfig { limits: Limits { max_table_pages, ..Limits::default() }, ..EngineConfig::default() };
    let mut engine = Engine::new(config, ram, None).unwrap();
    engine.add_endpoint(7, Box::new(mapper)).unwrap();
    engine.accept_features(u64::MAX);
    assert_eq!(send(&mut engine, &attach(7, 1)), OK);
    let before = settled();
    let mut refused = 0;
    // Skip addresses that the host's IOMMU reserves.
    for place in (1..=places).filter(|place| !(0xfee0_0000..=0xfeef_ffff).contains(&(place * PLACE))) {
        let (start, last) = (place * PLACE, place * PLACE + PAGE - 1);
        match send(&mut engine, &map(1, start, last, 0, 3)) {
            OK => assert_eq!(send(&mut engine, &unmap(1, start, last)), OK),
            NOMEM => refused += 1,
            status => panic!("status {status} at {start:#x}"),
        }
    }
    (before.saturating_sub(settled()), refused)
}

#[test]
fn table_page_limit_bounds_host_memory_of_sparse_mappings() {
    // For 100,000 places, the host's page tables take 390 MiB without a limit, and 11 MiB with the limit of 2800 pages. Both figures
    // include other allocations that the kernel makes during the test.
    const PLACES: u64 = 100_000;
    let (taken, refused) = walk(PLACES, 2800);
    println!("{PLACES} places, 2800 pages of tables: {} KiB taken, {refused} refused", taken >> 10);
    assert!(taken < 16 * MIB, "{taken} bytes");
    assert!(refused > PLACES - 2800, "{refused} refused");
    // This comparison shows that the limit has an effect. Without the limit, 20,000 places take more memory than 100,000 places with the
    // limit.
    const FEWER: u64 = 20_000;
    let (taken, refused) = walk(FEWER, u64::MAX);
    println!("{FEWER} places, no limit: {} KiB taken, {refused} refused", taken >> 10);
    assert!(taken > 40 * MIB && refused == 0, "{taken} bytes, {refused} refused");
}
