// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/test`: runs stages and lists their results at the end.
//!
//! Most stages run one after the other. Some stages run at the same time as the tests with guests, because these tests often leave CPUs
//! idle.

mod api;
mod arm64;
mod checks;
mod guests;
mod sanitizers;

use std::env;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use rustix::process::geteuid;

use crate::assets::check_pci_address;
use crate::kernel::patches_of;
use crate::priority;
use crate::tools::{Tools, Usage};

/// Stage of the tests. By default, stages run in this order. Some stages run only if the user names them, see [`Stage::is_extra`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stage {
    Format,
    Lints,
    Dependencies,
    Scripts,
    Patches,
    Allocator,
    Unit,
    Api,
    Integration,
    Arm64,
    DebianConfig,
    Sanitizers,
    Parts,
    Debug,
}

/// Options of `scripts/test`.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Kernel series of the debug stage.
    #[arg(long, value_name = "N", default_value = "6.12")]
    series: String,
    /// Run slow tests, too.
    #[arg(long)]
    all: bool,
    /// Run only tests with guests whose name contains this text.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Run all tests with guests through IOMMUFD.
    #[arg(long)]
    iommufd: bool,
    /// Run on this host, with the drive at this PCI address.
    #[arg(long, value_name = "ADDRESS")]
    direct: Option<String>,
    /// Directory that keeps the guests' consoles.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Stages to run. The default is all stages that are not extra.
    stages: Vec<Stage>,
}

impl Tools<'_> {
    /// Runs the stages and returns true if all passed.
    ///
    /// # Errors
    /// Fails on wrong options, on a signal, or if the results directory cannot be created. A failed stage is not an error.
    pub fn test(&self, options: &Options) -> Result<bool> {
        self.check(options)?;
        let stages: Vec<Stage> = match &options.stages[..] {
            [] => Stage::value_variants().iter().copied().filter(|stage| !stage.is_extra(options.all)).collect(),
            named => named.to_vec(),
        };
        let run = |out: &Path| self.run_stages(&stages, options, out);
        self.with_results(&env::temp_dir(), "carom-test", options.keep.as_deref(), run)
    }

    fn check(&self, options: &Options) -> Result<()> {
        patches_of(&self.checkout, &options.series)?;
        if let Some(address) = &options.direct {
            check_pci_address(address)?;
            if !geteuid().is_root() {
                bail!(Usage("--direct: needs root; run the script as root".into()));
            }
        }
        Ok(())
    }

    fn run_stages(&self, stages: &[Stage], options: &Options, out: &Path) -> Result<bool> {
        let bound = options.direct.as_ref().filter(|_| stages.contains(&Stage::Integration));
        let _bound = bound.map(|address| self.bind(address)).transpose()?;
        let mut report = Report::default();
        for stage in order(stages) {
            if stage == Stage::Integration {
                self.run_integration(stages, options, out, &mut report)?;
            } else {
                println!("\n==== {}", stage.name());
                let result = self.timed(|| self.run_stage(stage, options, out))?;
                report.add(self, stage, result);
            }
        }
        print!("\n{}", report.summary(stages));
        let mut passed = report.passed();
        if out.join("started").exists() {
            // Only stages with guests create this file, and these stages have built the program.
            let program = self.target_dir()?.join("debug/guest-tests");
            passed &= self.run_shown(Command::new(program).arg("tally").arg(out)).is_ok();
        }
        Ok(passed)
    }

    /// Runs the tests with guests. Stages that can wait run at the same time, on idle CPUs. When such a stage ends, its whole
    /// output is shown.
    fn run_integration(&self, stages: &[Stage], options: &Options, out: &Path, report: &mut Report) -> Result<()> {
        let beside: Vec<Stage> = stages.iter().copied().filter(|stage| stage.can_wait()).collect();
        println!("\n==== {}", Stage::Integration.name());
        let others = thread::scope(|scope| {
            let mut others = None;
            let result = self.timed(|| {
                let mut tests = self.prepare_integration(options, out)?;
                // Start the other stages only now: cargo runs one build at a time.
                others = Some(scope.spawn(|| self.run_beside(&beside, options, out)));
                let result = self.run_shown(&mut tests);
                // The guests have ended, so the other stages get their ordinary priority back.
                priority::restore_all();
                result
            })?;
            report.add(self, Stage::Integration, result);
            let others = match others {
                Some(others) => others.join().map_err(|_| anyhow!("the thread that runs the other stages panicked"))?,
                None => self.run_beside(&beside, options, out),
            };
            anyhow::Ok(others)
        })?;
        for (stage, result) in others? {
            report.note(stage, &result);
        }
        Ok(())
    }

    /// Runs these stages. The stages have the lowest priority until the guests have ended.
    fn run_beside(&self, stages: &[Stage], options: &Options, out: &Path) -> Result<Vec<(Stage, Timed)>> {
        priority::lower_own()
            .context("cannot lower the priority of the stages that run at the same time as the guests")?;
        let mut results = Vec::new();
        for &stage in stages {
            let log = out.join(format!("{}.log", stage.name()));
            let file = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
            let tools = self.with_output(file);
            let result = self.timed(|| tools.run_stage(stage, options, out))?;
            // Print with one call, so that no other output is mixed into the text.
            let said = fs::read(&log).unwrap_or_default();
            print!("\n==== {0}\n{1}==== {0}: {2}\n", stage.name(), String::from_utf8_lossy(&said), result);
            results.push((stage, result));
        }
        Ok(results)
    }

    /// Runs a stage and measures its time. Fails only on a signal: the result records a failure of the stage.
    fn timed(&self, stage: impl FnOnce() -> Result<()>) -> Result<Timed> {
        let start = Instant::now();
        let done = stage();
        self.progress.end();
        self.go_on()?;
        if let Err(error) = &done {
            self.progress.say(&format!("{error:#}"));
        }
        Ok(Timed { passed: done.is_ok(), seconds: start.elapsed().as_secs() })
    }

    fn run_stage(&self, stage: Stage, options: &Options, out: &Path) -> Result<()> {
        match stage {
            Stage::Format => self.test_format(),
            Stage::Lints => self.test_lints(),
            Stage::Dependencies => self.test_dependencies(),
            Stage::Scripts => self.test_scripts(),
            Stage::Patches => self.test_patches(),
            Stage::Allocator => self.test_allocator(),
            Stage::Unit => self.test_unit(),
            Stage::Api => self.test_api(out),
            Stage::Integration => self.run_shown(&mut self.prepare_integration(options, out)?),
            Stage::Arm64 => self.test_arm64(out),
            Stage::DebianConfig => self.test_debian_config(out),
            Stage::Sanitizers => self.test_sanitizers(),
            Stage::Parts => self.test_parts(options, out),
            Stage::Debug => self.test_debug(options, out),
        }
    }
}

impl Stage {
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// True if the stage runs only if it is named. If `all` is set, this is true only for the stages parts and debug.
    fn is_extra(self, all: bool) -> bool {
        matches!(self, Self::Parts | Self::Debug)
            || (matches!(self, Self::Arm64 | Self::DebianConfig | Self::Sanitizers) && !all)
    }

    /// True if the stage may run slowly at the same time as the tests with guests. Such a stage takes long, and none of its
    /// tests has a short time limit.
    fn can_wait(self) -> bool {
        matches!(self, Self::Lints | Self::Patches | Self::Allocator | Self::Unit | Self::Api)
    }
}

/// Returns `stages` without the stages that run at the same time as the tests with guests. Keeps the order of `stages`.
fn order(stages: &[Stage]) -> Vec<Stage> {
    let beside = stages.contains(&Stage::Integration);
    stages.iter().copied().filter(|stage| !(beside && stage.can_wait())).collect()
}

/// Result of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Timed {
    passed: bool,
    seconds: u64,
}

impl Timed {
    fn word(self) -> &'static str {
        if self.passed { "passed" } else { "FAILED" }
    }
}

impl fmt::Display for Timed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {} s", self.word(), self.seconds)
    }
}

/// Results of all stages.
#[derive(Debug, Default)]
struct Report(Vec<(Stage, Timed)>);

impl Report {
    /// Records and prints the result of a stage.
    fn add(&mut self, tools: &Tools, stage: Stage, result: Timed) {
        tools.print(&format!("==== {}: {result}\n", stage.name()));
        self.note(stage, &result);
    }

    fn note(&mut self, stage: Stage, result: &Timed) {
        self.0.push((stage, *result));
    }

    fn passed(&self) -> bool {
        self.0.iter().all(|(_, result)| result.passed)
    }

    /// Returns one line for each stage, in the order of `order`.
    fn summary(&self, order: &[Stage]) -> String {
        let mut summary = String::new();
        for stage in order {
            for (_, result) in self.0.iter().filter(|(known, _)| known == stage) {
                summary += &format!("{:<13} {:<7} {:5} s\n", stage.name(), result.word(), result.seconds);
            }
        }
        summary
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::{assert_refused, parse, with_tools};

    fn check(options: &Options) -> Result<()> {
        with_tools(&crate::checkout(), "/".as_ref(), |tools| tools.check(options))
    }

    #[test]
    fn wrong_options_are_rejected() {
        assert!(parse(&["--series", "7.3", "--filter", "a", "--all", "unit", "debug"], check).is_ok());
        let uses: [(&[&str], &str); 5] = [
            (&["nonsense"], "integration"),
            (&["--series", "9.9"], "there is no guest/patches/9.9"),
            (&["--series", "../.."], "there is no guest/patches"),
            (&["--direct", "nvme0"], "must be a PCI address"),
            (&["--filter"], "--filter"),
        ];
        assert_refused(&uses, check);
    }

    #[test]
    fn long_stages_run_only_on_request() {
        let extra =
            |all| Stage::value_variants().iter().copied().filter(|stage| stage.is_extra(all)).collect::<Vec<_>>();
        assert_eq!(extra(false), [Stage::Arm64, Stage::DebianConfig, Stage::Sanitizers, Stage::Parts, Stage::Debug]);
        assert_eq!(extra(true), [Stage::Parts, Stage::Debug]);
    }

    #[test]
    fn stages_that_can_wait_run_beside_guests() {
        use Stage::{Api, Format, Integration, Lints, Scripts, Unit};
        assert_eq!(order(&[Format, Lints, Scripts, Unit, Api, Integration]), [Format, Scripts, Integration]);
        assert_eq!(order(&[Unit, Lints, Format]), [Unit, Lints, Format]);
    }

    #[test]
    fn summary_has_a_line_for_each_stage_in_their_order() {
        let timed = |passed, seconds| Timed { passed, seconds };
        let report = Report(vec![(Stage::Unit, timed(false, 1234)), (Stage::Format, timed(true, 1))]);
        let expected = "format        passed      1 s\nunit          FAILED   1234 s\n";
        assert_eq!(report.summary(&[Stage::Format, Stage::Lints, Stage::Unit]), expected);
        assert!(!report.passed());
        assert_eq!(timed(true, 7).to_string(), "passed in 7 s");
    }
}
