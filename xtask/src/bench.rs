// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/bench`: builds what the guests need, and runs `carom-bench` in the rig or on this host. `carom-bench` fills tables with
//! measured figures.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::assets::Variables;
use crate::kernel::GuestKernel;
use crate::measuring::{self, Measuring, Place, check_file, parent};
use crate::tools::{Tools, Usage};

/// Names of the tables.
pub const TABLES: [&str; 19] = [
    "throughput",
    "scaling",
    "map_time",
    SYNC,
    MAP_COUNTS,
    IO_INSTRUCTIONS,
    START_INSTRUCTIONS,
    ENGINE,
    ALLOCATOR,
    "pinning",
    "pools",
    "density",
    "vmm",
    "login",
    "disk",
    "network",
    "sandbox",
    "lent",
    COUNTS,
];

/// Tables of a quick run. Each other table takes a minute or more, so a quick run fills such a table only if the user names the table.
const QUICK: [&str; 5] = ["throughput", "map_time", "pinning", "vmm", COUNTS];

/// Tables that are filled only with `--all-cells`, or if the user names the table. These tables do not measure passthrough devices, or take
/// too long.
const NOT_PLAIN: [&str; 6] = ["scaling", "login", "disk", "network", "sandbox", "lent"];

const SYNC: &str = "sync";
const MAP_COUNTS: &str = "map_counts";
const IO_INSTRUCTIONS: &str = "io_instructions";
const START_INSTRUCTIONS: &str = "start_instructions";
/// Tables whose figures the emulator counts. They are filled in a separate emulated machine.
pub const COUNTED: [&str; 4] = [SYNC, MAP_COUNTS, IO_INSTRUCTIONS, START_INSTRUCTIONS];

const ENGINE: &str = "engine";
const ALLOCATOR: &str = "allocator";
/// Tables that need no guest and are measured natively.
pub const NATIVE: [&str; 2] = [ENGINE, ALLOCATOR];

const COUNTS: &str = "counts";
/// Tables whose counts can be compared between two runs.
pub const COMPARED: [&str; 5] = [COUNTS, SYNC, MAP_COUNTS, IO_INSTRUCTIONS, START_INSTRUCTIONS];

/// Selection of measurements.
#[derive(Debug, Clone, Default, Args)]
pub struct Measurement {
    /// Tables to fill.
    #[arg(value_name = "TABLE", value_parser = PossibleValuesParser::new(TABLES))]
    pub tables: Vec<String>,
    /// Measure the fewest cells of each table, in one round.
    #[arg(long)]
    pub quick: bool,
    /// Measure all cells.
    #[arg(long, conflicts_with = "quick")]
    pub all_cells: bool,
    /// Rounds per cell, 1 to 99 [default: 1 with --quick, 3 with --all-cells, else 2, but 1 for tables that take long].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=99))]
    pub rounds: Option<u32>,
    /// Run only guests of this mode (repeatable).
    #[arg(long, value_name = "MODE")]
    pub only: Vec<String>,
    /// Busy loops that run on the guests' host while anything is measured, 0 to 64.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=64))]
    pub beside: u32,
}

/// Selection of measurements, their place and their output files.
#[derive(Debug, Clone, Args)]
pub struct Options {
    #[command(flatten)]
    measurement: Measurement,
    #[command(flatten)]
    place: Place,
    /// File that keeps samples, so that a later run can continue.
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// File of an earlier run to compare counts with.
    #[arg(long, value_name = "BASE")]
    compare: Option<PathBuf>,
    /// File of an earlier run, whose counts predict results on hardware. Only the cost of copies is measured anew.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["Measurement", "json", "state", "compare", "plots", "direct", "icount", "keep"]
    )]
    predict: Option<PathBuf>,
    /// Directory for plots.
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Run in an emulated machine whose clock follows instructions.
    #[arg(long, conflicts_with = "direct")]
    icount: bool,
}

impl Options {
    fn check(&self) -> Result<()> {
        let counted = |table: &&String| COUNTED.contains(&table.as_str());
        if let (Some(_), Some(table)) = (&self.place.direct, self.measurement.tables.iter().find(counted)) {
            bail!(Usage(format!(
                "--direct: table {table} needs the emulated machine; leave out --direct or the table"
            )));
        }
        if self.icount && self.measurement.wants_counted() {
            // QEMU 10.0 crashes at its start with both `-icount` and the counting plug-in.
            let tables = COUNTED.join(", ");
            bail!(Usage(format!(
                "--icount: cannot be combined with tables of counted instructions; name tables other than {tables}"
            )));
        }
        if self.predict.is_none() {
            measuring::check_peers()?;
        }
        self.place.check()?;
        check_file("--state", self.state.as_deref())?;
        if self.compare.is_some() && !COMPARED.iter().any(|table| self.measurement.wants(table)) {
            let tables = COMPARED.join(", ");
            bail!(Usage(format!("--compare: can compare only the tables {tables}; name at least one of these tables")));
        }
        Ok(())
    }
}

impl Measurement {
    /// True if this measurement fills the table.
    #[must_use]
    pub fn wants(&self, table: &str) -> bool {
        if !self.tables.is_empty() {
            return self.tables.iter().any(|name| name == table);
        }
        if self.quick { QUICK.contains(&table) } else { self.all_cells || !NOT_PLAIN.contains(&table) }
    }

    /// True if this measurement fills a table whose figures the emulator counts.
    fn wants_counted(&self) -> bool {
        COUNTED.iter().any(|table| self.wants(table))
    }

    /// True if tables are named, and all of them are in `tables`.
    fn names_only(&self, tables: &[&str]) -> bool {
        !self.tables.is_empty() && self.tables.iter().all(|table| tables.contains(&table.as_str()))
    }

    /// Returns the command-line arguments that select this measurement.
    fn words(&self) -> Vec<String> {
        let options =
            measuring::words(&[(self.quick, "--quick"), (self.all_cells, "--all-cells")], self.rounds, &self.only);
        let beside = if self.beside > 0 { vec!["--beside".into(), self.beside.to_string()] } else { Vec::new() };
        [self.tables.clone(), options, beside].concat()
    }
}

impl Tools<'_> {
    /// Measures, shows the tables and returns the exit status.
    ///
    /// # Errors
    /// Fails on wrong options, if something cannot be built, or on a signal.
    pub fn bench(&self, options: &Options) -> Result<u8> {
        options.check()?;
        if let Some(file) = &options.predict {
            self.run_shown(Command::new(self.measuring_program()?).arg("predict").arg(file))?;
            return Ok(0);
        }
        // The results directory contains a hard link to the state file, so the directory and the file must be on one file system.
        let place = options.state.as_deref().map_or_else(env::temp_dir, |state| parent(state).into());
        self.with_results(&place, "carom-bench", options.place.keep.as_deref(), |out| self.fill_tables(options, out))
    }

    /// Returns the variables that only some tables need.
    fn bench_variables(&self, measurement: &Measurement, direct: bool) -> Result<Variables> {
        let mut variables: Variables = self.commit_variable().into_iter().collect();
        if (measurement.wants(SYNC) || measurement.wants(MAP_COUNTS)) && !direct {
            for (variable, stock) in [("CAROM_MODULAR_KERNEL", false), ("CAROM_MODULAR_STOCK_KERNEL", true)] {
                let modules = Some(self.checkout.join("guest/bench"));
                let dir = self.guest_kernel(&GuestKernel { stock, modules, ..GuestKernel::default() })?;
                variables.push((variable, dir.join("bzImage").into()));
            }
        }
        if measurement.wants("density") {
            variables.push(("CAROM_TENANT", self.guest_program("tenant")?.into()));
        }
        if measurement.wants("login") {
            variables.push(("CAROM_DISTRIBUTION", self.distribution()?.into()));
        }
        if measurement.wants("network") {
            variables.push(("CAROM_IPERF3", self.need_command("iperf3", "iperf3", "the table of networks")?.into()));
        }
        Ok(variables)
    }

    /// Runs the program that fills the tables, and returns its exit status.
    ///
    /// Native tables are filled first. Tables with counted instructions follow, in a separate emulated machine, because counting slows the
    /// machine down. Samples that exist already are not measured again.
    fn fill(&self, measurement: &Measurement, measuring: Measuring) -> Result<u8> {
        let only_native = measurement.names_only(&NATIVE);
        let wants_native = NATIVE.iter().any(|table| measurement.wants(table));
        // `--only` selects modes of guests. With this option, native tables are filled only if no other tables are named.
        let native = if only_native || (wants_native && measurement.only.is_empty()) {
            self.fill_native(measurement, &measuring)?
        } else {
            0
        };
        if only_native {
            return Ok(native);
        }
        if !measurement.wants_counted() || measuring.direct.is_some() {
            return self.run_measuring(&measuring);
        }
        let mut counting =
            Measuring { count_instructions: true, memory: "4G", more_nvme: 0, time_limit: 3600, ..measuring.clone() };
        counting.words.push("--counting".into());
        let status = self.run_measuring(&counting)?.max(native);
        if measurement.names_only(&[&COUNTED[..], &NATIVE].concat()) {
            Ok(status)
        } else {
            self.run_measuring(&measuring)
        }
    }

    /// Runs measurements that need no guest, and returns the program's exit status.
    fn fill_native(&self, measurement: &Measurement, measuring: &Measuring) -> Result<u8> {
        let mut variables = Variables::new();
        if measurement.wants(ENGINE) {
            variables.push(("CAROM_ENGINE_BENCH", self.benchmark("iommu_bounce", "map_unmap")?.into()));
        }
        variables.push(("CAROM_ALLOCATOR", self.checkout.join("guest/tests/allocator/run").into()));
        self.run_natively(measuring, variables)
    }

    fn fill_tables(&self, options: &Options, out: &Path) -> Result<u8> {
        if let Some(base) = &options.compare {
            // Check the file of `--compare` before measuring, because measuring takes long.
            let mut check = Command::new(self.measuring_program()?);
            self.run_shown(check.arg("check").arg(base).args(options.measurement.words()))?;
        }
        if let Some(state) = &options.state {
            // The file with samples is a hard link to the state file. So the state file keeps all samples, however this run ends.
            File::options()
                .create(true)
                .append(true)
                .open(state)
                .and_then(|_| fs::hard_link(state, measuring::samples(out)))
                .with_context(|| {
                    format!("--state {}: cannot write this file, or its file system lacks hard links", state.display())
                })?;
        }
        let measuring = Measuring {
            words: [vec!["run".into()], options.measurement.words()].concat(),
            variables: self.bench_variables(&options.measurement, options.place.direct.is_some())?,
            direct: options.place.direct.as_deref(),
            icount: options.icount,
            memory: "6G",
            more_nvme: 12,
            null_drive: options.measurement.wants("scaling"),
            time_limit: 16 * 3600,
            ..Measuring::new(out)
        };
        let status = self.fill(&options.measurement, measuring)?;
        let mut report: Vec<OsString> = vec!["report".into()];
        for (option, value) in [("--plots", &options.plots), ("--compare", &options.compare)] {
            report.extend(value.iter().flat_map(|value| [option.into(), value.into()]));
        }
        self.show_results(out, options.place.json.as_deref(), &report, status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::{assert_refused, parse};

    #[test]
    fn options_are_passed_to_the_measuring_program() {
        let words = [
            "vmm",
            "counts",
            "--all-cells",
            "--rounds",
            "5",
            "--only",
            "bounce",
            "--only",
            "ch-strict",
            "--beside",
            "2",
        ];
        assert_eq!(parse(&words, Options::check).unwrap().measurement.words(), words);
        assert!(parse(&[], Options::check).unwrap().measurement.words().is_empty());
    }

    #[test]
    fn quick_and_plain_runs_leave_tables_out_unless_they_are_named() {
        let wanted = |words: &[&str]| {
            let measurement = parse(words, Options::check).unwrap().measurement;
            TABLES.into_iter().filter(|table| measurement.wants(table)).collect::<Vec<_>>()
        };
        assert_eq!(wanted(&["--all-cells"]), TABLES);
        assert_eq!(
            wanted(&[]),
            [
                "throughput",
                "map_time",
                "sync",
                "map_counts",
                "io_instructions",
                "start_instructions",
                "engine",
                "allocator",
                "pinning",
                "pools",
                "density",
                "vmm",
                "counts"
            ]
        );
        assert_eq!(wanted(&["disk"]), ["disk"]);
        assert_eq!(wanted(&["--quick"]), ["throughput", "map_time", "pinning", "vmm", "counts"]);
        assert_eq!(wanted(&["--quick", "density", "sync"]), ["sync", "density"]);
    }

    #[test]
    fn wrong_options_are_rejected() {
        let uses: [(&[&str], &str); 13] = [
            (&["speed"], "speed"),
            (&["--quick", "--all-cells"], "cannot be used with"),
            (&["--rounds", "0"], "--rounds"),
            (&["--state", "/no/such/directory/file"], "--state"),
            (&["--json", "/"], "is a directory"),
            (&["--compare", "base.json", "vmm"], "name at least one of these tables"),
            (&["--predict", "base.json", "--quick"], "cannot be used with"),
            (&["--predict", "base.json", "counts"], "cannot be used with"),
            (&["--predict", "base.json", "--plots", "dir"], "cannot be used with"),
            (&["--direct", "nvme0"], "must be a PCI address"),
            (&["--direct", "0000:01:00.0", "sync"], "needs the emulated machine"),
            (&["--icount", "counts", "io_instructions"], "name tables other than sync, map_counts"),
            (&["--icount"], "name tables other than"),
        ];
        assert_refused(&uses, Options::check);
        assert!(parse(&["--compare", "base.json", "io_instructions"], Options::check).is_ok());
        assert!(
            parse(&["--icount", "--quick"], Options::check).is_ok()
                && parse(&["--icount", "counts"], Options::check).is_ok()
        );
    }
}
