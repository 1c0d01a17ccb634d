// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the configuration, features, the configuration space and PROBE.

use std::ops::RangeInclusive;

use super::*;
use crate::test_utils::*;
use crate::{ChunkStore, ConfigError, Limits, MapperLimits};

fn ram() -> Arc<TestRam> {
    Arc::new(TestRam::new(&[(0, 0x10_0000)]))
}

fn error_of(config: EngineConfig, chunks: Option<TestChunks>) -> String {
    let chunks = chunks.map(|chunks| Box::new(chunks) as Box<dyn ChunkStore>);
    let engine = Engine::new(config, ram(), chunks);
    engine.err().expect("it is invalid").to_string()
}

/// Applies `change` to a valid configuration, and returns the error for the result.
fn error_with(change: impl FnOnce(&mut EngineConfig)) -> String {
    let mut config = engine_config();
    change(&mut config);
    error_of(config, Some(TestChunks::new(CHUNK, REGION_CHUNKS)))
}

#[test]
fn wrong_configuration_names_the_field() {
    assert!(error_with(|c| c.page_size_mask = 0).starts_with("page_size_mask is 0"));
    let empty = RangeInclusive::new(5, 4);
    assert!(error_with(|c| c.input_range = empty.clone()).starts_with("input_range is empty"));
    assert!(error_with(|c| c.msi_window = empty).starts_with("msi_window is empty"));
    let empty = RangeInclusive::new(5, 4);
    assert!(error_with(|c| c.domain_range = empty).starts_with("domain_range is empty"));
    for size in [8, 71, 76, 520, u32::MAX] {
        assert!(error_with(|c| c.probe_size = size).starts_with("probe_size is"));
    }
    let limits = Limits::default();
    let error = error_with(|c| c.limits = Limits { max_mappings: 0, ..limits });
    assert!(error.starts_with("limits.max_mappings is 0"));
    let error = error_with(|c| c.limits = Limits { max_domains: 0, ..limits });
    assert!(error.starts_with("limits.max_domains is 0"));
    let error = error_with(|c| c.limits = Limits { max_table_pages: 0, ..limits });
    assert!(error.starts_with("limits.max_table_pages is 0"));
    let error = error_with(|c| c.limits = Limits { max_mapped_bytes: 0, ..limits });
    assert!(error.starts_with("limits.max_mapped_bytes is 0"));
}

#[test]
fn wrong_window_names_the_rule() {
    let aperture =
        |range: RangeInclusive<u64>| error_with(|c| c.window.as_mut().expect("there are windows").aperture = range);
    let chunks = "must start and end at multiples of the chunk size";
    assert!(aperture(APERTURE + 1..=APERTURE + CHUNK - 1).contains(chunks));
    assert!(aperture(APERTURE..=APERTURE + CHUNK).contains(chunks));
    let side = "must end below 4 GiB and below the MSI window, or start at 4 GiB or above";
    assert!(aperture(0xfed0_0000..=0xfeef_ffff).contains(side));
    assert!(aperture((1 << 32) - CHUNK..=(1 << 32) + CHUNK - 1).contains(side));
    let msi = error_with(|c| {
        c.msi_window = HIGH..=HIGH + 0xfff;
        c.window.as_mut().expect("there are windows").aperture = HIGH..=HIGH + CHUNK - 1;
    });
    assert!(msi.contains("must not overlap the MSI window"));
    assert!(aperture(0..=CHUNK - 1).contains("must not overlap guest RAM"));
    assert!(aperture(RangeInclusive::new(9, 8)).contains("window.aperture is empty"));
    let input = error_with(|c| c.input_range = 0..=APERTURE);
    assert!(input.contains("must lie within input_range"));
    let region = u64::from(REGION_CHUNKS) * CHUNK;
    let budget = error_with(|c| c.window.as_mut().expect("there are windows").budget = region + 1);
    assert!(budget.starts_with("the window budget is 0x80001 bytes"));
}

#[test]
fn window_config_and_chunk_store_need_each_other() {
    assert!(error_of(engine_config(), None).starts_with("bounce windows need a window"));
    let plain = EngineConfig::default();
    let store = TestChunks::new(CHUNK, 1);
    assert!(error_of(plain, Some(store)).starts_with("bounce windows need a window"));
}

#[test]
fn wrong_store_names_the_rule() {
    let store = |size, count| error_of(engine_config(), Some(TestChunks::new(size, count)));
    assert!(store(0x1_1000, 1).contains("a power of two"));
    assert!(store(0x800, 1).contains("at least the granule"));
    assert!(store(CHUNK, 0).contains("whole chunks"));
}

fn plain_engine() -> Engine {
    Engine::new(EngineConfig::default(), ram(), None).expect("it is valid")
}

#[test]
fn wrong_endpoint_names_the_rule() {
    let limits = |page_size_mask, range| MapperLimits { page_size_mask, iova_ranges: vec![range], max_mappings: None };
    let error = |limits| {
        let mut rig = Rig::new();
        let mapper = Box::new(RecordingMapper::with_limits(limits));
        rig.engine.add_endpoint(4, mapper).expect_err("it is wrong")
    };
    let all = 0..=u64::MAX;
    let granule = error(limits(0x2000, all.clone()));
    assert!(matches!(granule, ConfigError::EndpointGranule { .. }));
    let granule = error(limits(0, all));
    assert!(matches!(granule, ConfigError::EndpointGranule { .. }));
    let range = error(limits(0x1000, 1 << 48..=1 << 50));
    assert!(matches!(range, ConfigError::EndpointRange(4)));
    let aperture = error(limits(0x1000, 0..=APERTURE + CHUNK));
    assert!(matches!(aperture, ConfigError::EndpointAperture { .. }));
    let mut rig = Rig::new();
    let again = rig.engine.add_endpoint(1, Box::new(RecordingMapper::new()));
    let again = again.expect_err("it exists").to_string();
    assert!(again.starts_with("endpoint 0x1 already exists"));
}

#[test]
fn features_follow_the_configuration() {
    let plain = plain_engine();
    assert_eq!(plain.features(), 0b101_0111 | 1 << 21);
    assert_eq!(Rig::new().engine.features(), 0b101_0111 | 1 << 21 | 1 << 22 | 1 << 23);
    let config = EngineConfig { probe_size: 0, ..EngineConfig::default() };
    let engine = Engine::new(config, ram(), None).expect("it is valid");
    assert_eq!(engine.features(), 0b100_0111 | 1 << 21);
}

#[test]
fn features_stay_while_a_domain_exists() {
    let mut rig = Rig::standard();
    rig.all_ok([attach(1, 1), map(1, APERTURE, APERTURE + 0xfff, 0, READ)]);
    rig.engine.accept_features(rig.engine.features());
    assert!(rig.is_unknown(&window_add(1, BOTH, APERTURE)));
}

#[test]
fn features_that_were_not_offered_are_not_accepted() {
    let mut engine = plain_engine();
    engine.accept_features(u64::MAX);
    let mut reply = [0; 12];
    let request = window_add(1, BOTH, APERTURE);
    assert_eq!(engine.handle(&request, &mut reply), 0, "an unknown type");
}

#[test]
fn without_windows_the_configuration_is_the_standard_one() {
    let engine = plain_engine();
    assert_eq!(engine.config_len(), 40);
    let mut expected = [0; 80];
    expected[0..8].copy_from_slice(&(!0xfffu64).to_le_bytes());
    expected[16..24].copy_from_slice(&0xffff_ffff_ffffu64.to_le_bytes());
    expected[28..32].copy_from_slice(&0xffffu32.to_le_bytes());
    expected[32..36].copy_from_slice(&512u32.to_le_bytes());
    assert_eq!(engine.config_space(), expected);
}

#[test]
fn window_fields_follow_the_standard_configuration() {
    let engine = Rig::new().engine;
    assert_eq!(engine.config_len(), 80);
    let space = engine.config_space();
    assert_eq!(space[24..28], 1u32.to_le_bytes());
    assert_eq!(space[36..40], [0; 4], "bypass and reserved");
    assert_eq!(space[40..48], APERTURE.to_le_bytes());
    assert_eq!(space[48..56], 0xe00f_ffffu64.to_le_bytes());
    assert_eq!(space[56..64], CHUNK.to_le_bytes());
    assert_eq!(space[64..72], (4 * CHUNK).to_le_bytes());
    assert_eq!(space[72..76], 0x4000u32.to_le_bytes());
    assert_eq!(space[76..80], 0x2000u32.to_le_bytes());
}

/// Returns the properties of a PROBE reply as (subtype, start, end), parsed as a driver does.
fn properties(rig: &mut Rig, id: EndpointId) -> Vec<(u8, u64, u64)> {
    let reply = rig.send(&probe(id));
    assert_eq!(reply[512..], [OK, 0, 0, 0]);
    let (properties, _) = reply[..512].split_at(504);
    let mut found = Vec::new();
    for property in properties.chunks(24) {
        if property[0..2] == [0, 0] {
            assert_eq!(property, [0; 24]);
            continue;
        }
        assert_eq!(property[0..4], [1, 0, 20, 0], "RESV_MEM of 20 bytes");
        assert_eq!(property[5..8], [0; 3]);
        let field = |at: usize| {
            let bytes = property[at..].first_chunk().expect("it is long enough");
            u64::from_le_bytes(*bytes)
        };
        found.push((property[4], field(8), field(16)));
    }
    found
}

#[test]
fn probe_reports_the_msi_window_and_the_aperture() {
    let msi = (1, 0xfee0_0000, 0xfeef_ffff);
    let mut rig = Rig::new();
    let aperture = (0, APERTURE, 0xe00f_ffff);
    assert_eq!(properties(&mut rig, 1), [aperture, msi]);
    assert_eq!(properties(&mut Rig::standard(), 1), [msi]);
}

#[test]
fn probe_reports_what_the_host_cannot_translate() {
    let mut rig = Rig::standard();
    let mapper =
        RecordingMapper::with_ranges(vec![0x1000..=0xff_ffff, 0x200_0000..=0xfedf_ffff, 0xff00_0000..=0x7f_ffff_ffff]);
    let added = rig.engine.add_endpoint(4, Box::new(mapper));
    added.expect("it is valid");
    let expected = [
        (0, 0, 0xfff),
        (0, 0x100_0000, 0x1ff_ffff),
        (1, 0xfee0_0000, 0xfeef_ffff),
        (0, 0xfef0_0000, 0xfeff_ffff),
        (0, 0x80_0000_0000, 0xffff_ffff_ffff),
    ];
    assert_eq!(properties(&mut rig, 4), expected);
    rig.all_ok([attach(4, 1)]);
    for (_, start, last) in expected {
        let status = rig.status(&map(1, start, start + 0xfff, 0, READ));
        assert_eq!(status, RANGE, "{start:#x}");
        let end = last - 0xfff;
        assert_eq!(rig.status(&map(1, end, last, 0, READ)), RANGE, "{last:#x}");
    }
}

#[test]
fn too_many_reserved_ranges_are_merged() {
    let mut rig = Rig::standard();
    let hole = |n: u64| (n << 32) + 0x1000 * n;
    let holes: Vec<_> = (1..40).map(|n| (hole(n), hole(n) + 0xfff)).collect();
    let mut starts = vec![0];
    starts.extend(holes.iter().map(|(_, last)| last + 1));
    let mut ends: Vec<_> = holes.iter().map(|(start, _)| start - 1).collect();
    ends.push((1 << 48) - 1);
    let ranges = starts.into_iter().zip(ends).map(|(start, end)| start..=end);
    let mapper = RecordingMapper::with_ranges(ranges.collect());
    let added = rig.engine.add_endpoint(4, Box::new(mapper));
    added.expect("it is valid");
    let found = properties(&mut rig, 4);
    assert_eq!(found.len(), 21, "as many as fit");
    assert!(found.windows(2).all(|pair| pair[0].2 < pair[1].1), "disjoint");
    assert!(found.contains(&(1, 0xfee0_0000, 0xfeef_ffff)));
    for (start, last) in holes {
        let covered = |p: &(u8, u64, u64)| p.0 == 0 && p.1 <= start && last <= p.2;
        assert!(found.iter().any(covered), "{start:#x}");
    }
}

#[test]
fn engine_can_be_sent_to_another_thread() {
    fn is_send<T: Send>() {}
    is_send::<Engine>();
}
