// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of `scripts/rig`. The help text is in `help.txt`, so the script can show the text without building anything.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Command, FromArgMatches, ValueEnum};

/// Kernel of the emulated machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kernel {
    /// The stock kernel of Debian 12.
    Debian,
    /// Linux 6.12, built for the rig with IOMMUFD.
    Iommufd,
}

/// Accelerator of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Accelerator {
    /// KVM if it supports nested KVM, otherwise emulation.
    Auto,
    /// KVM.
    Kvm,
    /// Emulation.
    Tcg,
}

/// The command to run, and the machine's configuration.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Time limit of the machine, in seconds, 1 to 999999.
    #[arg(long, value_name = "SECONDS", default_value = "900", value_parser = seconds(1))]
    pub time_limit: Duration,
    /// Seconds without output after which the machine counts as dead, up to 999999; 0 for no limit.
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = seconds(0))]
    pub silence_limit: Duration,
    /// Memory of the machine.
    #[arg(long, value_name = "SIZE", default_value = "4G", value_parser = size)]
    pub memory: String,
    /// Host directory that the command can write to.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Variables for the command. A variable without a value gets its value from this process.
    #[arg(long, value_name = "NAME[=VALUE]", value_parser = variable)]
    pub env: Vec<String>,
    /// Size of each NVMe drive.
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = size)]
    pub nvme_size: String,
    /// Number of additional NVMe drives, 0 to 12.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=12))]
    pub more_nvme: u8,
    /// Add an NVMe drive that discards writes.
    #[arg(long)]
    pub null_drive: bool,
    /// Image of the machine's disk.
    #[arg(long, value_name = "FILE")]
    pub disk: Option<PathBuf>,
    /// Give the command a terminal.
    #[arg(long, short)]
    pub terminal: bool,
    /// Count instructions between marks, and write the counts to a file that the command can read. KVM does not support this.
    #[arg(long, requires = "out")]
    pub count_instructions: bool,
    /// Let the machine's clock follow the executed instructions. KVM does not support this.
    #[arg(long)]
    pub icount: bool,
    /// Leave the devices without a driver.
    #[arg(long)]
    pub no_bind: bool,
    /// Kernel of the machine.
    #[arg(long, value_name = "NAME", default_value = "debian")]
    pub kernel: Kernel,
    /// Additional arguments of QEMU, split at blanks.
    #[arg(long, value_name = "STRING", allow_hyphen_values = true)]
    pub qemu_args: Vec<String>,
    /// Accelerator of the machine.
    #[arg(long, value_name = "auto|kvm|tcg", default_value = "auto")]
    pub accel: Accelerator,
    /// File for a copy of the machine's console.
    #[arg(long, value_name = "FILE")]
    pub keep_console: Option<PathBuf>,
    /// Show the machine's console on stderr.
    #[arg(long, short)]
    pub verbose: bool,
    /// Directory in which the command starts. On the command line, this is always the current directory.
    #[arg(skip)]
    pub directory: Option<PathBuf>,
    /// The command.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

impl Options {
    /// Returns the defaults, without a command.
    #[must_use]
    pub fn plain() -> Self {
        let words = Self::augment_args(Command::new("rig")).get_matches_from(["rig", "--", ""]);
        let options = Self::from_arg_matches(&words).expect("each option except the command has a default");
        Self { command: Vec::new(), ..options }
    }
}

/// Returns a parser of whole seconds.
fn seconds(least: u64) -> impl Fn(&str) -> Result<Duration, String> + Clone {
    move |text| match text.parse::<u64>() {
        Ok(number) if (least..=999_999).contains(&number) => Ok(Duration::from_secs(number)),
        _ => Err("must be a whole number of seconds, at most 999999".into()),
    }
}

/// Checks that a size has a format that both QEMU and truncate(1) accept.
fn size(text: &str) -> Result<String, String> {
    let digits = text.strip_suffix(['K', 'M', 'G']).unwrap_or_default();
    if digits.parse::<u64>().is_ok_and(|number| number > 0) && digits.starts_with(|first| first != '+') {
        Ok(text.into())
    } else {
        Err("must be a whole number with K, M or G, such as 4G".into())
    }
}

/// Checks the name of a variable.
fn variable(text: &str) -> Result<String, String> {
    let name = text.split('=').next().unwrap_or_default();
    let starts = name.starts_with(|first: char| first == '_' || first.is_ascii_alphabetic());
    if starts && name.chars().all(|letter| letter == '_' || letter.is_ascii_alphanumeric()) {
        Ok(text.into())
    } else {
        Err("must be NAME or NAME=VALUE".into())
    }
}

/// Converts a size to bytes.
pub(super) fn bytes(size: &str) -> Option<u64> {
    let (digits, unit) = size.split_at_checked(size.len().checked_sub(1)?)?;
    let shift = match unit {
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[derive(Debug, Parser)]
    struct Arguments {
        #[command(flatten)]
        options: Options,
    }

    fn parse(arguments: &[&str]) -> Result<Options, clap::Error> {
        let all = ["rig"].iter().chain(arguments).copied();
        Arguments::try_parse_from(all).map(|arguments| arguments.options)
    }

    #[test]
    fn defaults_are_the_same_for_programs_and_on_the_command_line() {
        let options = parse(&["--", "true"]).unwrap();
        let plain = Options { command: vec!["true".into()], ..Options::plain() };
        assert_eq!(format!("{options:?}"), format!("{plain:?}"));
    }

    #[test]
    fn only_options_before_the_command_belong_to_the_rig() {
        let options = parse(&["--time-limit", "7", "--env", "A=b c", "--qemu-args", "-m 1G", "-v", "--", "sh", "-v"]);
        let options = options.unwrap();
        assert_eq!((options.time_limit, options.verbose), (Duration::from_secs(7), true));
        assert_eq!((options.env, options.qemu_args), (vec!["A=b c".to_owned()], vec!["-m 1G".to_owned()]));
        assert_eq!(options.command, ["sh", "-v"]);
    }

    #[test]
    fn invalid_values_are_rejected() {
        for wrong in [
            ["--time-limit", "0"],
            ["--time-limit", "1000000"],
            ["--silence-limit", "long"],
            ["--memory", "4"],
            ["--memory", "0G"],
            ["--nvme-size", "+1M"],
            ["--more-nvme", "13"],
            ["--kernel", "other"],
            ["--accel", "hvf"],
            ["--env", "1A=b"],
            ["--env", "A-B"],
            ["--env", "=b"],
        ] {
            let error = parse(&[wrong[0], wrong[1], "--", "true"]).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{wrong:?}");
            assert!(error.to_string().contains(wrong[0]), "{error}");
        }
    }

    #[test]
    fn command_is_required_after_two_dashes() {
        assert!(parse(&[]).is_err());
        assert!(parse(&["true"]).is_err());
        assert!(parse(&["--"]).is_err());
    }

    #[test]
    fn help_names_each_option_and_no_other() {
        let help = crate::rig::HELP;
        let command = Arguments::command();
        let known: Vec<String> =
            command.get_arguments().filter_map(|argument| Some(format!("--{}", argument.get_long()?))).collect();
        for option in &known {
            assert!(help.contains(&format!("{option} ")), "{option} is not in the help");
        }
        let shown = help.lines().filter_map(|line| {
            line.trim_start().trim_start_matches("-v, ").trim_start_matches("-t, ").strip_prefix("--")
        });
        for option in shown.filter_map(|line| line.split_whitespace().next()) {
            assert!(known.contains(&format!("--{option}")), "--{option} is not an option");
        }
    }

    #[test]
    fn sizes_are_counted_in_bytes() {
        assert_eq!(bytes("3K"), Some(3 << 10));
        assert_eq!(bytes("512M"), Some(512 << 20));
        assert_eq!(bytes("2G"), Some(2 << 30));
        assert_eq!(bytes("99999999999999999G"), None);
    }
}
