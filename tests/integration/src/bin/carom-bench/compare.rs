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

/// By how much of the base exits must differ.
const EXITS_PART: f64 = 0.05;

/// And by how much for an operation.
const EXITS_LEAST: f64 = 0.02;

/// In how many rounds of both runs they must have been counted: of fewer it is not known how far they move by themselves.
const EXITS_ROUNDS: usize = 3;

/// What became of a count.
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
    /// Of the run with fewer.
    rounds: usize,
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
    let rounds = row.rounds.min(before.rounds);
    counted.then_some(Pair { row, figure, before: of(before)?, after: of(row)?, rounds })
}

fn change(pair: &Pair<'_>, after: &Spread, before: &Spread) -> Change {
    let difference = pair.after - pair.before;
    let told = if EXACT.contains(&pair.figure) {
        difference.abs() > (EXACT_PART * pair.before).max(EXACT_LEAST)
    } else {
        // Between the nearest rounds of the two runs lies more than between those of one that are farthest apart.
        let apart = (after.min - before.max).max(before.min - after.max);
        let within = (after.max - after.min).max(before.max - before.min);
        pair.rounds >= EXITS_ROUNDS && apart > within && difference.abs() > (EXITS_PART * pair.before).max(EXITS_LEAST)
    };
    match told {
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

    /// Of a run with a round for each of these.
    fn run<const N: usize>(size: &str, rounds: [[f64; 3]; N]) -> Results {
        results(&rounds.map(|[exits, maps, copied]| {
            let figures = [("exits", exits), ("map_requests", maps), ("copied_bytes", copied), ("operations", 4000.0)];
            sample_of("counts", vec![Row::new([("mode", "bounce".into()), ("size", size.into())], figures)])
        }))
    }

    #[test]
    fn requests_and_copies_that_changed_are_told_as_better_or_worse() {
        let base = run("4k", [[1.0, 0.0, 4096.0]]);
        let text = text(&run("4k", [[9.0, 1.0, 2048.0]]), &base).unwrap();
        let line = |figure: &str| text.lines().find(|line| line.contains(figure)).unwrap_or_default().to_owned();
        assert!(line("map_requests").contains("bounce, 4k") && line("map_requests").contains("worse"), "{text}");
        assert!(line("copied_bytes").contains("better") && !text.contains("exits"), "{text}");
        assert!(text.ends_with("1 better, 1 worse, 1 as before\n"), "{text}");
    }

    #[test]
    fn exits_are_told_where_they_moved_by_more_than_between_rounds() {
        let exits = |exits: [f64; 3]| run("4k", exits.map(|exits| [exits, 0.0, 0.0]));
        let base = exits([1.0, 1.1, 1.2]);
        for (after, worse) in [([1.1, 1.3, 1.5], 0), ([1.3, 1.35, 1.45], 0), ([1.5, 1.6, 1.65], 1)] {
            let text = text(&exits(after), &base).unwrap();
            assert!(text.contains(&format!("0 better, {worse} worse")), "{after:?}: {text}");
        }
    }

    #[test]
    fn same_run_and_little_more_are_no_change() {
        let base = run("64k", [[1.0, 0.0, 65536.0]; 3]);
        let little = run("64k", [[1.01, 0.004, 65600.0]; 3]);
        for after in [&base, &little] {
            assert!(text(after, &base).unwrap().ends_with("0 better, 0 worse, 3 as before\n"));
        }
    }

    #[test]
    fn runs_without_a_common_cell_are_refused() {
        let one = [[1.0, 0.0, 0.0]];
        assert!(text(&run("4k", one), &run("64k", one)).is_err());
    }
}
