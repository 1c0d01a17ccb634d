// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The demo with `--patterns`: random writes, mixed reads and writes, and reads that are alone in flight. The plain form has
//! only reads in sequence, which are what windows help most.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use anyhow::{Result, ensure};
use carom_integration::Site;
use carom_integration::workload::{self, BLOCK_SIZES, PATTERNS, PRINT_VERSIONS, Patterns, WAIT_FOR_NVME};
use serde::{Deserialize, Serialize};

use crate::plan::{self, Options, Step};
use crate::report::{self, NONE};
use crate::results::{Machine, median};
use crate::samples::{Sample, Samples, by_name};

/// Configurations that are measured unless others are asked for: the two without windows that a guest would otherwise have,
/// and the one with.
const CONFIGS: [&str; 3] = ["strict", "lazy", "bounce"];

/// What is measured in one guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measured {
    fio: Patterns,
    /// Of what runs in the guest.
    versions: BTreeMap<String, String>,
    retries: u32,
}

/// All results of one run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Results {
    machine: Machine,
    versions: BTreeMap<String, String>,
    /// How often each configuration was measured; the rounds are interleaved.
    rounds: u32,
    /// The figures; the name of this field tells a report which form of the demo it is of.
    patterns: Vec<Config>,
    /// What went wrong: one line for each guest that failed.
    pub(crate) failures: Vec<String>,
}

/// Figures of one configuration.
#[derive(Debug, Serialize, Deserialize)]
struct Config {
    name: String,
    /// Medians over the rounds, each figure's for itself.
    fio: Patterns,
    /// Round by round.
    fio_rounds: Vec<Patterns>,
    /// How often a guest of this configuration hung and was started again.
    retries: u32,
}

/// Runs the configurations, or only those named, and collects their figures.
pub(crate) fn run(options: Options<'_>) -> Result<Results> {
    plan::check_names(options.only)?;
    let site = Site::from_env()?;
    let mut samples = Samples::open(options.samples)?;
    let names: Vec<&str> =
        if options.only.is_empty() { CONFIGS.to_vec() } else { options.only.iter().map(String::as_str).collect() };
    let steps = plan::single_steps(&names, options.rounds);
    plan::run_steps(&steps, &mut samples, |step| measure(step, &site, options.quick))?;
    let machine = plan::machine(&site, options.host)?;
    Ok(Results::new(machine, plan::versions(&site)?, options.rounds, &samples.all))
}

fn measure(step: &Step, site: &Site, quick: bool) -> Result<Measured> {
    let job = format!("{WAIT_FOR_NVME}{PRINT_VERSIONS}{}", workload::fio_patterns(if quick { 1 } else { 3 }));
    let outcome = step.guest(site).time_limit(Duration::from_secs(240)).job(&job).run(site)?;
    ensure!(outcome.job_status == 0, "the job ended with status {}; console:\n{}", outcome.job_status, outcome.console);
    let windows = outcome.counters.last().map_or(0, |counters| counters.requests.window_add);
    ensure!((windows > 0) == step.plan.bounce, "the guest had {windows} chunks of windows");
    Ok(Measured {
        fio: workload::pattern_results(&outcome)?,
        versions: workload::guest_versions(&outcome)?,
        retries: outcome.retries,
    })
}

impl Results {
    fn new(
        machine: Machine,
        mut versions: BTreeMap<String, String>,
        rounds: u32,
        samples: &[Sample<Measured>],
    ) -> Self {
        let (by_name, failures) = by_name(samples);
        for measured in by_name.iter().flat_map(|(_, all)| all) {
            versions.extend(measured.versions.clone());
        }
        let patterns = by_name.into_iter().filter_map(|(name, all)| Config::new(name, &all)).collect();
        Self { machine, versions, rounds, patterns, failures }
    }

    fn find(&self, name: &str) -> Option<&Config> {
        self.patterns.iter().find(|config| config.name == name)
    }
}

impl Config {
    fn new(name: &str, all: &[&Measured]) -> Option<Self> {
        let iops_of = |pattern: &str, size: &str| median(all.iter().filter_map(|one| iops(&one.fio, pattern, size)));
        let iops = PATTERNS.map(|pattern| {
            let sizes = BLOCK_SIZES.iter().filter_map(|size| Some(((*size).to_owned(), iops_of(pattern, size)?)));
            (pattern.to_owned(), sizes.collect())
        });
        Some(Self {
            name: name.into(),
            fio: Patterns {
                iops: iops.into(),
                read_latency_us: median(all.iter().map(|one| one.fio.read_latency_us))?,
            },
            fio_rounds: all.iter().map(|one| one.fio.clone()).collect(),
            retries: all.iter().map(|one| one.retries).sum(),
        })
    }
}

fn iops(fio: &Patterns, pattern: &str, size: &str) -> Option<f64> {
    fio.iops.get(pattern)?.get(size).copied()
}

/// The report on `results`.
pub(crate) fn table(results: &Results) -> String {
    let mut text = report::heading(&results.machine, &results.versions);
    // Writing to a String does not fail.
    let _ = writeln!(
        text,
        "Guests: {} MiB of RAM, NVMe by passthrough; fio: direct, libaio, 1 job on 1 vCPU; {}",
        results.machine.guest_ram_bytes >> 20,
        match results.rounds {
            1 => "one round".into(),
            rounds => format!("medians of {rounds} interleaved rounds"),
        }
    );
    for (pattern, what) in PATTERNS.iter().zip(["Random writes", "Random reads and writes, half of each"]) {
        let _ = write!(text, "\n{what}, depth 64, IOPS (ratio to strict):\n\n{}", speeds(results, pattern));
    }
    let _ = write!(text, "\nRandom reads of 4 KiB, depth 1, mean latency:\n\n{}\n", latencies(results));
    let retries: u32 = results.patterns.iter().map(|config| config.retries).sum();
    let _ = writeln!(text, "Guests that were started again: {retries}");
    for failure in &results.failures {
        let _ = writeln!(text, "FAILED: {failure}");
    }
    text
}

fn speeds(results: &Results, pattern: &str) -> String {
    let mut table = report::new_table(&["configuration", "4k", "16k", "64k", "128k"]);
    for config in &results.patterns {
        let cell = |size: &str| {
            let base = results.find("strict").and_then(|base| iops(&base.fio, pattern, size));
            iops(&config.fio, pattern, size).map_or(NONE.into(), |own| format!("{own:.0} ({})", ratio(own, base)))
        };
        table.add_row([config.name.clone()].into_iter().chain(BLOCK_SIZES.map(cell)));
    }
    report::finish(table)
}

fn latencies(results: &Results) -> String {
    let of = |name: &str| results.find(name).map(|config| config.fio.read_latency_us);
    let mut table = report::new_table(&["configuration", "µs", "÷ strict", "÷ lazy"]);
    for config in &results.patterns {
        let own = config.fio.read_latency_us;
        table.add_row([config.name.clone(), format!("{own:.0}"), ratio(own, of("strict")), ratio(own, of("lazy"))]);
    }
    report::finish(table)
}

fn ratio(figure: f64, base: Option<f64>) -> String {
    base.filter(|base| *base > 0.0).map_or(NONE.into(), |base| format!("{:.2}", figure / base))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(name: &str, round: u32, iops: f64, latency: f64) -> Sample<Measured> {
        let sizes: BTreeMap<String, f64> = BLOCK_SIZES.map(|size| (size.to_owned(), iops)).into();
        let fio = Patterns {
            iops: PATTERNS.map(|pattern| (pattern.to_owned(), sizes.clone())).into(),
            read_latency_us: latency,
        };
        let measured = Ok(Measured { fio, versions: BTreeMap::new(), retries: 1 });
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
        Results::new(machine, BTreeMap::new(), 2, &samples)
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
        let text = table(&Results::new(machine, BTreeMap::new(), 2, &samples));
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
