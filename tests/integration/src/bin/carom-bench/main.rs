// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Program that `scripts/bench` runs on the machine with KVM and the NVMe drive. The subcommand `run` starts the guests, measures,
//! and writes the results as JSON. The subcommand `demo` does the same work for `scripts/demo`. The other subcommands show, compare
//! or check results.

mod allocator;
mod busy_loops;
mod compare;
mod counted;
mod counters;
mod counts;
mod demo;
mod density;
mod disk;
mod engine;
mod first_use;
mod hardware;
mod io_instructions;
mod lent;
mod login;
mod map_counts;
mod map_time;
mod network;
mod pinning;
mod plots;
mod pools;
mod report;
mod results;
mod sample;
mod sandbox;
mod scaling;
mod start_instructions;
mod summary;
mod sync;
mod table;
mod tables;
mod tenant;
mod throughput;
mod vmm;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Error, Result, ensure};
use carom_integration::measure::journal::Journal;
use carom_integration::measure::machine::{self, Machine};
use carom_integration::{Site, Tally};
use carom_tools::bench::{COUNTED, Measurement, NATIVE};
use carom_tools::peers::{BASE, CLOUD_HYPERVISOR, OTHER, QEMU};
use clap::{Args, Parser, Subcommand};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::busy_loops::BusyLoops;
use crate::results::Results;
use crate::sample::{Key, Sample, Step};
use crate::table::{Scope, Table};
use crate::tables::TABLES;

/// Runs the guests of scripts/bench and scripts/demo, and shows the measured figures.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Run the guests here and write the figures as JSON.
    Run {
        #[command(flatten)]
        measurement: Measurement,
        #[command(flatten)]
        files: Files,
        /// Measure only tables with counted instructions.
        #[arg(long)]
        counting: bool,
        /// Measure only tables that need no guest. In the results, the name of the rig is then `native`.
        #[arg(long, conflicts_with = "counting")]
        native: bool,
    },
    /// Show tables of the figures that `run` wrote.
    Report {
        /// File that `run` wrote.
        json: PathBuf,
        /// Directory for plots.
        #[arg(long, value_name = "DIR")]
        plots: Option<PathBuf>,
        /// File that `run` wrote earlier. The counts in the file BASE are compared with the counts in the file JSON.
        #[arg(long, value_name = "BASE")]
        compare: Option<PathBuf>,
    },
    /// Check that the file BASE contains at least one table of counts that `run` would also measure with these options. Only
    /// such tables can be compared.
    Check {
        /// File of an earlier run.
        base: PathBuf,
        #[command(flatten)]
        measurement: Measurement,
    },
    /// Predict results on hardware from the counts of a run.
    Predict {
        /// The file that `run` wrote.
        json: PathBuf,
    },
    /// Show how many guests were started, and how many of them were started again.
    Tally {
        /// Results directory.
        out: PathBuf,
    },
    /// Run the guests of scripts/demo, or show their figures.
    #[command(subcommand)]
    Demo(Demo),
}

#[derive(Debug, Subcommand)]
enum Demo {
    /// Run the guests here and write the figures as JSON.
    Run {
        #[command(flatten)]
        measurement: carom_tools::demo::Measurement,
        #[command(flatten)]
        files: Files,
    },
    /// Show a table of the figures that `run` wrote.
    Report {
        /// File that `run` wrote.
        json: PathBuf,
    },
}

/// Description of a run's machine, and the files for the run's figures.
#[derive(Debug, Args)]
struct Files {
    /// Description of the machine.
    #[arg(long, value_name = "TEXT", default_value = "")]
    machine: String,
    /// File for the samples. Each sample is saved as soon as it is measured. The run skips work whose sample is already in the file.
    #[arg(long, value_name = "FILE")]
    samples: PathBuf,
    /// File for the results.
    #[arg(long, value_name = "FILE")]
    json: PathBuf,
}

fn main() -> ExitCode {
    let action = Arguments::parse().action;
    let program = if matches!(action, Action::Demo(_)) { "carom-demo" } else { "carom-bench" };
    act(action).unwrap_or_else(|error| {
        eprintln!("{program}: {error:#}");
        ExitCode::FAILURE
    })
}

fn act(action: Action) -> Result<ExitCode> {
    match action {
        Action::Run { measurement, files: Files { machine, samples, json }, counting, native } => {
            let part = match (counting, native) {
                (true, _) => Part::Counted,
                (_, true) => Part::Native,
                _ => Part::All,
            };
            let results = run(&measurement, machine, &samples, part)?;
            return write(&json, &results, &results.failures);
        }
        Action::Demo(Demo::Run { measurement, files: Files { machine, samples, json } }) => {
            let results = demo::run(measurement, machine, &samples)?;
            return write(&json, &results, &results.failures);
        }
        Action::Demo(Demo::Report { json }) => print!("{}", demo::table(&read(&json)?)),
        Action::Report { json, plots, compare } => {
            let results = read(&json)?;
            print!("{}", report::text(&results));
            if let Some(base) = compare {
                let text = compare::text(&results, &read(&base)?);
                print!("{}", text.with_context(|| format!("--compare {}", base.display()))?);
            }
            plots.map(|dir| plots::write(&results, &dir)).transpose()?;
        }
        Action::Check { base, measurement } => {
            let wanted: Vec<&str> = compare::tables().into_iter().filter(|table| measurement.wants(table)).collect();
            let has_wanted = |base: Results| wanted.iter().any(|table| base.tables.contains_key(*table));
            ensure!(
                read(&base).is_ok_and(has_wanted),
                "--compare {}: cannot be read, or has none of the tables {}; use the --json file of an earlier run",
                base.display(),
                wanted.join(", ")
            );
        }
        Action::Predict { json } => {
            let text = hardware::text(&read(&json)?);
            print!("{}", text.with_context(|| format!("--predict {}", json.display()))?);
        }
        Action::Tally { out } => println!("{}", Tally::read(&out)?),
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes `results` to the file `json`. Returns a failing exit status if `failures` is not empty.
fn write(json: &Path, results: &impl Serialize, failures: &[String]) -> Result<ExitCode> {
    let text = serde_json::to_string_pretty(results)?;
    fs::write(json, text + "\n").with_context(|| format!("cannot write {}", json.display()))?;
    Ok(if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Reads results from a JSON file.
fn read<R: DeserializeOwned>(json: &Path) -> Result<R> {
    let text = fs::read_to_string(json);
    let results = text.map_err(Error::new).and_then(|text| Ok(serde_json::from_str(&text)?));
    results.with_context(|| format!("cannot read {}", json.display()))
}

/// Part of the tables to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// All tables. Samples that an earlier run of another part has saved to the same file are not measured again.
    All,
    /// Tables with counted instructions.
    Counted,
    /// Tables that need no guest.
    Native,
}

impl Part {
    fn has(self, table: &str) -> bool {
        match self {
            Self::All => true,
            Self::Counted => COUNTED.contains(&table),
            Self::Native => NATIVE.contains(&table),
        }
    }
}

fn run(measurement: &Measurement, host: String, samples: &Path, part: Part) -> Result<Results> {
    let (scope, usual) = match (measurement.quick, measurement.all_cells) {
        (true, _) => (Scope::Quick, 1),
        (_, true) => (Scope::All, 3),
        _ => (Scope::Plain, 2),
    };
    let rounds = measurement.rounds.unwrap_or(usual);
    let is_once_enough = scope == Scope::Plain && measurement.rounds.is_none() && measurement.tables.is_empty();
    let rounds_of = |table: &Table| if is_once_enough && table.is_once_enough { 1 } else { rounds };
    let (site, versions) = match part {
        Part::Native => {
            let carom = PathBuf::from(
                env::var_os("CAROM_BIN").context("CAROM_BIN is not set; run scripts/bench, which sets it")?,
            );
            let versions = BTreeMap::from([("carom".to_owned(), machine::carom(&carom)?)]);
            (Site { rig: "native".into(), ..Site::default() }, versions)
        }
        _ => {
            let site = Site::from_env()?;
            let versions = machine::versions(&site)?;
            (site, versions)
        }
    };
    // A saved sample is used again only if neither Carom nor the VMMs for comparison have changed. So the name of the run
    // contains Carom's version and the values of the variables that select these VMMs.
    let peers = [QEMU, CLOUD_HYPERVISOR, BASE, OTHER].map(|variable| env::var(variable).unwrap_or_default());
    let beside = if measurement.beside > 0 { format!(" beside {}", measurement.beside) } else { String::new() };
    let run = format!("{} {} {peers:?}{beside}", scope.name(), versions.get("carom").map_or("", String::as_str));
    let tables: Vec<&Table> = TABLES.iter().filter(|table| measurement.wants(table.name)).collect();
    let steps = sample::steps(&run, rounds_of, &tables, |table| (table.work)(scope, &site));
    let mut steps = match part {
        // Without a machine for guests, the available modes are unknown, so `--only` is not applied.
        Part::Native => steps,
        _ => sample::only(steps, &measurement.only)?,
    };
    let asked: Vec<Key> = steps.iter().map(|step| step.key.clone()).collect();
    steps.retain(|step| part.has(&step.key.table));
    let mut journal: Journal<Sample> = Journal::open(samples)?;
    if site.rig == "tcg" && steps.iter().any(|step| !journal.has(&step.key)) {
        eprintln!(
            "carom-bench writes once to all free memory of the emulated machine, so that the first guests are not slower than later guests"
        );
        first_use::use_free_memory()?;
    }
    let loops = BusyLoops::start(measurement.beside)?;
    journal.measure(&steps, |step| measure(step, &site))?;
    drop(loops);
    let samples = sample::of(&journal.all, &asked);
    let machine = Machine::here(&site, host, u64::from(throughput::RAM_MIB) << 20)?;
    Ok(Results::new(machine, versions, &format!("{}{beside}", scope.name()), rounds, &samples))
}

fn measure(step: &Step, site: &Site) -> Result<Sample> {
    let name: String = format!("bench-{}-{}-{}", step.key.table, step.key.work, step.key.round)
        .chars()
        .map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' })
        .collect();
    let measured = (step.work.run)(site, &name)?;
    measured.failures.iter().for_each(|failure| eprintln!("FAILED: {failure}"));
    Ok(Sample { key: step.key.clone(), measured: Ok(measured) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tables_can_be_requested() {
        assert_eq!(TABLES.each_ref().map(|table| table.name), carom_tools::bench::TABLES);
        let (mut compared, mut names) = (compare::tables(), carom_tools::bench::COMPARED);
        compared.sort_unstable();
        names.sort_unstable();
        assert_eq!(compared, names);
    }
}
