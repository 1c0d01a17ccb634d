// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/demo`: builds what the guests need and runs `carom-bench`, which measures the guests in the rig or on this host.

use std::env;
use std::path::Path;

use anyhow::Result;
use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::kernel::GuestKernel;
use crate::measuring::{self, Measuring, Place};
use crate::tools::Tools;

/// Names of the measured configurations.
pub const CONFIGURATIONS: [&str; 8] =
    ["no-viommu", "strict", "lazy", "bounce", "qemu-strict", "qemu-lazy", "ch-strict", "ch-lazy"];

/// Selection of measurements.
#[derive(Debug, Clone, Args)]
pub struct Measurement {
    /// Shorter measurements, without guests with two jobs.
    #[arg(long)]
    pub quick: bool,
    /// Random and mixed I/O instead of sequential reads, in the configurations strict, lazy and bounce.
    #[arg(long)]
    pub patterns: bool,
    /// Cost of mapping and unmapping in the guest, measured by the guest kernel's function profiler, in the configurations qemu-strict,
    /// strict and bounce.
    #[arg(long, conflicts_with = "patterns")]
    pub map_time: bool,
    /// Rounds per configuration, 1 to 99; the figures are medians [default: 1 with --quick, else 3].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=99))]
    pub rounds: Option<u32>,
    /// Run only the configuration of this name (repeatable).
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(CONFIGURATIONS))]
    pub only: Vec<String>,
}

/// Selection of measurements, their place and their output files.
#[derive(Debug, Clone, Args)]
pub struct Options {
    #[command(flatten)]
    measurement: Measurement,
    #[command(flatten)]
    place: Place,
}

impl Options {
    fn check(&self) -> Result<()> {
        measuring::check_peers()?;
        self.place.check()
    }
}

impl Measurement {
    /// Returns the command-line arguments that select this measurement.
    fn words(&self) -> Vec<String> {
        let flags = [(self.quick, "--quick"), (self.patterns, "--patterns"), (self.map_time, "--map-time")];
        measuring::words(&flags, self.rounds, &self.only)
    }
}

impl Tools<'_> {
    /// Measures, shows the figures and returns the exit status.
    ///
    /// # Errors
    /// Fails on wrong options, if something cannot be built, or on a signal.
    pub fn demo(&self, options: &Options) -> Result<u8> {
        options.check()?;
        let measure = |out: &Path| self.measure_demo(options, out);
        self.with_results(&env::temp_dir(), "carom-demo", options.place.keep.as_deref(), measure)
    }

    fn measure_demo(&self, options: &Options, out: &Path) -> Result<u8> {
        let status = self.run_measuring(&Measuring {
            words: ["demo", "run"].into_iter().map(String::from).chain(options.measurement.words()).collect(),
            kernel: GuestKernel { profile: options.measurement.map_time, ..GuestKernel::default() },
            variables: self.commit_variable().into_iter().collect(),
            direct: options.place.direct.as_deref(),
            memory: "5G",
            time_limit: 7200,
            ..Measuring::new(out)
        })?;
        self.show_results(out, options.place.json.as_deref(), &["demo".into(), "report".into()], status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::{assert_refused, parse};

    #[test]
    fn options_are_passed_to_the_measuring_program() {
        let words = ["--quick", "--patterns", "--rounds", "2", "--only", "bounce", "--only", "strict"];
        assert_eq!(parse(&words, Options::check).unwrap().measurement.words(), words);
        assert!(parse(&[], Options::check).unwrap().measurement.words().is_empty());
    }

    #[test]
    fn wrong_options_are_rejected() {
        let uses: [(&[&str], &str); 7] = [
            (&["--patterns", "--map-time"], "cannot be used with"),
            (&["--rounds", "0"], "--rounds"),
            (&["--only", "strictest"], "strictest"),
            (&["--direct", "nvme0"], "must be a PCI address"),
            (&["--direct", "ffff:ff:1f.7"], "no NVMe drive"),
            (&["--json", "/no/such/directory/file"], "its parent directory does not exist"),
            (&["--json", "/"], "is a directory"),
        ];
        assert_refused(&uses, Options::check);
    }
}
