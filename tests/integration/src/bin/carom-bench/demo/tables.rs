// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tables in Markdown.

use carom_integration::measure::markdown::{finish, new_table};
use carom_integration::workload::BLOCK_SIZES;

/// Returns a table with a row for each configuration and a column for each block size.
pub(crate) fn table_by_size<'name, T>(
    configs: impl Iterator<Item = (&'name String, T)>,
    cell: impl Fn(&T, &str) -> String,
) -> String {
    let mut table = new_table(["configuration"].into_iter().chain(BLOCK_SIZES));
    for (name, figures) in configs {
        table.add_row([name.clone()].into_iter().chain(BLOCK_SIZES.map(|size| cell(&figures, size))));
    }
    finish(&table)
}
