// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/bench`: makes what the guests need, and has `carom-bench` fill its tables in the rig or on this host.

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

/// Those of them that a quick run fills; the others have to be named: each takes a minute or more.
const QUICK: [&str; 5] = ["throughput", "map_time", "pinning", "vmm", COUNTS];

/// Those that only a run of all cells fills unless they are named: they are not of devices that are passed through, or take too long.
const NOT_PLAIN: [&str; 6] = ["scaling", "login", "disk", "network", "sandbox", "lent"];

const SYNC: &str = "sync";
const MAP_COUNTS: &str = "map_counts";
const IO_INSTRUCTIONS: &str = "io_instructions";
const START_INSTRUCTIONS: &str = "start_instructions";
/// The tables of what an emulated machine counts that runs for them alone.
pub const COUNTED: [&str; 4] = [SYNC, MAP_COUNTS, IO_INSTRUCTIONS, START_INSTRUCTIONS];

const ENGINE: &str = "engine";
const ALLOCATOR: &str = "allocator";
/// The tables of what needs no guest, and is measured natively.
pub const NATIVE: [&str; 2] = [ENGINE, ALLOCATOR];

const COUNTS: &str = "counts";
/// The tables that two runs are compared by.
pub const COMPARED: [&str; 5] = [COUNTS, SYNC, MAP_COUNTS, IO_INSTRUCTIONS, START_INSTRUCTIONS];

/// What is measured.
#[derive(Debug, Clone, Default, Args)]
pub struct Measurement {
    /// Only these tables.
    #[arg(value_name = "TABLE", value_parser = PossibleValuesParser::new(TABLES))]
    pub tables: Vec<String>,
    /// The fewest cells, once.
    #[arg(long)]
    pub quick: bool,
    /// All cells.
    #[arg(long, conflicts_with = "quick")]
    pub all_cells: bool,
    /// How often each cell is measured, 1 to 99 [default: 1 with --quick, 3 with --all-cells, else 2, but 1 for tables that take long].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=99))]
    pub rounds: Option<u32>,
    /// Run only guests of this mode (repeatable).
    #[arg(long, value_name = "MODE")]
    pub only: Vec<String>,
}

/// What is to be measured, where, and what becomes of it.
#[derive(Debug, Clone, Args)]
pub struct Options {
    #[command(flatten)]
    measurement: Measurement,
    #[command(flatten)]
    place: Place,
    /// File with what has been measured, from which a later run goes on.
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// File of an earlier run to compare counts with.
    #[arg(long, value_name = "BASE")]
    compare: Option<PathBuf>,
    /// File of an earlier run, whose counts are reckoned for hardware; nothing is measured but copies.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["Measurement", "json", "state", "compare", "plots", "direct", "icount", "keep"]
    )]
    predict: Option<PathBuf>,
    /// Directory for plots.
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// In an emulated machine whose clock goes by instructions.
    #[arg(long, conflicts_with = "direct")]
    icount: bool,
}

impl Options {
    fn check(&self) -> Result<()> {
        let counted = |table: &&String| COUNTED.contains(&table.as_str());
        if let (Some(_), Some(table)) = (&self.place.direct, self.measurement.tables.iter().find(counted)) {
            bail!(Usage(format!("--direct: the table {table} is of the emulated machine")));
        }
        if self.icount && self.measurement.wants_counted() {
            // The emulator of 10.0 dies at its start when it has both.
            let tables = COUNTED.join(", ");
            bail!(Usage(format!(
                "--icount: instructions cannot be counted beside it; name tables other than {tables}"
            )));
        }
        if self.predict.is_none() {
            measuring::check_peers()?;
        }
        self.place.check()?;
        check_file("--state", self.state.as_deref())?;
        if self.compare.is_some() && !COMPARED.iter().any(|table| self.measurement.wants(table)) {
            let tables = COMPARED.join(", ");
            bail!(Usage(format!(
                "--compare: compares the tables {tables}, none of which is among those that are named"
            )));
        }
        Ok(())
    }
}

impl Measurement {
    /// Whether this table is filled.
    #[must_use]
    pub fn wants(&self, table: &str) -> bool {
        if !self.tables.is_empty() {
            return self.tables.iter().any(|name| name == table);
        }
        if self.quick { QUICK.contains(&table) } else { self.all_cells || !NOT_PLAIN.contains(&table) }
    }

    /// Whether a table is filled that an emulated machine counts.
    fn wants_counted(&self) -> bool {
        COUNTED.iter().any(|table| self.wants(table))
    }

    /// Whether tables are named, and none but these.
    fn names_only(&self, tables: &[&str]) -> bool {
        !self.tables.is_empty() && self.tables.iter().all(|table| tables.contains(&table.as_str()))
    }

    /// The arguments that say the same.
    fn words(&self) -> Vec<String> {
        let options =
            measuring::words(&[(self.quick, "--quick"), (self.all_cells, "--all-cells")], self.rounds, &self.only);
        [self.tables.clone(), options].concat()
    }
}

impl Tools<'_> {
    /// Measures and shows the tables; returns the exit status.
    ///
    /// # Errors
    /// Wrong options, something that cannot be made, or a signal.
    pub fn bench(&self, options: &Options) -> Result<u8> {
        options.check()?;
        if let Some(file) = &options.predict {
            self.run_shown(Command::new(self.measuring_program()?).arg("predict").arg(file))?;
            return Ok(0);
        }
        // The state's file is to be in both directories.
        let place = options.state.as_deref().map_or_else(env::temp_dir, |state| parent(state).into());
        self.with_results(&place, "carom-bench", options.place.keep.as_deref(), |out| self.fill_tables(options, out))
    }

    /// What only some tables need.
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

    /// Has the program fill the tables, and returns its exit status. What needs no guest comes first, then instructions, in a machine
    /// of their own, as counting them slows it down; what is noted then is not measured again.
    fn fill(&self, measurement: &Measurement, measuring: Measuring) -> Result<u8> {
        let only_native = measurement.names_only(&NATIVE);
        let wants_native = NATIVE.iter().any(|table| measurement.wants(table));
        // Modes are of guests.
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

    /// Measures what needs no guest, and returns the program's exit status.
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
            // Before anything is measured.
            let mut check = Command::new(self.measuring_program()?);
            self.run_shown(check.arg("check").arg(base).args(options.measurement.words()))?;
        }
        if let Some(state) = &options.state {
            // The same file, so that nothing is lost however this ends.
            File::options()
                .create(true)
                .append(true)
                .open(state)
                .and_then(|_| fs::hard_link(state, measuring::samples(out)))
                .with_context(|| {
                    format!("--state {}: cannot be written, or its file system has no hard links", state.display())
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
    fn options_reach_the_measuring_part() {
        let words = ["vmm", "counts", "--all-cells", "--rounds", "5", "--only", "bounce", "--only", "ch-strict"];
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
    fn wrong_use_is_told() {
        let uses: [(&[&str], &str); 13] = [
            (&["speed"], "speed"),
            (&["--quick", "--all-cells"], "cannot be used with"),
            (&["--rounds", "0"], "--rounds"),
            (&["--state", "/no/such/directory/file"], "--state"),
            (&["--json", "/"], "or it is one"),
            (&["--compare", "base.json", "vmm"], "none of which is among those that are named"),
            (&["--predict", "base.json", "--quick"], "cannot be used with"),
            (&["--predict", "base.json", "counts"], "cannot be used with"),
            (&["--predict", "base.json", "--plots", "dir"], "cannot be used with"),
            (&["--direct", "nvme0"], "must be a PCI address"),
            (&["--direct", "0000:01:00.0", "sync"], "of the emulated machine"),
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
