// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The stages `integration` and `debug` of `scripts/test`: runs programs of tests with real guests and devices in the rig, in a new
//! machine where one has died, or on this host.

mod program;
mod suite;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, ensure};
use carom_integration::Tally;
use carom_integration::rig::Kernel;
use carom_tools::progress::Progress;
use carom_tools::signals::Signals;
use clap::{Args, Parser, Subcommand};

use crate::program::Program;
use crate::suite::{Limits, Place, Suites};

/// Runs tests with real guests.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// The tests of a plain run.
    Integration {
        #[command(flatten)]
        common: Common,
        /// Tests that are left out for their time, too.
        #[arg(long)]
        all: bool,
        /// No tests whose name contains this.
        #[arg(long, value_name = "TEXT")]
        skip: Option<OsString>,
        /// All by IOMMUFD, in a rig whose kernel has it.
        #[arg(long)]
        iommufd: bool,
        /// On this host in place of the rig.
        #[arg(long)]
        direct: bool,
    },
    /// The tests in a kernel that looks for mistakes.
    Debug {
        #[command(flatten)]
        common: Common,
    },
    /// Say how many guests were started and how many of them again; fails if those are too many.
    Tally {
        /// Directory of the results.
        out: PathBuf,
    },
}

#[derive(Debug, Args)]
struct Common {
    /// Directory of the results.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Only tests whose name contains this.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// A program of tests: its name, the directory of its package, its file (repeatable).
    #[arg(long, num_args = 3, value_names = ["NAME", "DIR", "FILE"])]
    program: Vec<PathBuf>,
}

impl Common {
    /// The filter as an argument of the tests. At least one test must have a name with it.
    fn filter_for(&self, tests: &Program) -> Result<Option<OsString>> {
        let Some(filter) = &self.filter else { return Ok(None) };
        ensure!(tests.has_test(filter)?, "no test's name contains {filter:?}");
        Ok(Some(filter.into()))
    }
}

fn main() -> ExitCode {
    let progress = Progress::new("guest-tests");
    match act(Arguments::parse().action, &progress) {
        Ok(code) => code,
        Err(error) => {
            progress.say(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn act(action: Action, progress: &Progress) -> Result<ExitCode> {
    let signals = match &action {
        Action::Tally { out } => return tally(out),
        _ => Signals::catch()?,
    };
    let passed = match action {
        Action::Integration { common, all, skip, iommufd, direct } => {
            let kernel = if iommufd { Kernel::Iommufd } else { Kernel::Debian };
            let place = if direct { Place::Here } else { Place::Rig(kernel) };
            integration(&common, all, skip, place, &signals, progress)
        }
        Action::Debug { common } => debug(&common, &signals, progress),
        Action::Tally { .. } => Ok(true),
    };
    match (signals.caught(), passed) {
        (Some(signal), _) => Ok(ExitCode::from(128 + signal)),
        (None, passed) => Ok(if passed? { ExitCode::SUCCESS } else { ExitCode::FAILURE }),
    }
}

/// The guests' tests, and before them those of VFIO itself; in a whole run in the rig some of both by IOMMUFD as well.
fn integration(
    common: &Common,
    all: bool,
    skip: Option<OsString>,
    place: Place,
    signals: &Signals,
    progress: &Progress,
) -> Result<bool> {
    let guests = Program::find(&common.program, "guest")?;
    let mut arguments: Vec<OsString> = skip.into_iter().flat_map(|text| ["--skip".into(), text]).collect();
    if all || common.filter.is_some() {
        arguments.push(OsString::from("--include-ignored"));
    }
    arguments.extend(common.filter_for(&guests)?);
    let limits = match (&common.filter, all) {
        (Some(_), _) => NAMED,
        (None, true) => ALL,
        (None, false) => PLAIN,
    };
    let mut suites = Suites::new(&common.out, limits, signals, progress);
    if let (None, Place::Rig(kernel)) = (&common.filter, place) {
        let devices = Program::find(&common.program, "vfio_hardware")?;
        suites.run_whole(&devices, place)?;
        suites.run(&guests, place, &arguments, false)?;
        if kernel == Kernel::Debian {
            let iommufd = Place::Rig(Kernel::Iommufd);
            suites.run_whole(&devices, iommufd)?;
            suites.run(&guests, iommufd, &arguments, true)?;
        }
    } else {
        suites.run(&guests, place, &arguments, false)?;
    }
    Ok(suites.passed())
}

/// A silence longer than any guest's time limit, twice (each has a second chance), means that the machine hangs.
const PLAIN: Limits = Limits { time: Duration::from_secs(2700), silence: Duration::from_secs(480) };

/// Slow tests have time too, also on a machine that has other work.
const ALL: Limits = Limits { time: Duration::from_secs(5400), ..PLAIN };

/// Some tests go on for as long as a variable says, and are run by their name.
const NAMED: Limits = Limits { time: Duration::from_secs(24 * 3600), ..PLAIN };

/// The same for guests that are ten times slower.
const SLOW: Limits = Limits { time: Duration::from_secs(5400), silence: Duration::from_secs(1000) };

fn debug(common: &Common, signals: &Signals, progress: &Progress) -> Result<bool> {
    let guests = Program::find(&common.program, "debug")?;
    let mut arguments = vec![OsString::from("--nocapture")];
    arguments.extend(common.filter_for(&guests)?);
    let mut suites = Suites::new(&common.out, SLOW, signals, progress);
    suites.run(&guests, Place::Rig(Kernel::Debian), &arguments, false)?;
    Ok(suites.passed())
}

fn tally(out: &Path) -> Result<ExitCode> {
    let tally = Tally::read(out)?;
    for guest in &tally.again {
        println!("started again: {guest}");
    }
    println!("{tally}");
    Ok(if tally.too_many_again() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
