// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the form on results made up.

use std::collections::BTreeMap;

use carom_integration::workload::BLOCK_SIZES;

use super::*;
use crate::report::table;
use crate::results::Results;
use crate::samples::{Measured, Sample};

fn sample(name: &str, round: u32, iops: f64, latency: f64) -> Sample<PatternFigures> {
    let sizes: BTreeMap<String, f64> = BLOCK_SIZES.map(|size| (size.to_owned(), iops)).into();
    let fio =
        Patterns { iops: PATTERNS.map(|pattern| (pattern.to_owned(), sizes.clone())).into(), read_latency_us: latency };
    let measured = Ok(Measured { figures: PatternFigures { fio }, versions: BTreeMap::new(), retries: 1 });
    Sample { name: name.into(), round, two_jobs: false, measured }
}

fn results() -> Results {
    let mut samples = vec![
        sample("strict", 0, 900.0, 500.0),
        sample("lazy", 0, 1500.0, 400.0),
        sample("bounce", 0, 3000.0, 100.0),
        sample("strict", 1, 1100.0, 600.0),
        sample("bounce", 1, 5000.0, 300.0),
    ];
    let measured = Err("it failed".into());
    samples.push(Sample { name: "lazy".into(), round: 1, two_jobs: false, measured });
    let machine = Machine { host: "h".into(), rig: "tcg".into(), kernel: "k".into(), guest_ram_bytes: 1 << 30 };
    Results::new(machine, BTreeMap::new(), false, 2, &samples)
}

#[test]
fn table_has_medians_ratios_and_failures() {
    let text = table(&results());
    assert_eq!(text.matches("4000 (4.00)").count(), 8, "two patterns at four sizes: {text}");
    let latency: Vec<&str> = text.lines().filter(|line| line.contains("| bounce") && line.contains("0.50")).collect();
    // 200 µs of strict's 550 and of lazy's 400.
    assert!(matches!(latency[..], [line] if line.contains(" 200 ") && line.contains("0.36")), "{text}");
    assert!(text.contains("started again: 5\nFAILED: lazy: it failed"), "{text}");
}

#[test]
fn configuration_keeps_its_place_when_its_first_guest_fails() {
    let samples = [
        Sample { measured: Err("it failed".into()), ..sample("strict", 0, 1.0, 1.0) },
        sample("bounce", 0, 1.0, 1.0),
        sample("strict", 1, 1.0, 1.0),
    ];
    let machine = Machine { host: "h".into(), rig: "tcg".into(), kernel: "k".into(), guest_ram_bytes: 1 << 30 };
    let text = table(&Results::new(machine, BTreeMap::new(), false, 2, &samples));
    let (strict, bounce) = (text.find("| strict"), text.find("| bounce"));
    assert!(strict.is_some() && strict < bounce, "{text}");
}

#[test]
fn results_are_read_as_they_were_written() {
    let text = serde_json::to_string(&results()).unwrap();
    let again: Results = serde_json::from_str(&text).unwrap();
    assert_eq!(table(&again), table(&results()));
}
