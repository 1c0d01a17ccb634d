// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The part of `scripts/demo` that runs where KVM and the NVMe drive are: starts the guests, measures, writes JSON; and the
//! part that shows a table of it.

mod config;
mod form;
mod map_time;
mod patterns;
mod plain;
mod plan;
mod report;
mod results;
mod run;
mod samples;
mod tables;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use carom_integration::Tally;
use carom_tools::demo::Measurement;
use clap::{Parser, Subcommand};

use crate::map_time::MapTimes;
use crate::patterns::PatternFigures;
use crate::plain::Plain;
use crate::plan::Options;
use crate::results::Results;

/// Starts the guests of scripts/demo and shows their figures.
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
        /// What to say of the machine.
        #[arg(long, value_name = "TEXT", default_value = "")]
        machine: String,
        /// File in which each guest's figures are noted at once, and found by a later call that is to go on.
        #[arg(long, value_name = "FILE")]
        samples: PathBuf,
        /// File to write.
        #[arg(long, value_name = "FILE")]
        json: PathBuf,
    },
    /// Show a table of figures that `run` wrote.
    Report {
        /// The file.
        json: PathBuf,
    },
    /// Say how many guests were started, and how many of them again, by the notes in the directory of the results.
    Tally {
        /// The directory.
        out: PathBuf,
    },
}

fn main() -> ExitCode {
    match act(Arguments::parse().action) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("carom-demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn act(action: Action) -> Result<ExitCode> {
    match action {
        Action::Run { measurement, machine, samples, json } => {
            let Measurement { quick, patterns, map_time, rounds, only } = measurement;
            let rounds = rounds.unwrap_or(if quick { 1 } else { 3 });
            let options = Options { quick, rounds, only: &only, host: machine, samples: &samples };
            let run = match (patterns, map_time) {
                (true, _) => run::run::<PatternFigures>,
                (_, true) => run::run::<MapTimes>,
                _ => run::run::<Plain>,
            };
            let results = run(options)?;
            write(&json, &results)?;
            Ok(if results.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Action::Report { json } => {
            print!("{}", report(&json).with_context(|| format!("reading {}", json.display()))?);
            Ok(ExitCode::SUCCESS)
        }
        Action::Tally { out } => {
            println!("{}", Tally::read(&out)?);
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn write(json: &Path, results: &Results) -> Result<()> {
    let text = serde_json::to_string_pretty(results)?;
    fs::write(json, text + "\n").with_context(|| format!("writing {}", json.display()))
}

/// The report on a file, whichever form of the demo wrote it.
fn report(json: &Path) -> Result<String> {
    Ok(report::table(&serde_json::from_str(&fs::read_to_string(json)?)?))
}
