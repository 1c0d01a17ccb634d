// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The demo with `--patterns`: random writes, mixed reads and writes, and reads that are alone in flight. The plain form has
//! only reads in sequence, which are what windows help most.

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Result, ensure};
use carom_integration::workload::{self, PATTERNS, Patterns};
use carom_integration::{Outcome, Site};
use serde::{Deserialize, Serialize};

use crate::form::Form;
use crate::plan::{Plan, Step};
use crate::report::{self, NONE, ratio};
use crate::results::{self, Configs, Machine, find, median};

/// Configurations that are measured unless others are asked for: the two without windows that a guest would otherwise have,
/// and the one with.
const CONFIGS: [&str; 3] = ["strict", "lazy", "bounce"];

/// Figures of one guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PatternFigures {
    fio: Patterns,
}

/// Figures of one configuration.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// Medians over the rounds, each figure's for itself.
    fio: Patterns,
    /// Round by round.
    fio_rounds: Vec<Patterns>,
}

type Config = results::Config<Summary>;

impl Form for PatternFigures {
    type Summary = Summary;

    const TIME_LIMIT: Duration = Duration::from_secs(240);
    const TWO_JOBS: bool = false;
    const VCPUS_APART: bool = false;
    const FIO: &'static str = "direct, libaio, 1 job on 1 vCPU";

    fn is_usual(plan: &Plan, _: &Site) -> bool {
        CONFIGS.contains(&plan.name)
    }

    fn job(_: &Step, quick: bool) -> String {
        workload::fio_patterns(if quick { 1 } else { 3 })
    }

    fn read(step: &Step, outcome: &Outcome) -> Result<Self> {
        let windows = outcome.counters.last().map_or(0, |counters| counters.requests.window_add);
        ensure!((windows > 0) == step.plan.bounce, "the guest had {windows} chunks of windows");
        Ok(Self { fio: workload::pattern_results(outcome)? })
    }

    fn summary(guests: &[&Self], _: &[&Self]) -> Option<Summary> {
        let of = |pattern: &str, size: &str| median(guests.iter().filter_map(|one| iops(&one.fio, pattern, size)));
        let iops = PATTERNS.map(|pattern| (pattern.to_owned(), results::by_size(|size| of(pattern, size))));
        let read_latency_us = median(guests.iter().map(|one| one.fio.read_latency_us))?;
        Some(Summary {
            fio: Patterns { iops: iops.into(), read_latency_us },
            fio_rounds: guests.iter().map(|one| one.fio.clone()).collect(),
        })
    }

    fn field(configs: Vec<Config>) -> Configs {
        Configs::Patterns(configs)
    }

    fn tables(configs: &[Config], _: &Machine) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        for (pattern, what) in PATTERNS.iter().zip(["Random writes", "Random reads and writes, half of each"]) {
            let _ = write!(text, "\n{what}, depth 64, IOPS (ratio to strict):\n\n{}", speeds(configs, pattern));
        }
        let _ = write!(text, "\nRandom reads of 4 KiB, depth 1, mean latency:\n\n{}\n", latencies(configs));
        text
    }
}

fn iops(fio: &Patterns, pattern: &str, size: &str) -> Option<f64> {
    fio.iops.get(pattern)?.get(size).copied()
}

fn speeds(configs: &[Config], pattern: &str) -> String {
    let strict = find(configs, "strict");
    report::table_by_size(configs.iter().map(|config| (&config.name, &config.figures.fio)), |fio, size| {
        let base = strict.and_then(|strict| iops(&strict.figures.fio, pattern, size));
        iops(fio, pattern, size).map_or(NONE.into(), |own| format!("{own:.0} ({})", ratio(own, base)))
    })
}

fn latencies(configs: &[Config]) -> String {
    let of = |name: &str| find(configs, name).map(|config| config.figures.fio.read_latency_us);
    let mut table = report::new_table(["configuration", "µs", "÷ strict", "÷ lazy"]);
    for config in configs {
        let own = config.figures.fio.read_latency_us;
        table.add_row([config.name.clone(), format!("{own:.0}"), ratio(own, of("strict")), ratio(own, of("lazy"))]);
    }
    report::finish(table)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use carom_integration::workload::BLOCK_SIZES;

    use super::*;
    use crate::report::table;
    use crate::results::Results;
    use crate::samples::{Measured, Sample};

    fn sample(name: &str, round: u32, iops: f64, latency: f64) -> Sample<PatternFigures> {
        let sizes: BTreeMap<String, f64> = BLOCK_SIZES.map(|size| (size.to_owned(), iops)).into();
        let fio = Patterns {
            iops: PATTERNS.map(|pattern| (pattern.to_owned(), sizes.clone())).into(),
            read_latency_us: latency,
        };
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
        let latency: Vec<&str> =
            text.lines().filter(|line| line.contains("| bounce") && line.contains("0.50")).collect();
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
}
