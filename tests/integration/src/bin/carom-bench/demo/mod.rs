// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Subcommand `demo`, which `scripts/demo` runs on the machine with KVM and the NVMe drive. It runs the guests and measures, or
//! shows earlier results as tables.

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

use std::path::Path;

use anyhow::Result;
use carom_tools::demo::Measurement;

use crate::demo::map_time::MapTimes;
use crate::demo::patterns::PatternFigures;
use crate::demo::plain::Plain;
use crate::demo::plan::Options;

pub(crate) use report::table;
pub(crate) use results::Results;

/// Runs the guests of the selected form.
pub(crate) fn run(measurement: Measurement, host: String, samples: &Path) -> Result<Results> {
    let Measurement { quick, patterns, map_time, rounds, only } = measurement;
    let rounds = rounds.unwrap_or(if quick { 1 } else { 3 });
    let options = Options { quick, rounds, only: &only, host, samples };
    match (patterns, map_time) {
        (true, _) => run::run::<PatternFigures>(options),
        (_, true) => run::run::<MapTimes>(options),
        _ => run::run::<Plain>(options),
    }
}
