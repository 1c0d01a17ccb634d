// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stages `integration` and `debug` of `scripts/test`: runs test programs with real guests and devices, in the rig or on this host.
//! If the rig's machine dies, a new machine runs the remaining tests.

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
    /// Run the tests with real guests and devices. Without --all or --filter, leave out slow tests.
    Integration {
        #[command(flatten)]
        common: Common,
        /// Also run slow tests.
        #[arg(long)]
        all: bool,
        /// Skip tests whose name contains this text.
        #[arg(long, value_name = "TEXT")]
        skip: Option<OsString>,
        /// Use IOMMUFD for the devices of all tests. The rig then runs a kernel that supports IOMMUFD. This option has no effect
        /// with --direct.
        #[arg(long)]
        iommufd: bool,
        /// Run on this host instead of the rig.
        #[arg(long)]
        direct: bool,
    },
    /// Run the tests whose guests have a debug kernel.
    Debug {
        #[command(flatten)]
        common: Common,
    },
    /// Show how many guests were started, and how many of them were started again. Fail if too many were started again.
    Tally {
        /// Results directory.
        out: PathBuf,
    },
}

#[derive(Debug, Args)]
struct Common {
    /// Results directory.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Run only tests whose name contains this text.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Test program, as three values: the name, the directory of the package, and the executable file. Can be repeated.
    #[arg(long, num_args = 3, value_names = ["NAME", "DIR", "FILE"])]
    program: Vec<PathBuf>,
}

impl Common {
    /// Returns the filter as an argument for the test program. Fails if no test's name contains the filter.
    fn filter_for(&self, tests: &Program) -> Result<Option<OsString>> {
        let Some(filter) = &self.filter else { return Ok(None) };
        ensure!(tests.has_test(filter)?, "--filter: no test's name contains {filter:?}");
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

/// Runs the guest tests. In the rig, if no filter is set, also runs the VFIO tests. If this rig has Debian's kernel, a second
/// rig then runs the VFIO tests and some guest tests again, with IOMMUFD.
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

/// Limits of a plain run. A guest is started at most twice. So if a machine prints nothing for more than twice the longest time
/// limit of a guest, the machine hangs.
const PLAIN: Limits = Limits { time: Duration::from_secs(2700), silence: Duration::from_secs(480) };

/// Limits of runs with slow tests. These limits must also suffice on a busy machine.
const ALL: Limits = Limits { time: Duration::from_secs(5400), ..PLAIN };

/// Limits of tests that the user selects by name. These limits are generous, because environment variables set the duration of some
/// tests.
const NAMED: Limits = Limits { time: Duration::from_secs(24 * 3600), ..PLAIN };

/// Limits of the stage `debug`, whose guests are ten times slower.
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
