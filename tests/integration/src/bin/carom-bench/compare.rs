// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Comparison of the counts of two runs, for example before and after a change. For each count, less is better.

use std::fmt::Write;

use anyhow::{Result, ensure};
use carom_integration::measure::markdown;
use carom_integration::measure::statistics::Spread;
use serde_json::Value;

use crate::results::{Merged, Results};
use crate::{counts, io_instructions, map_counts, start_instructions, sync};

/// Rule that decides when the difference of a count between two runs is significant.
#[derive(Debug, Clone, Copy)]
struct Rule {
    /// Minimum difference, as a fraction of the count in the base run.
    part: f64,
    /// Minimum absolute difference.
    least: f64,
    moves: Moves,
}

/// Variation of a count between runs of unchanged programs.
#[derive(Debug, Clone, Copy)]
enum Moves {
    /// The count does not vary, or varies by less than the rule's minimum difference.
    Not,
    /// The count varies with the host's load, so a difference must also exceed the spread of the rounds. With fewer than
    /// [`ROUNDS`] rounds, a difference must also exceed the fraction in this variant, multiplied by the count in the base run.
    /// If the fraction is `None`, no difference is reported for so few rounds.
    WithLoad(Option<f64>),
}

/// IOMMU requests of the guest per operation. They vary a little, because the number of chunks that a pool requests depends on
/// the number of reads in flight.
const REQUESTS: Rule = Rule { part: 0.02, least: 0.005, moves: Moves::Not };

/// Exits per operation. If interrupts cause most exits, the counts of five rounds differ by a third to two thirds, so the counts of
/// one or two rounds cannot be compared.
const EXITS: Rule = Rule { part: 0.05, least: 0.02, moves: Moves::WithLoad(None) };

/// Cost of a call in the guest's kernel: the median of a thousand equal calls. A difference of 1 is significant. A difference of
/// 0.5 is not: with an even number of rounds, the median may be the mean of two counts that differ by 1.
const CALL: Rule = Rule { part: 0.0, least: 0.5, moves: Moves::Not };

/// Instructions that the whole machine executes. Their number varies between runs, because different numbers of interrupts are
/// merged, and threads poll for different times. In the table `io_instructions`, cells with blocks of 4 KiB vary by up to 8 %.
/// In the table `start_instructions`, eight starts of a guest varied by up to 11 %.
const MACHINE: Rule = Rule { part: 0.02, least: 0.0, moves: Moves::WithLoad(Some(0.12)) };

/// With fewer rounds than this number, the spread of a count does not show how much the count varies.
const ROUNDS: usize = 3;

/// A difference is significant only if the counts of one run are all above the counts of the other run. With fewer rounds than
/// this number, the gap between the two ranges of counts must also be wider than both ranges. Even between equal programs, all
/// six rounds of one run exceed all six rounds of the other run in one of 924 comparisons. With three rounds, this happens in
/// one of 20 comparisons.
const MANY_ROUNDS: usize = 6;

/// Compared tables and their counts. The other figures of these tables are times or numbers of operations.
const COMPARED: [(&str, &[(&str, Rule)]); 5] = [
    (
        counts::TABLE.name,
        &[
            ("exits", EXITS),
            ("mmio_exits", EXITS),
            ("io_exits", EXITS),
            ("halt_exits", EXITS),
            ("irq_exits", EXITS),
            ("irq_window_exits", EXITS),
            ("map_requests", REQUESTS),
            ("unmap_requests", REQUESTS),
            ("window_add_requests", REQUESTS),
            ("host_maps", REQUESTS),
            ("copied_bytes", REQUESTS),
        ],
    ),
    (sync::TABLE.name, &[("instructions", CALL)]),
    (map_counts::TABLE.name, &[("instructions", CALL), ("locked", CALL), ("lines", CALL), ("pages", CALL)]),
    (io_instructions::TABLE.name, &[("instructions", MACHINE)]),
    (start_instructions::TABLE.name, &[("instructions", MACHINE), ("exits", EXITS)]),
];

/// Result of the comparison of a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    Better,
    Worse,
}

/// Values of one count in both runs.
struct Pair<'row> {
    table: &'static str,
    row: &'row Merged,
    figure: &'static str,
    before: f64,
    after: f64,
    /// Number of rounds of the run that has fewer rounds.
    rounds: usize,
}

/// Returns the names of the compared tables.
pub(crate) fn tables() -> [&'static str; 5] {
    COMPARED.map(|(table, _)| table)
}

/// Compares the counts of the runs `results` and `base`, and returns the result as text.
///
/// # Errors
/// Fails if the runs have no cell in common.
pub(crate) fn text(results: &Results, base: &Results) -> Result<String> {
    let (mut same, mut changed) = (0, Vec::new());
    for (table, counts) in COMPARED {
        for row in rows(results, table) {
            let Some(before) = rows(base, table).find(|before| keys(before) == keys(row)) else { continue };
            for &(figure, rule) in counts {
                let Some(pair) = pair(table, row, before, figure) else { continue };
                let (Some(after), Some(before)) = (row.spread.get(figure), before.spread.get(figure)) else { continue };
                match change(&pair, rule, after, before) {
                    Change::None => same += 1,
                    change => changed.push((pair, change)),
                }
            }
        }
    }
    ensure!(same + changed.len() > 0, "the two runs have no cell of the tables {} in common", tables().join(", "));
    let version = |results: &Results| results.versions.get("carom").cloned().unwrap_or_default();
    let mut text = format!("\nCounts of {}, compared with the counts of {}:\n\n", version(results), version(base));
    if !changed.is_empty() {
        let mut table = markdown::new_table_of(3, ["table", "cell", "count", "before", "after", ""]);
        for (pair, change) in &changed {
            // Counts of 1000 or more are shown without decimals.
            let places = if pair.before.max(pair.after) < 1000.0 { 3 } else { 0 };
            let figures = [pair.before, pair.after].map(|figure| format!("{figure:.places$}"));
            let word = if *change == Change::Better { "better" } else { "worse" };
            let names = [pair.table.into(), cell(pair.row), pair.figure.into()];
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

fn rows<'run>(results: &'run Results, table: &str) -> impl Iterator<Item = &'run Merged> {
    results.tables.get(table).into_iter().flatten()
}

/// Returns the keys of a row. Rows of two runs are compared if their keys are equal.
fn keys(row: &Merged) -> Vec<(&String, &Value)> {
    row.fields.iter().filter(|(key, _)| !row.spread.contains_key(*key)).collect()
}

/// Returns a row's keys as text.
fn cell(row: &Merged) -> String {
    let word = |(key, value): (&String, &Value)| value.as_str().map_or_else(|| format!("{key} {value}"), str::to_owned);
    keys(row).into_iter().map(word).collect::<Vec<_>>().join(", ")
}

/// Returns the values of one count in both runs, or `None` if the count is missing in either run.
fn pair<'row>(table: &'static str, row: &'row Merged, before: &Merged, figure: &'static str) -> Option<Pair<'row>> {
    let of = |row: &Merged| row.fields.get(figure).and_then(Value::as_f64);
    let rounds = row.rounds.min(before.rounds);
    Some(Pair { table, row, figure, before: of(before)?, after: of(row)?, rounds })
}

fn change(pair: &Pair<'_>, rule: Rule, after: &Spread, before: &Spread) -> Change {
    let difference = pair.after - pair.before;
    // `apart` is the gap between the ranges of both runs, or negative if they overlap. `within` is the width of the wider
    // range.
    let apart = (after.min - before.max).max(before.min - after.max);
    let within = (after.max - after.min).max(before.max - before.min);
    let part = match rule.moves {
        Moves::Not => Some(rule.part),
        Moves::WithLoad(_) if pair.rounds >= MANY_ROUNDS => (apart > 0.0).then_some(rule.part),
        Moves::WithLoad(_) if apart <= within => None,
        Moves::WithLoad(of_few) => {
            if pair.rounds >= ROUNDS {
                Some(rule.part)
            } else {
                of_few
            }
        }
    };
    match part {
        Some(part) if difference.abs() > (part * pair.before).max(rule.least) => {
            if difference < 0.0 {
                Change::Better
            } else {
                Change::Worse
            }
        }
        _ => Change::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::results;
    use crate::sample::tests::sample_of;
    use crate::table::Row;
    use crate::tables::TABLES;

    /// Returns the results of a run with only the table `counts`. Each array of `rounds` contains the exits, the MAP requests
    /// and the copied bytes of one round.
    fn run<const N: usize>(size: &str, rounds: [[f64; 3]; N]) -> Results {
        results(&rounds.map(|[exits, maps, copied]| {
            let figures = [("exits", exits), ("map_requests", maps), ("copied_bytes", copied), ("operations", 4000.0)];
            sample_of("counts", vec![Row::new([("mode", "bounce".into()), ("size", size.into())], figures)])
        }))
    }

    /// Returns the results of a run with only the table `table`. The table's only cell has a count, a time and a number of
    /// operations.
    fn run_of<const N: usize>(table: &str, figure: &str, rounds: [f64; N]) -> Results {
        results(&rounds.map(|count| {
            let of = [("mode", "bounce".into()), ("size", "64k".into())];
            sample_of(table, vec![Row::new(of, [(figure, count), ("ns", count), ("operations", count)])])
        }))
    }

    /// Returns the line of a changed figure.
    fn line(text: &str, figure: &str) -> String {
        text.lines().find(|line| line.contains(figure)).unwrap_or_default().to_owned()
    }

    #[test]
    fn changed_requests_and_copies_are_reported() {
        let base = run("4k", [[1.0, 0.0, 4096.0]]);
        let text = text(&run("4k", [[9.0, 1.0, 2048.0]]), &base).unwrap();
        let line = |figure| line(&text, figure);
        assert!(line("map_requests").contains("bounce, 4k") && line("map_requests").contains("worse"), "{text}");
        assert!(line("copied_bytes").contains("better") && !text.contains("exits"), "{text}");
        assert!(text.ends_with("1 better, 1 worse, 1 as before\n"), "{text}");
    }

    #[test]
    fn exits_are_reported_if_they_exceed_the_spread() {
        let exits = |exits: [f64; 3]| run("4k", exits.map(|exits| [exits, 0.0, 0.0]));
        let base = exits([1.0, 1.1, 1.2]);
        for (after, worse) in [([1.1, 1.3, 1.5], 0), ([1.3, 1.35, 1.45], 0), ([1.5, 1.6, 1.65], 1)] {
            let text = text(&exits(after), &base).unwrap();
            assert!(text.contains(&format!("0 better, {worse} worse")), "{after:?}: {text}");
        }
    }

    #[test]
    fn grown_instruction_count_is_reported_worse_with_its_table() {
        let of = |rounds| run_of("io_instructions", "instructions", rounds);
        let text = text(&of([45_000.0, 45_200.0, 45_100.0]), &of([43_000.0, 43_100.0, 43_200.0])).unwrap();
        let line = line(&text, "io_instructions");
        assert!(line.contains("bounce, 64k") && line.contains("45100 ") && line.contains("worse"), "{text}");
        // Times and numbers of operations are not compared.
        assert!(text.ends_with("0 better, 1 worse, 0 as before\n"), "{text}");
    }

    #[test]
    fn only_large_disjoint_instruction_changes_are_reported() {
        let of = |count| run_of("start_instructions", "instructions", [count]);
        for (after, better, worse) in [(205e6, 0, 0), (230e6, 0, 1), (170e6, 1, 0)] {
            let text = text(&of(after), &of(196e6)).unwrap();
            assert!(text.contains(&format!("{better} better, {worse} worse")), "{after}: {text}");
        }
        // The ranges of the two runs overlap, so the difference is not reported.
        let of = |rounds: [f64; 2]| run_of("start_instructions", "instructions", rounds);
        assert!(text(&of([190e6, 270e6]), &of([185e6, 210e6])).unwrap().contains("0 better, 0 worse"));
    }

    #[test]
    fn many_disjoint_rounds_are_reported() {
        let of = |least: f64| {
            run_of("start_instructions", "instructions", [0.0, 0.0, 0.0, 0.0, 9e6, 9e6].map(|more| least + more))
        };
        for (least, worse) in [(200e6, 0), (202e6, 1)] {
            let text = text(&of(least), &of(192e6)).unwrap();
            assert!(text.contains(&format!("0 better, {worse} worse")), "{least}: {text}");
        }
    }

    #[test]
    fn one_more_line_or_instruction_per_call_is_reported() {
        for (table, figure) in [("map_counts", "lines"), ("map_counts", "instructions"), ("sync", "instructions")] {
            let of = |count| run_of(table, figure, [count]);
            let reported = text(&of(297.0), &of(296.0)).unwrap();
            assert!(
                line(&reported, table).contains("worse") && reported.ends_with("0 better, 1 worse, 0 as before\n"),
                "{reported}"
            );
            assert!(text(&of(296.0), &of(296.0)).unwrap().ends_with("1 as before\n"));
        }
    }

    #[test]
    fn median_difference_of_half_a_line_is_no_change() {
        let of = |rounds| run_of("map_counts", "lines", rounds);
        assert!(text(&of([15.0, 16.0]), &of([15.0, 15.0])).unwrap().ends_with("1 as before\n"));
    }

    #[test]
    fn tables_of_both_runs_are_compared_together() {
        let both = |exits, maps, lines| {
            let mut both = run("4k", [[exits, maps, 0.0]]);
            both.tables.extend(run_of("map_counts", "lines", [lines]).tables);
            both
        };
        let text = text(&both(1.0, 1.0, 14.0), &both(1.0, 0.0, 15.0)).unwrap();
        assert!(
            line(&text, "map_requests").contains("counts") && line(&text, "map_counts").contains("better"),
            "{text}"
        );
        assert!(text.ends_with("1 better, 1 worse, 2 as before\n"), "{text}");
    }

    #[test]
    fn equal_and_slightly_larger_counts_are_no_change() {
        let base = run("64k", [[1.0, 0.0, 65536.0]; 3]);
        let little = run("64k", [[1.01, 0.004, 65600.0]; 3]);
        for after in [&base, &little] {
            assert!(text(after, &base).unwrap().ends_with("0 better, 0 worse, 3 as before\n"));
        }
    }

    #[test]
    fn runs_without_a_common_cell_are_refused() {
        let one = [[1.0, 0.0, 0.0]];
        let instructions = run_of("io_instructions", "instructions", [1.0]);
        for (after, base) in [
            (run("4k", one), run("64k", one)),
            (instructions, run("64k", one)),
            (run_of("throughput", "iops", [1.0]), run_of("throughput", "iops", [1.0])),
            (run_of("sync", "ns", [1.0]), run_of("sync", "ns", [1.0])),
        ] {
            let error = text(&after, &base).unwrap_err().to_string();
            assert!(
                error.contains("no cell") && error.contains("counts, sync, map_counts, io_instructions"),
                "{error}"
            );
        }
    }

    #[test]
    fn all_shown_figures_except_times_are_compared() {
        for (name, counts) in &COMPARED {
            let table = TABLES.iter().find(|table| table.name == *name).unwrap();
            for shown in table.shown.iter().filter(|shown| shown.figure != "ns") {
                assert!(counts.iter().any(|(figure, _)| *figure == shown.figure), "{name}: {}", shown.figure);
            }
        }
    }
}
