// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The part of `scripts/demo` that runs where KVM and the NVMe drive are: starts the guests, measures, writes JSON; and the
//! part that shows a table of it.

mod plan;
mod report;
mod results;
mod samples;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

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
        /// Shorter measurements and no guests with two jobs.
        #[arg(long)]
        quick: bool,
        /// How often each configuration is measured, 1 to 99; the figures are medians [default: 1 with --quick, else 3].
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=99))]
        rounds: Option<u32>,
        /// Run only the configuration of this name (repeatable).
        #[arg(long, value_name = "NAME")]
        only: Vec<String>,
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
        Action::Run { quick, rounds, only, machine, samples, json } => {
            let results = plan::run(quick, rounds.unwrap_or(if quick { 1 } else { 3 }), &only, machine, &samples)?;
            let text = serde_json::to_string_pretty(&results)?;
            fs::write(&json, text + "\n").with_context(|| format!("writing {}", json.display()))?;
            Ok(if results.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Action::Report { json } => {
            let text = fs::read_to_string(&json).with_context(|| format!("reading {}", json.display()))?;
            let results: Results =
                serde_json::from_str(&text).with_context(|| format!("reading {}", json.display()))?;
            print!("{}", report::table(&results));
            Ok(ExitCode::SUCCESS)
        }
    }
}
