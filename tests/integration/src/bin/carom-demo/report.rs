// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The demo's results as text: tables in Markdown, so that they can stand in a document as they are.

use std::fmt::Write;

use carom_integration::workload::BLOCK_SIZES;
use comfy_table::{CellAlignment, Table, presets};

use crate::form::Form;
use crate::map_time::MapTimes;
use crate::patterns::PatternFigures;
use crate::plain::Plain;
use crate::results::{Config, Configs, Results};

/// Shown where there is no figure.
pub(crate) const NONE: &str = "–";

/// The report on `results`.
pub(crate) fn table(results: &Results) -> String {
    match &results.configs {
        Configs::Plain(configs) => table_of::<Plain>(results, configs),
        Configs::Patterns(configs) => table_of::<PatternFigures>(results, configs),
        Configs::MapTimes(configs) => table_of::<MapTimes>(results, configs),
    }
}

fn table_of<F: Form>(results: &Results, configs: &[Config<F::Summary>]) -> String {
    let machine = &results.machine;
    let versions: Vec<String> = results.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let rounds = match (results.rounds, results.quick) {
        (1, None) => "; one round".into(),
        (1, Some(true)) => " (quick run)".into(),
        (1, Some(false)) => String::new(),
        (rounds, _) => format!("; medians of {rounds} interleaved rounds"),
    };
    let mut text = format!(
        "Machine: {}; rig: {}; {}\nVersions: {}\nGuests: {} MiB of RAM, NVMe by passthrough; fio: {}{rounds}\n",
        machine.host,
        machine.rig,
        machine.kernel,
        versions.join("; "),
        machine.guest_ram_bytes >> 20,
        F::FIO,
    );
    text += &F::tables(configs, machine);
    let retries: u32 = configs.iter().map(|config| config.retries).sum();
    // Writing to a String does not fail.
    let _ = writeln!(text, "Guests that were started again: {retries}");
    for failure in &results.failures {
        let _ = writeln!(text, "FAILED: {failure}");
    }
    text
}

/// A table of configurations, each with its name and its figures, and a column for each block size.
pub(crate) fn table_by_size<'name, T>(
    configs: impl Iterator<Item = (&'name String, T)>,
    cell: impl Fn(&T, &str) -> String,
) -> String {
    let mut table = new_table(["configuration"].into_iter().chain(BLOCK_SIZES));
    for (name, figures) in configs {
        table.add_row([name.clone()].into_iter().chain(BLOCK_SIZES.map(|size| cell(&figures, size))));
    }
    finish(table)
}

/// A table whose columns but the first are numbers.
pub(crate) fn new_table<'name>(header: impl IntoIterator<Item = &'name str>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// The text of a table.
pub(crate) fn finish(table: Table) -> String {
    format!("{table}\n")
}

/// How many times `base` the figure is.
pub(crate) fn ratio(figure: f64, base: Option<f64>) -> String {
    base.filter(|base| *base > 0.0).map_or(NONE.into(), |base| format!("{:.2}", figure / base))
}
