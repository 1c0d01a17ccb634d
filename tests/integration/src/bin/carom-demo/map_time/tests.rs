// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the form on results made up.

use carom_integration::workload::BLOCK_SIZES;

use super::*;
use crate::report;
use crate::results::Results;
use crate::samples::{Measured, Sample};

#[test]
fn table_has_medians_and_what_is_saved() {
    let sample = |name: &str, round: u32, map_s: f64| {
        let profiler = Some(ProfilerTime { map_s: 1.0, unmap_s: 3.0 });
        let time = MapTime { map_s: map_s + 1.0, unmap_s: 2.0 * map_s + 3.0, profiler };
        let times = BLOCK_SIZES.map(|size| (size.to_owned(), time)).into();
        let measured = Ok(Measured { figures: MapTimes { times }, versions: BTreeMap::new(), retries: 1 });
        Sample { name: name.into(), round, two_jobs: false, measured }
    };
    let mut samples = vec![sample(PEER, 0, 10.0), sample("bounce", 0, 0.25), sample("bounce", 1, 0.15)];
    samples.push(Sample { name: PEER.into(), round: 1, two_jobs: false, measured: Err("it failed".into()) });
    let machine = Machine { host: "h".into(), rig: "tcg".into(), kernel: "k".into(), guest_ram_bytes: 1 << 30 };
    let results = Results::new(machine, BTreeMap::new(), false, 2, &samples);
    let text = report::table(&results);
    assert_eq!(text.matches("0.200 (-98.0 %)").count(), 4, "{text}");
    assert_eq!(text.matches("0.400 (-98.0 %)").count(), 4, "{text}");
    assert_eq!((text.matches("| 1.000 ").count(), text.matches("| 3.000 ").count()), (8, 8), "{text}");
    assert!(text.contains(" 10.000 ") && text.contains("started again: 3\nFAILED: qemu-strict: it failed"), "{text}");
    let again: Results = serde_json::from_str(&serde_json::to_string(&results).unwrap()).unwrap();
    assert_eq!(report::table(&again), text);
}
