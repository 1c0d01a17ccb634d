// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Markdown tables.

use comfy_table::{CellAlignment, Table, presets};

/// Text for a missing figure.
pub const NONE: &str = "–";

/// Creates a table with text in the first column and numbers in the other columns.
pub fn new_table<'name>(header: impl IntoIterator<Item = &'name str>) -> Table {
    new_table_of(1, header)
}

/// Creates a table with text in the first `words` columns and numbers in the other columns.
pub fn new_table_of<'name>(words: usize, header: impl IntoIterator<Item = &'name str>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
    for column in table.column_iter_mut().skip(words) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Returns the text of a table.
#[must_use]
pub fn finish(table: &Table) -> String {
    format!("{table}\n")
}

/// Returns the ratio of the figure to `base` as text, or [`NONE`] without a base.
#[must_use]
pub fn ratio(figure: f64, base: Option<f64>) -> String {
    base.filter(|base| *base > 0.0).map_or(NONE.into(), |base| format!("{:.2}", figure / base))
}
