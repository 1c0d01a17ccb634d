// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the form with made-up results.

use carom_integration::workload::BLOCK_SIZES;

use super::*;
use crate::demo::report;
use crate::demo::results::Results;
use crate::demo::results::tests::{results, sample};

#[test]
fn table_has_medians_and_savings() {
    let measured = |name: &str, round: u32, map_s: f64| {
        let profiler = Some(ProfilerTime { map_s: 1.0, unmap_s: 3.0 });
        let time = MapTime { map_s: map_s + 1.0, unmap_s: 2.0 * map_s + 3.0, profiler };
        let times = BLOCK_SIZES.map(|size| (size.to_owned(), time)).into();
        sample(name, round, Ok(MapTimes { times }))
    };
    let mut samples = vec![measured(PEER, 0, 10.0), measured("bounce", 0, 0.25), measured("bounce", 1, 0.15)];
    samples.push(sample(PEER, 1, Err("it failed")));
    let results = results(2, &samples);
    let text = report::table(&results);
    assert_eq!(text.matches("0.200 (-98.0 %)").count(), 4, "{text}");
    assert_eq!(text.matches("0.400 (-98.0 %)").count(), 4, "{text}");
    assert_eq!((text.matches("| 1.000 ").count(), text.matches("| 3.000 ").count()), (8, 8), "{text}");
    assert!(text.contains(" 10.000 ") && text.contains("started again: 3\nFAILED: qemu-strict: it failed"), "{text}");
    let again: Results = serde_json::from_str(&serde_json::to_string(&results).unwrap()).unwrap();
    assert_eq!(report::table(&again), text);
}
