// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/demo`: makes what the guests need, and has `carom-demo` measure them in the rig or on this host.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::assets::keep_results;
use crate::kernel::GuestKernel;
use crate::measuring::{self, Measuring};
use crate::tools::Tools;
use crate::work_dir;

/// The program that measures.
const PROGRAM: &str = "carom-demo";

/// Names of the configurations that are measured.
pub const CONFIGURATIONS: [&str; 8] =
    ["no-viommu", "strict", "lazy", "bounce", "qemu-strict", "qemu-lazy", "ch-strict", "ch-lazy"];

/// What is measured.
#[derive(Debug, Clone, Args)]
pub struct Measurement {
    /// Shorter measurements and no guests with two jobs.
    #[arg(long)]
    pub quick: bool,
    /// Other patterns of I/O than the plain form's reads in sequence, on strict, lazy and bounce.
    #[arg(long)]
    pub patterns: bool,
    /// What mapping and unmapping cost in the guest, by its kernel's function profiler, on qemu-strict, strict and bounce.
    #[arg(long, conflicts_with = "patterns")]
    pub map_time: bool,
    /// How often each configuration is measured, 1 to 99; the figures are medians [default: 1 with --quick, else 3].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=99))]
    pub rounds: Option<u32>,
    /// Run only the configuration of this name (repeatable).
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(CONFIGURATIONS))]
    pub only: Vec<String>,
}

/// What is to be measured, where, and what becomes of it.
#[derive(Debug, Clone, Args)]
pub struct Options {
    #[command(flatten)]
    measurement: Measurement,
    /// File for the figures.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// On this host, with this drive.
    #[arg(long, value_name = "ADDRESS")]
    direct: Option<String>,
    /// Where to keep consoles and results.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

impl Options {
    fn check(&self) -> Result<()> {
        measuring::check_peers()?;
        if let Some(address) = &self.direct {
            measuring::check_direct(address)?;
        }
        if let Some(json) = &self.json {
            measuring::check_file("--json", json)?;
        }
        Ok(())
    }
}

impl Measurement {
    /// The arguments that say the same.
    fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        for (wanted, option) in [(self.quick, "--quick"), (self.patterns, "--patterns"), (self.map_time, "--map-time")]
        {
            if wanted {
                words.push(option.into());
            }
        }
        if let Some(rounds) = self.rounds {
            words.extend(["--rounds".into(), rounds.to_string()]);
        }
        for name in &self.only {
            words.extend(["--only".into(), name.clone()]);
        }
        words
    }
}

impl Tools<'_> {
    /// Measures and shows the figures; returns the exit status.
    ///
    /// # Errors
    /// Wrong options, something that cannot be made, or a signal.
    pub fn demo(&self, options: &Options) -> Result<u8> {
        options.check()?;
        let out = work_dir::create(&env::temp_dir(), "carom-demo")?;
        let done = self.measure(options, out.path());
        self.progress.end();
        if let Some(keep) = &options.keep {
            keep_results(self, out.path(), keep);
        }
        done
    }

    fn measure(&self, options: &Options, out: &Path) -> Result<u8> {
        let (results, samples) = (out.join("results.json"), out.join("samples"));
        let mut arguments: Vec<OsString> = vec!["run".into()];
        arguments.extend(options.measurement.words().into_iter().map(OsString::from));
        arguments.extend(["--machine".into(), measuring::machine().into()]);
        arguments.extend(["--samples".into(), samples.clone().into(), "--json".into(), results.clone().into()]);
        let status = self.run_measuring(&Measuring {
            program: PROGRAM,
            arguments,
            kernel: GuestKernel { profile: options.measurement.map_time, ..GuestKernel::default() },
            variables: self.commit_variable().into_iter().collect(),
            direct: options.direct.as_deref(),
            memory: "5G",
            count_instructions: false,
            icount: false,
            more_nvme: 0,
            null_drive: false,
            time_limit: 7200,
            out,
            samples: &samples,
        })?;
        let demo = self.measuring_program(PROGRAM)?;
        if fs::metadata(&results).is_ok_and(|meta| meta.len() > 0) {
            self.run_shown(Command::new(&demo).arg("report").arg(&results))?;
            if let Some(json) = &options.json {
                fs::copy(&results, json).with_context(|| format!("writing {}", json.display()))?;
            }
        }
        self.run_shown(Command::new(&demo).arg("tally").arg(out))?;
        Ok(status)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn parse(words: &[&str]) -> Result<Options, String> {
        let line = Line::try_parse_from([&["demo"], words].concat()).map_err(|error| error.to_string())?;
        line.options.check().map(|()| line.options).map_err(|error| error.to_string())
    }

    #[test]
    fn options_reach_the_measuring_part() {
        let words = ["--quick", "--patterns", "--rounds", "2", "--only", "bounce", "--only", "strict"];
        assert_eq!(parse(&words).unwrap().measurement.words(), words);
        assert!(parse(&[]).unwrap().measurement.words().is_empty());
    }

    #[test]
    fn wrong_use_is_told() {
        for (words, reason) in [
            (vec!["--patterns", "--map-time"], "cannot be used with"),
            (vec!["--rounds", "0"], "--rounds"),
            (vec!["--only", "strictest"], "strictest"),
            (vec!["--direct", "nvme0"], "must be a PCI address"),
            (vec!["--direct", "ffff:ff:1f.7"], "no NVMe drive"),
            (vec!["--json", "/no/such/directory/file"], "its directory does not exist"),
            (vec!["--json", "/"], "or it is one"),
        ] {
            let said = parse(&words).unwrap_err();
            assert!(said.contains(reason), "{words:?}: {said}");
        }
    }
}
