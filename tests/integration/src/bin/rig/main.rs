// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/rig`: runs a command in the emulated machine.

use std::process::ExitCode;

use carom_integration::rig::{self, Options};
use carom_tools::progress::Progress;
use carom_tools::signals::Signals;
use clap::Parser;

/// Runs a command in an emulated machine that has KVM, an IOMMU and devices to pass through.
#[derive(Debug, Parser)]
#[command(name = "rig", override_help = rig::HELP)]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

fn main() -> ExitCode {
    let options = Arguments::parse().options;
    let progress = Progress::new("rig");
    match Signals::catch().and_then(|signals| rig::run(&options, &signals, &progress)) {
        Ok(end) => ExitCode::from(end.status()),
        Err(error) => {
            progress.say(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}
