// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The demo with `--patterns`: random writes, mixed reads and writes, and reads at depth 1. The plain form measures only sequential
//! reads, which benefit most from windows.

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Result, ensure};
use carom_integration::measure::machine::Machine;
use carom_integration::measure::markdown::{self, NONE, ratio};
use carom_integration::measure::mode::Mode;
use carom_integration::measure::statistics::median;
use carom_integration::workload::{self, PATTERNS, Patterns};
use carom_integration::{Outcome, Site};
use serde::{Deserialize, Serialize};

use crate::demo::config::{self, find};
use crate::demo::form::Form;
use crate::demo::plan::Step;
use crate::demo::tables;

/// Configurations that are measured by default: strict and lazy without windows, and bounce with windows.
const CONFIGS: [&str; 3] = ["strict", "lazy", "bounce"];

/// Figures of one guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PatternFigures {
    fio: Patterns,
}

/// Figures of one configuration.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// Medians over the rounds. The median of each figure is calculated separately.
    fio: Patterns,
    /// Figures of each round.
    fio_rounds: Vec<Patterns>,
}

type Config = config::Config<Summary>;

impl Form for PatternFigures {
    type Summary = Summary;

    const ESTIMATE: Duration = Duration::from_secs(50);
    const TIME_LIMIT: Duration = Duration::from_secs(240);
    const FIO: &'static str = "direct, libaio, 1 job on 1 vCPU";

    fn is_usual(mode: &Mode, _: &Site) -> bool {
        CONFIGS.contains(&mode.name)
    }

    fn job(_: &Step, quick: bool) -> String {
        workload::fio_patterns(if quick { 1 } else { 3 })
    }

    fn read(step: &Step, outcome: &Outcome) -> Result<Self> {
        let windows = outcome.counters.last().map_or(0, |counters| counters.requests.window_add);
        ensure!(
            (windows > 0) == step.mode.windows,
            "the guest requested {windows} window chunks; it must request chunks if its mode has windows, and none otherwise"
        );
        Ok(Self { fio: workload::pattern_results(outcome)? })
    }

    fn summary(guests: &[&Self], _: &[&Self]) -> Option<Summary> {
        let of = |pattern: &str, size: &str| median(guests.iter().filter_map(|one| iops(&one.fio, pattern, size)));
        let iops = PATTERNS.map(|pattern| (pattern.to_owned(), config::by_size(|size| of(pattern, size))));
        let read_latency_us = median(guests.iter().map(|one| one.fio.read_latency_us))?;
        Some(Summary {
            fio: Patterns { iops: iops.into(), read_latency_us },
            fio_rounds: guests.iter().map(|one| one.fio.clone()).collect(),
        })
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
    tables::table_by_size(configs.iter().map(|config| (&config.name, &config.figures.fio)), |fio, size| {
        let base = strict.and_then(|strict| iops(&strict.figures.fio, pattern, size));
        iops(fio, pattern, size).map_or(NONE.into(), |own| format!("{own:.0} ({})", ratio(own, base)))
    })
}

fn latencies(configs: &[Config]) -> String {
    let of = |name: &str| find(configs, name).map(|config| config.figures.fio.read_latency_us);
    let mut table = markdown::new_table(["configuration", "µs", "÷ strict", "÷ lazy"]);
    for config in configs {
        let own = config.figures.fio.read_latency_us;
        table.add_row([config.name.clone(), format!("{own:.0}"), ratio(own, of("strict")), ratio(own, of("lazy"))]);
    }
    markdown::finish(&table)
}

#[cfg(test)]
mod tests;
