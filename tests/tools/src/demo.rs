// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/demo`: makes what the guests need, and has `carom-demo` measure them in the rig or on this host.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::available_parallelism;

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use rustix::fs::{Access, access};
use rustix::process::geteuid;

use crate::assets::{is_pci_address, keep_results};
use crate::children::run_command;
use crate::kernel::GuestKernel;
use crate::tools::{Tools, Usage};
use crate::work_dir;

/// Names of the configurations that are measured.
pub const CONFIGURATIONS: [&str; 8] =
    ["no-viommu", "strict", "lazy", "bounce", "qemu-strict", "qemu-lazy", "ch-strict", "ch-lazy"];

/// Exit status of the rig whose machine died.
const DIED: u8 = 125;

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
        if let Some(address) = &self.direct {
            check_direct(address)?;
        }
        if let Some(json) = &self.json {
            let parent = json.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
            if !parent.is_dir() || json.is_dir() {
                bail!(Usage(format!("--json '{}': its directory does not exist, or it is one", json.display())));
            }
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

fn check_direct(address: &str) -> Result<()> {
    if !is_pci_address(address) {
        bail!(Usage(format!("--direct '{address}': must be a PCI address such as 0000:01:00.0")));
    }
    let class = fs::read_to_string(format!("/sys/bus/pci/devices/{address}/class")).unwrap_or_default();
    if !class.starts_with("0x0108") {
        bail!(Usage(format!("--direct {address}: there is no NVMe drive at this address (see lspci -D)")));
    }
    if !geteuid().is_root() {
        bail!(Usage("--direct: needs root".into()));
    }
    if access("/dev/kvm", Access::WRITE_OK).is_err() {
        bail!(Usage("--direct: no access to /dev/kvm; load the kvm module, or leave the option out".into()));
    }
    Ok(())
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
        self.need_guest_packages()?;
        let mut variables = self.carom()?;
        self.build(
            "the measuring part",
            &["build", "--release", "--locked", "-p", "carom-integration", "--bin", "carom-demo"],
        )?;
        variables.extend(self.guest(&GuestKernel { profile: options.measurement.map_time, ..GuestKernel::default() })?);
        let mut git = self.git();
        if let Ok(commit) = self.output(git.args(["rev-parse", "--short", "HEAD"]).stderr(Stdio::null())) {
            variables.push(("CAROM_COMMIT", commit.trim().into()));
        }
        let target = self.target_dir()?;
        let (demo, results) = (target.join("release/carom-demo"), out.join("results.json"));
        let add_run = |command: &mut Command| {
            command.arg("run").args(options.measurement.words()).arg("--machine").arg(machine());
            command.arg("--samples").arg(out.join("samples")).arg("--json").arg(&results);
        };
        let status = match &options.direct {
            Some(address) => {
                let _bound = self.bind(address)?;
                variables.extend([
                    ("CAROM_NVME", address.into()),
                    ("CAROM_RIG", "direct".into()),
                    ("CAROM_OUT", out.into()),
                ]);
                let mut command = Command::new(&demo);
                add_run(&mut command);
                self.status(command.envs(variables))?
            }
            None => {
                self.build("the rig", &["build", "--locked", "--workspace", "--bin", "rig"])?;
                let mut command = Command::new(target.join("debug/rig"));
                command.args(["--time-limit", "7200", "--silence-limit", "480", "--memory", "5G", "--out"]).arg(out);
                command.arg("--").arg(&demo);
                add_run(&mut command);
                self.until_done(command.envs(variables), out)?
            }
        };
        if fs::metadata(&results).is_ok_and(|meta| meta.len() > 0) {
            self.run_shown(Command::new(&demo).arg("report").arg(&results))?;
            if let Some(json) = &options.json {
                fs::copy(&results, json).with_context(|| format!("writing {}", json.display()))?;
            }
        }
        self.run_shown(Command::new(&demo).arg("tally").arg(out))?;
        Ok(status)
    }

    /// The emulated machine itself hangs or panics now and then, whatever runs in it: a new one goes on with the guests that are
    /// missing. Each guest has three tries, which ends the loop.
    fn until_done(&self, command: &mut Command, out: &Path) -> Result<u8> {
        loop {
            let status = self.status(command)?;
            let has_samples = fs::metadata(out.join("samples")).is_ok_and(|meta| meta.len() > 0);
            if status != DIED || !has_samples {
                return Ok(status);
            }
            self.progress.say("the emulated machine died; the missing guests run in a new one");
        }
    }

    fn git(&self) -> Command {
        let mut git = Command::new("git");
        git.arg("-C").arg(&self.checkout);
        git
    }

    /// Runs a program; returns its exit status.
    fn status(&self, command: &mut Command) -> Result<u8> {
        self.progress.end();
        let mut child = command.stdin(Stdio::null()).spawn().context("starting the measurement")?;
        let Some(status) = run_command(&mut child, self.signals)? else { bail!("interrupted") };
        Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
    }
}

/// One line about this machine.
fn machine() -> String {
    let field = |file: &str, name: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines().find_map(|line| Some(line.strip_prefix(name)?.split_once(':')?.1.trim().to_owned()))
    };
    let model = field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown CPU".into());
    let kib = field("/proc/meminfo", "MemTotal").and_then(|text| text.strip_suffix(" kB")?.parse::<u64>().ok());
    let gib = (kib.unwrap_or_default() + (1 << 19)) >> 20;
    format!("{model}, {} CPUs, {gib} GiB", available_parallelism().map_or(1, usize::from))
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

    #[test]
    fn machine_is_told_in_a_line() {
        let line = machine();
        assert!(line.contains(" CPUs, ") && line.ends_with(" GiB") && !line.contains('\n'), "{line}");
    }
}
