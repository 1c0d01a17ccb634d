// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tables in Markdown.

use carom_integration::workload::BLOCK_SIZES;
use comfy_table::{CellAlignment, Table, presets};

/// Shown where there is no figure.
pub(crate) const NONE: &str = "–";

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
