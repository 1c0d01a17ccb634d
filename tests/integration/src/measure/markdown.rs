// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tables in Markdown.

use comfy_table::{CellAlignment, Table, presets};

/// Shown where there is no figure.
pub const NONE: &str = "–";

/// A table whose columns but the first are numbers.
pub fn new_table<'name>(header: impl IntoIterator<Item = &'name str>) -> Table {
    new_table_of(1, header)
}

/// A table whose first `words` columns are words, and the others numbers.
pub fn new_table_of<'name>(words: usize, header: impl IntoIterator<Item = &'name str>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
    for column in table.column_iter_mut().skip(words) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// The text of a table.
#[must_use]
pub fn finish(table: &Table) -> String {
    format!("{table}\n")
}

/// How many times `base` the figure is.
#[must_use]
pub fn ratio(figure: f64, base: Option<f64>) -> String {
    base.filter(|base| *base > 0.0).map_or(NONE.into(), |base| format!("{:.2}", figure / base))
}
