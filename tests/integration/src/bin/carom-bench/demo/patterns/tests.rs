// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the form with made-up results.

use std::collections::BTreeMap;

use carom_integration::workload::BLOCK_SIZES;

use super::*;
use crate::demo::report::table;
use crate::demo::results::Results;
use crate::demo::results::tests::{results, sample};
use crate::demo::samples::Sample;

fn measured(name: &str, round: u32, iops: f64, latency: f64) -> Sample<PatternFigures> {
    let sizes: BTreeMap<String, f64> = BLOCK_SIZES.map(|size| (size.to_owned(), iops)).into();
    let fio =
        Patterns { iops: PATTERNS.map(|pattern| (pattern.to_owned(), sizes.clone())).into(), read_latency_us: latency };
    sample(name, round, Ok(PatternFigures { fio }))
}

fn two_rounds() -> Results {
    let samples = [
        measured("strict", 0, 900.0, 500.0),
        measured("lazy", 0, 1500.0, 400.0),
        measured("bounce", 0, 3000.0, 100.0),
        measured("strict", 1, 1100.0, 600.0),
        measured("bounce", 1, 5000.0, 300.0),
        sample("lazy", 1, Err("it failed")),
    ];
    results(2, &samples)
}

#[test]
fn table_has_medians_ratios_and_failures() {
    let text = table(&two_rounds());
    assert_eq!(text.matches("4000 (4.00)").count(), 8, "two patterns at four sizes: {text}");
    let latency: Vec<&str> = text.lines().filter(|line| line.contains("| bounce") && line.contains("0.50")).collect();
    // 200 µs are 0.36 of strict's 550 µs and 0.50 of lazy's 400 µs.
    assert!(matches!(latency[..], [line] if line.contains(" 200 ") && line.contains("0.36")), "{text}");
    assert!(text.contains("started again: 5\nFAILED: lazy: it failed"), "{text}");
}

#[test]
fn configuration_keeps_its_place_when_its_first_guest_fails() {
    let samples =
        [sample("strict", 0, Err("it failed")), measured("bounce", 0, 1.0, 1.0), measured("strict", 1, 1.0, 1.0)];
    let text = table(&results(2, &samples));
    let (strict, bounce) = (text.find("| strict"), text.find("| bounce"));
    assert!(strict.is_some() && strict < bounce, "{text}");
}

#[test]
fn results_are_read_as_they_were_written() {
    let text = serde_json::to_string(&two_rounds()).unwrap();
    let again: Results = serde_json::from_str(&text).unwrap();
    assert_eq!(table(&again), table(&two_rounds()));
}
