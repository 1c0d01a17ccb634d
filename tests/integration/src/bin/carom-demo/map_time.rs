// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The demo with `--map-time`: what mapping and unmapping cost in the guest, for each GiB that a drive reads, by its kernel's
//! function profiler. Unlike `dma_map_benchmark` it sees what drivers map and how long that really takes them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use anyhow::{Result, ensure};
use carom_integration::Site;
use carom_integration::workload::{self, BLOCK_SIZES, MapTime, PRINT_VERSIONS, WAIT_FOR_NVME};
use serde::{Deserialize, Serialize};

use crate::plan::{self, Options, Step};
use crate::report::{self, NONE};
use crate::results::{Machine, median};
use crate::samples::{Sample, Samples, by_name};

/// Configurations that are measured unless others are asked for.
const CONFIGS: [&str; 3] = ["qemu-strict", "strict", "bounce"];

/// What the others are compared with.
const PEER: &str = "qemu-strict";

/// What is measured in one guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measured {
    times: BTreeMap<String, MapTime>,
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
    map_times: Vec<Config>,
    /// What went wrong: one line for each guest that failed.
    pub(crate) failures: Vec<String>,
}

/// Figures of one configuration.
#[derive(Debug, Serialize, Deserialize)]
struct Config {
    name: String,
    /// Medians over the rounds, each figure's for itself, by block size.
    times: BTreeMap<String, MapTime>,
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
    let job = format!("{WAIT_FOR_NVME}{PRINT_VERSIONS}{}", workload::fio_profiled(if quick { 8 } else { 24 }));
    let outcome = step.guest(site).time_limit(Duration::from_secs(300)).job(&job).run(site)?;
    ensure!(outcome.job_status == 0, "the job ended with status {}; console:\n{}", outcome.job_status, outcome.console);
    Ok(Measured {
        times: workload::map_times(&outcome)?,
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
        let map_times = by_name.into_iter().map(|(name, all)| Config::new(name, &all)).collect();
        Self { machine, versions, rounds, map_times, failures }
    }
}

impl Config {
    fn new(name: &str, all: &[&Measured]) -> Self {
        let time = |size: &str| -> Option<MapTime> {
            let of = |figure: fn(&MapTime) -> f64| median(all.iter().filter_map(|one| one.times.get(size)).map(figure));
            Some(MapTime { map_s: of(|time| time.map_s)?, unmap_s: of(|time| time.unmap_s)? })
        };
        Self {
            name: name.into(),
            times: BLOCK_SIZES.iter().filter_map(|size| Some(((*size).to_owned(), time(size)?))).collect(),
            retries: all.iter().map(|one| one.retries).sum(),
        }
    }
}

/// The report on `results`.
pub(crate) fn table(results: &Results) -> String {
    let mut text = report::heading(&results.machine, &results.versions);
    // Writing to a String does not fail.
    let _ = writeln!(
        text,
        "Guests: {} MiB of RAM, NVMe by passthrough; fio: read, direct, libaio, depth 64, 1 job on 1 vCPU; {}",
        results.machine.guest_ram_bytes >> 20,
        match results.rounds {
            1 => "one round".into(),
            rounds => format!("medians of {rounds} interleaved rounds"),
        }
    );
    for (what, figure) in [("mapping", (|time| time.map_s) as fn(&MapTime) -> f64), ("unmapping", |time| time.unmap_s)]
    {
        let _ = write!(
            text,
            "\nSeconds of {what} for each GiB, by the kernel's function profiler (less than {PEER}):\n\n{}",
            times(results, figure)
        );
    }
    let retries: u32 = results.map_times.iter().map(|config| config.retries).sum();
    let _ = writeln!(text, "\nGuests that were started again: {retries}");
    for failure in &results.failures {
        let _ = writeln!(text, "FAILED: {failure}");
    }
    text
}

fn times(results: &Results, figure: fn(&MapTime) -> f64) -> String {
    let of = |config: &Config, size: &str| config.times.get(size).map(figure);
    let mut table = report::new_table(&["configuration", "4k", "16k", "64k", "128k"]);
    for config in &results.map_times {
        let cell = |size: &str| {
            let peer = results.map_times.iter().find(|peer| peer.name == PEER && peer.name != config.name);
            match (of(config, size), peer.and_then(|peer| of(peer, size))) {
                (None, _) => NONE.into(),
                (Some(own), None) => format!("{own:.3}"),
                (Some(own), Some(peer)) => format!("{own:.3} ({:+.1} %)", (own / peer - 1.0) * 100.0),
            }
        };
        table.add_row([config.name.clone()].into_iter().chain(BLOCK_SIZES.map(cell)));
    }
    report::finish(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_medians_and_what_is_saved() {
        let sample = |name: &str, round: u32, map_s: f64| {
            let times = BLOCK_SIZES.map(|size| (size.to_owned(), MapTime { map_s, unmap_s: 2.0 * map_s })).into();
            let measured = Ok(Measured { times, versions: BTreeMap::new(), retries: 1 });
            Sample { name: name.into(), round, two_jobs: false, measured }
        };
        let mut samples = vec![sample(PEER, 0, 10.0), sample("bounce", 0, 0.25), sample("bounce", 1, 0.15)];
        samples.push(Sample { name: PEER.into(), round: 1, two_jobs: false, measured: Err("it failed".into()) });
        let machine = Machine { host: "h".into(), rig: "tcg".into(), kernel: "k".into(), guest_ram_bytes: 1 << 30 };
        let results = Results::new(machine, BTreeMap::new(), 2, &samples);
        let text = table(&results);
        assert_eq!(text.matches("0.200 (-98.0 %)").count(), 4, "{text}");
        assert_eq!(text.matches("0.400 (-98.0 %)").count(), 4, "{text}");
        assert!(
            text.contains(" 10.000 ") && text.contains("started again: 3\nFAILED: qemu-strict: it failed"),
            "{text}"
        );
        let again: Results = serde_json::from_str(&serde_json::to_string(&results).unwrap()).unwrap();
        assert_eq!(table(&again), text);
    }
}
