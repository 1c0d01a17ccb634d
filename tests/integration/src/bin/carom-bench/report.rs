// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results as Markdown text. Each shown figure has its own table, in most cases with one column for each mode.

use std::collections::BTreeMap;
use std::fmt::Write;

use carom_integration::measure::machine::Machine;
use carom_integration::measure::markdown::{self, NONE};
use serde_json::Value;

use crate::results::{Merged, Results};
use crate::table::{Shown, Table, word};
use crate::tables::TABLES;

/// Returns the report on `results`.
pub(crate) fn text(results: &Results) -> String {
    let rounds = match results.rounds {
        1 => "All figures are from one round.".to_owned(),
        rounds => {
            format!(
                "Figures with parentheses: median (minimum–maximum) of up to {rounds} rounds. Other figures: one round."
            )
        }
    };
    let mut text = head(&results.machine, &results.versions);
    // Writing to a String does not fail.
    let _ = writeln!(text, "Cells: {}\n{rounds}", results.scope);
    for table in &TABLES {
        let Some(rows) = results.tables.get(table.name) else { continue };
        for shown in table.shown {
            let of_it = rows.iter().filter(|row| row.spread.contains_key(shown.figure));
            // Rows with different sets of keys are in separate tables.
            for rows in by_keys(table, of_it) {
                let _ = write!(text, "\n{}: {}\n\n{}", table.name, shown.title, side_by_side(table, shown, &rows));
            }
        }
    }
    if !results.summary.is_empty() {
        text += "\nSummary (each figure is calculated separately for each round):\n\n";
        text += &summary(results);
    }
    text + "\n" + &tail(results.retries, &results.failures)
}

/// Returns lines that describe the machine and the versions of the measured programs.
pub(crate) fn head(machine: &Machine, versions: &BTreeMap<String, String>) -> String {
    let versions: Vec<String> = versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let Machine { host, rig, kernel, .. } = machine;
    format!("Machine: {host}; rig: {rig}; {kernel}\nVersions: {}\n", versions.join("; "))
}

/// Returns lines with the number of restarted guests and with the failures.
pub(crate) fn tail(retries: u32, failures: &[String]) -> String {
    let failures: String = failures.iter().map(|failure| format!("FAILED: {failure}\n")).collect();
    format!("Guests that were started again: {retries}\n{failures}")
}

/// Groups the rows by the names of their keys.
fn by_keys<'row>(table: &Table, rows: impl Iterator<Item = &'row Merged>) -> Vec<Vec<&'row Merged>> {
    let names = |row: &'row Merged| -> Vec<&'row String> { keys(table, row).into_iter().map(|(key, _)| key).collect() };
    let mut parts: Vec<Vec<&Merged>> = Vec::new();
    for row in rows {
        match parts.iter_mut().find(|part| names(part[0]) == names(row)) {
            Some(part) => part.push(row),
            None => parts.push(vec![row]),
        }
    }
    parts
}

/// Returns a table of one figure. The table has a column for each value of the key `table.across`, and a row for each combination
/// of the other keys' values.
fn side_by_side(table: &Table, shown: &Shown, rows: &[&Merged]) -> String {
    let mut columns: Vec<&Value> = Vec::new();
    let mut lines: Vec<Vec<(&String, &Value)>> = Vec::new();
    for row in rows {
        let column = &row.fields[table.across];
        if !columns.contains(&column) {
            columns.push(column);
        }
        let line = keys(table, row);
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    let names: Vec<&str> = lines.first().into_iter().flatten().map(|(key, _)| key.as_str()).collect();
    let header: Vec<String> =
        names.iter().map(|name| (*name).to_owned()).chain(columns.iter().map(|value| word(value))).collect();
    let mut text = markdown::new_table_of(names.len(), header.iter().map(String::as_str));
    for line in lines {
        let of =
            |column: &&Value| rows.iter().find(|row| row.fields[table.across] == **column && keys(table, row) == line);
        let cells = columns.iter().map(|column| of(column).map_or(NONE.into(), |row| cell(shown, row)));
        text.add_row(line.iter().map(|(_, value)| word(value)).chain(cells));
    }
    markdown::finish(&text)
}

/// Returns the keys of a row, except `table.across`. All fields that are not figures are keys.
fn keys<'row>(table: &Table, row: &'row Merged) -> Vec<(&'row String, &'row Value)> {
    row.fields.iter().filter(|(key, _)| *key != table.across && !row.spread.contains_key(*key)).collect()
}

fn cell(shown: &Shown, row: &Merged) -> String {
    let Some(median) = row.fields.get(shown.figure).and_then(Value::as_f64) else { return NONE.into() };
    let places = shown.places;
    match row.spread.get(shown.figure).filter(|_| row.rounds > 1) {
        Some(spread) => format!("{median:.places$} ({:.places$}–{:.places$})", spread.min, spread.max),
        None => format!("{median:.places$}"),
    }
}

fn summary(results: &Results) -> String {
    let mut table = markdown::new_table(["figure", "median", "minimum", "maximum", "95 %", "rounds"]);
    for (name, median) in &results.summary {
        let Some(measured) = results.summary_measured.get(name) else { continue };
        let figures = [*median, measured.spread.min, measured.spread.max].map(|figure| format!("{figure:.2}"));
        let interval = measured.interval.map_or(NONE.into(), |(low, high)| format!("[{low:.2}, {high:.2}]"));
        let last = [interval, measured.rounds.to_string()];
        table.add_row([name.clone()].into_iter().chain(figures).chain(last));
    }
    markdown::finish(&table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::results;
    use crate::sample::tests::{sample, sample_of};
    use crate::table::Row;

    #[test]
    fn modes_are_side_by_side_and_a_missing_cell_stays_empty() {
        let mut samples = vec![
            sample(0, "bounce", "4k", 900.0),
            sample(0, "strict", "4k", 300.0),
            sample(0, "bounce", "64k", 800.0),
            sample(1, "bounce", "4k", 1100.0),
        ];
        samples.push(sample(1, "strict", "4k", 1.0));
        samples[4].measured = Err("it hung".into());
        let text = text(&results(&samples));
        let line = |size: &str| text.lines().find(|line| line.contains(size)).unwrap_or_default();
        assert!(line("| 4k").contains("1000 (900–1100)") && line("| 4k").contains("300"), "{text}");
        assert!(line("| 64k").contains("800") && line("| 64k").contains(NONE), "{text}");
        assert!(text.contains("FAILED: throughput, strict, round 2: it hung"), "{text}");
    }

    #[test]
    fn rows_with_different_keys_or_figures_get_separate_tables() {
        let row = |key: &str, figure: &str| Row::new([("mode", "bounce".into()), (key, 7.into())], [(figure, 3.0)]);
        let rows = vec![row("guests", "iops"), row("size", "iops"), row("depth", "fits")];
        let text = text(&results(&[sample_of("density", rows)]));
        for table in ["| guests | bounce |", "| size | bounce |", "| depth | bounce |"] {
            assert_eq!(text.matches(table).count(), 1, "{text}");
        }
    }
}
