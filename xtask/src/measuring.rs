// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs the program that measures guests, on this host or in the rig. If the rig's machine dies, a new machine continues the measurement.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::available_parallelism;

use anyhow::{Context, Result, bail};
use clap::Args;
use rustix::fs::{Access, access};
use rustix::process::geteuid;

use crate::assets::{Variables, check_pci_address, direct_variables};
use crate::kernel::GuestKernel;
use crate::peers;
use crate::tools::{Tools, Usage};

/// Exit status of the rig if its machine died.
const DIED: u8 = 125;

/// Place of the measurement and of its output files.
#[derive(Debug, Clone, Args)]
pub(crate) struct Place {
    /// File for the results.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Run on this host, with the drive at this PCI address.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) direct: Option<String>,
    /// Directory that keeps consoles and results.
    #[arg(long, value_name = "DIR")]
    pub(crate) keep: Option<PathBuf>,
}

impl Place {
    pub(crate) fn check(&self) -> Result<()> {
        if let Some(address) = &self.direct {
            check_direct(address)?;
        }
        check_file("--json", self.json.as_deref())
    }
}

/// Measuring program of `tests/integration`. The program saves each sample in a file, and a later run continues from this file.
const PROGRAM: &str = "carom-bench";

/// Run of the measuring program.
#[derive(Debug, Clone)]
pub(crate) struct Measuring<'a> {
    /// Subcommand, and options that select measurements.
    pub(crate) words: Vec<String>,
    /// Kernel of the guests.
    pub(crate) kernel: GuestKernel,
    /// Additional variables for the program.
    pub(crate) variables: Variables,
    /// PCI address of the drive, if the program runs on this host.
    pub(crate) direct: Option<&'a str>,
    /// True if the rig counts instructions.
    pub(crate) count_instructions: bool,
    /// True if the rig's clock follows instructions.
    pub(crate) icount: bool,
    /// Number of NVMe drives in addition to the rig's usual drives.
    pub(crate) more_nvme: u8,
    /// True if the rig's machine has an NVMe drive that discards writes.
    pub(crate) null_drive: bool,
    /// Memory of the rig's machine.
    pub(crate) memory: &'a str,
    /// Maximum run time of one machine of the rig, in seconds.
    pub(crate) time_limit: u32,
    /// Directory for results, writable by the program.
    pub(crate) out: &'a Path,
}

impl<'a> Measuring<'a> {
    /// Returns a run in the rig that measures nothing yet and puts its results into `out`.
    pub(crate) fn new(out: &'a Path) -> Self {
        Self {
            words: Vec::new(),
            kernel: GuestKernel::default(),
            variables: Variables::new(),
            direct: None,
            count_instructions: false,
            icount: false,
            more_nvme: 0,
            null_drive: false,
            memory: "4G",
            time_limit: 3600,
            out,
        }
    }

    /// Returns the arguments of the program.
    fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = self.words.iter().map(OsString::from).collect();
        arguments.extend(["--machine".into(), machine().into()]);
        arguments.extend(["--samples".into(), samples(self.out).into(), "--json".into(), results(self.out).into()]);
        arguments
    }
}

/// Returns the file with samples in the directory `out`.
pub(crate) fn samples(out: &Path) -> PathBuf {
    out.join("samples")
}

/// Returns the file with results in the directory `out`.
fn results(out: &Path) -> PathBuf {
    out.join("results.json")
}

/// Returns command-line options: the options of `flags` whose value is true, `--rounds` and `--only`.
pub(crate) fn words(flags: &[(bool, &str)], rounds: Option<u32>, only: &[String]) -> Vec<String> {
    let mut words: Vec<String> =
        flags.iter().filter(|(wanted, _)| *wanted).map(|(_, option)| (*option).into()).collect();
    words.extend(rounds.iter().flat_map(|rounds| ["--rounds".into(), rounds.to_string()]));
    words.extend(only.iter().flat_map(|name| ["--only".into(), name.clone()]));
    words
}

impl Tools<'_> {
    /// Builds the program and returns its executable.
    pub(crate) fn measuring_program(&self) -> Result<PathBuf> {
        let words = ["build", "--release", "--locked", "-p", "carom-integration", "--bin", PROGRAM];
        self.build("the measuring part", &words)?;
        Ok(self.target_dir()?.join("release").join(PROGRAM))
    }

    /// Copies the results in `out` to `json`. Then runs the program with the arguments `report`, which shows the results. Also shows the
    /// tally of guests. Returns `status`, the exit status of the run.
    pub(crate) fn show_results(&self, out: &Path, json: Option<&Path>, report: &[OsString], status: u8) -> Result<u8> {
        let program = self.measuring_program()?;
        let results = results(out);
        let mut shown = Ok(());
        if fs::metadata(&results).is_ok_and(|meta| meta.len() > 0) {
            // Copy the results first, because showing the results may fail, for example if the results cannot be compared with the file of
            // `--compare`.
            if let Some(json) = json {
                fs::copy(&results, json).with_context(|| format!("cannot write {}", json.display()))?;
            }
            shown = self.run_shown(Command::new(&program).args(report).arg(&results));
        }
        self.run_shown(Command::new(&program).arg("tally").arg(out))?;
        // If the run failed, its status is returned instead of the report's error.
        if status == 0 {
            shown?;
        }
        Ok(status)
    }

    /// Builds what the guests need, runs the program and returns its exit status.
    pub(crate) fn run_measuring(&self, measuring: &Measuring) -> Result<u8> {
        self.need_guest_packages()?;
        let mut variables: Variables = self.carom()?;
        let program = self.measuring_program()?;
        variables.extend(self.guest(&measuring.kernel)?);
        variables.extend(measuring.variables.iter().cloned());
        if let Some(address) = measuring.direct {
            let _bound = self.bind(address)?;
            variables.extend(direct_variables(address, measuring.out));
            return self.measure(Command::new(&program).args(measuring.arguments()).envs(variables));
        }
        let mut command = self.rig_command()?;
        command.args(["--time-limit", &measuring.time_limit.to_string(), "--silence-limit", "480"]);
        command.args(["--more-nvme", &measuring.more_nvme.to_string()]);
        if measuring.null_drive {
            command.arg("--null-drive");
        }
        if measuring.count_instructions {
            command.arg("--count-instructions");
        }
        if measuring.icount {
            command.arg("--icount");
        }
        command.args(["--memory", measuring.memory, "--out"]).arg(measuring.out);
        command.arg("--").arg(&program).args(measuring.arguments());
        self.until_done(command.envs(variables), &samples(measuring.out))
    }

    /// On this host, runs measurements that need no guest. Sets `variables` for the program, and returns the program's exit status.
    pub(crate) fn run_natively(&self, measuring: &Measuring, mut variables: Variables) -> Result<u8> {
        variables.extend(self.carom()?);
        variables.extend(measuring.variables.iter().cloned());
        let program = self.measuring_program()?;
        self.measure(Command::new(&program).args(measuring.arguments()).arg("--native").envs(variables))
    }

    /// Returns the variable with the commit of the checkout, if git reports one. All parts of a run then report the same commit, even if a
    /// new commit is made meanwhile.
    pub(crate) fn commit_variable(&self) -> Option<(&'static str, OsString)> {
        self.commit().map(|commit| ("CAROM_COMMIT", commit.into()))
    }

    fn commit(&self) -> Option<String> {
        let mut git = Command::new("git");
        git.arg("-C").arg(&self.checkout).args(["rev-parse", "--short", "HEAD"]).stderr(Stdio::null());
        Some(self.output(&mut git).ok()?.trim().to_owned())
    }

    /// Runs the program. If the emulated machine dies, runs the program again in a new machine, which continues with the missing guests.
    /// The emulated machine itself sometimes hangs or panics, whatever runs in it. The loop ends: each guest has three tries, and after a
    /// machine that added no sample, no other machine is started.
    fn until_done(&self, command: &mut Command, samples: &Path) -> Result<u8> {
        loop {
            let before = length(samples);
            let status = self.measure(command)?;
            if status != DIED || length(samples) == before {
                return Ok(status);
            }
            self.progress.say("the emulated machine died; the guests without results run in a new machine");
        }
    }

    fn measure(&self, command: &mut Command) -> Result<u8> {
        self.status(command.stdin(Stdio::null()), "cannot start the measurement")
    }
}

fn length(file: &Path) -> u64 {
    fs::metadata(file).map_or(0, |meta| meta.len())
}

/// Checks that this host can run guests with the drive at this address.
fn check_direct(address: &str) -> Result<()> {
    check_pci_address(address)?;
    let class = fs::read_to_string(format!("/sys/bus/pci/devices/{address}/class")).unwrap_or_default();
    if !class.starts_with("0x0108") {
        bail!(Usage(format!("--direct {address}: there is no NVMe drive at this address (see lspci -D)")));
    }
    if !geteuid().is_root() {
        bail!(Usage("--direct: needs root; run the script as root".into()));
    }
    if access("/dev/kvm", Access::WRITE_OK).is_err() {
        bail!(Usage("--direct: no access to /dev/kvm; load the kvm module, or leave the option out".into()));
    }
    Ok(())
}

/// Checks the variables that name other VMMs.
pub(crate) fn check_peers() -> Result<()> {
    peers::check().map_err(|error| Usage(format!("{error:#}")).into())
}

/// Checks that `file`, the value of `option`, is not a directory and that its parent directory exists.
pub(crate) fn check_file(option: &str, file: Option<&Path>) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    let parent = parent(file);
    if !parent.is_dir() || file.is_dir() {
        bail!(Usage(format!(
            "{option} '{}': is a directory, or its parent directory does not exist; name a file in an existing directory",
            file.display()
        )));
    }
    Ok(())
}

/// Returns a file's parent directory.
pub(crate) fn parent(file: &Path) -> &Path {
    file.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."))
}

/// Returns one line about this machine.
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
    use super::*;

    #[test]
    fn machine_description_is_one_line() {
        let line = machine();
        assert!(line.contains(" CPUs, ") && line.ends_with(" GiB") && !line.contains('\n'), "{line}");
    }

    #[test]
    fn file_without_a_directory_is_in_the_current_one() {
        assert_eq!(parent(Path::new("a.json")), Path::new("."));
        assert_eq!(parent(Path::new("/srv/a.json")), Path::new("/srv"));
    }
}
