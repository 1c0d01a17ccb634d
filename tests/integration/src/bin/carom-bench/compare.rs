// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a change made better or worse, by the counts of two runs: the one at hand, and one before the change. Less of each is better.

use std::fmt::Write;

use anyhow::{Result, ensure};
use carom_integration::measure::markdown;
use carom_integration::measure::statistics::Spread;
use serde_json::Value;

use crate::counts;
use crate::results::{Merged, Results};

/// Counts of what the guest asks for: the host's load does not move them.
const EXACT: [&str; 5] = ["map_requests", "unmap_requests", "window_add_requests", "host_maps", "copied_bytes"];

/// By how much of the base such a count must differ. How many chunks a pool takes depends on how many reads are in flight together.
const EXACT_PART: f64 = 0.02;

/// And by how much for an operation: that many of a thousand.
const EXACT_LEAST: f64 = 0.005;

/// By how much of the base exits must differ, beyond what the rounds of both runs lie apart.
const EXITS_PART: f64 = 0.05;

/// And by how much for an operation.
const EXITS_LEAST: f64 = 0.02;

/// What is asked of a figure before it is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    Better,
    Worse,
}

/// One count in both runs.
struct Pair<'row> {
    row: &'row Merged,
    figure: &'row str,
    before: f64,
    after: f64,
}

/// What the counts of `results` say beside those of `base`, as text.
///
/// # Errors
/// The two have no cell in common.
pub(crate) fn text(results: &Results, base: &Results) -> Result<String> {
    let (mut same, mut changed) = (0, Vec::new());
    for row in of_counts(results) {
        let Some(before) = of_counts(base).find(|before| keys(before) == keys(row)) else { continue };
        for (figure, spread) in &row.spread {
            let (Some(old), Some(pair)) = (before.spread.get(figure), pair(row, before, figure)) else { continue };
            match change(&pair, spread, old) {
                Change::None => same += 1,
                change => changed.push((pair, change)),
            }
        }
    }
    ensure!(same + changed.len() > 0, "no cell of the table counts is in both");
    let version = |results: &Results| results.versions.get("carom").cloned().unwrap_or_default();
    let mut text = format!("\nCounts of {}, against those of {}:\n\n", version(results), version(base));
    if !changed.is_empty() {
        let mut table = markdown::new_table_of(2, ["cell", "for an operation", "before", "after", ""]);
        for (pair, change) in &changed {
            let figures = [pair.before, pair.after].map(|figure| format!("{figure:.3}"));
            let word = if *change == Change::Better { "better" } else { "worse" };
            let names = [cell(pair.row), pair.figure.into()];
            table.add_row(names.into_iter().chain(figures).chain([word.into()]));
        }
        text += &markdown::finish(&table);
        text.push('\n');
    }
    let count = |wanted| changed.iter().filter(|(_, change)| *change == wanted).count();
    // Writing to a String does not fail.
    let _ = writeln!(text, "{} better, {} worse, {same} as before", count(Change::Better), count(Change::Worse));
    Ok(text)
}

fn of_counts(results: &Results) -> impl Iterator<Item = &Merged> {
    results.tables.get(counts::TABLE.name).into_iter().flatten()
}

/// The keys of a row, by which it is found in another run.
fn keys(row: &Merged) -> Vec<(&String, &Value)> {
    row.fields.iter().filter(|(key, _)| !row.spread.contains_key(*key)).collect()
}

/// A row's keys as words.
fn cell(row: &Merged) -> String {
    let word = |(key, value): (&String, &Value)| value.as_str().map_or_else(|| format!("{key} {value}"), str::to_owned);
    keys(row).into_iter().map(word).collect::<Vec<_>>().join(", ")
}

/// `None` of what is no count: how many operations were done.
fn pair<'row>(row: &'row Merged, before: &Merged, figure: &'row str) -> Option<Pair<'row>> {
    let of = |row: &Merged| row.fields.get(figure).and_then(Value::as_f64);
    let counted = figure != counts::OPERATIONS;
    counted.then_some(Pair { row, figure, before: of(before)?, after: of(row)? })
}

fn change(pair: &Pair<'_>, after: &Spread, before: &Spread) -> Change {
    let (part, least) =
        if EXACT.contains(&pair.figure) { (EXACT_PART, EXACT_LEAST) } else { (EXITS_PART, EXITS_LEAST) };
    let apart = after.min > before.max || after.max < before.min;
    let difference = pair.after - pair.before;
    match apart && difference.abs() > (part * pair.before).max(least) {
        false => Change::None,
        true if difference < 0.0 => Change::Better,
        true => Change::Worse,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::results;
    use crate::sample::tests::sample_of;
    use crate::table::Row;

    /// Of a run with two rounds.
    fn run(size: &str, rounds: [[f64; 3]; 2]) -> Results {
        results(&rounds.map(|[exits, maps, copied]| {
            let figures = [("exits", exits), ("map_requests", maps), ("copied_bytes", copied), ("operations", 4000.0)];
            sample_of("counts", vec![Row::new([("mode", "bounce".into()), ("size", size.into())], figures)])
        }))
    }

    #[test]
    fn what_changed_is_told_as_better_or_worse_and_what_only_moves_is_not() {
        let base = run("4k", [[1.0, 0.0, 4096.0], [1.2, 0.0, 4097.0]]);
        // Exits lie between those of the base in one round; requests do so in none, and copies are fewer.
        let text = text(&run("4k", [[1.1, 1.0, 2048.0], [1.4, 1.0, 2048.0]]), &base).unwrap();
        let line = |figure: &str| text.lines().find(|line| line.contains(figure)).unwrap_or_default().to_owned();
        assert!(line("map_requests").contains("bounce, 4k") && line("map_requests").contains("worse"), "{text}");
        assert!(line("copied_bytes").contains("better") && !text.contains("exits"), "{text}");
        assert!(text.ends_with("1 better, 1 worse, 1 as before\n"), "{text}");
    }

    #[test]
    fn same_run_has_no_change() {
        let base = run("4k", [[1.0, 0.01, 4096.0], [1.2, 0.0, 4097.0]]);
        assert!(text(&base, &base).unwrap().ends_with("0 better, 0 worse, 3 as before\n"));
    }

    #[test]
    fn little_more_is_no_change_though_rounds_do_not_meet() {
        let base = run("64k", [[1.0, 0.0, 65536.0], [1.0, 0.0, 65536.0]]);
        let little = run("64k", [[1.01, 0.004, 65600.0], [1.01, 0.004, 65600.0]]);
        assert!(text(&little, &base).unwrap().ends_with("0 better, 0 worse, 3 as before\n"));
    }

    #[test]
    fn runs_without_a_common_cell_are_refused() {
        let one = [[1.0, 0.0, 0.0]; 2];
        assert!(text(&run("4k", one), &run("64k", one)).is_err());
    }
}
