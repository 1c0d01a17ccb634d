// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a change made better or worse, by the counts of two runs: the one at hand, and one before the change. Less of each is better.

use std::fmt::Write;

use anyhow::{Result, ensure};
use carom_integration::measure::markdown;
use carom_integration::measure::statistics::Spread;
use serde_json::Value;

use crate::results::{Merged, Results};
use crate::{counts, io_instructions, map_counts, start_instructions, sync};

/// When a count differs by more than it does by itself.
#[derive(Debug, Clone, Copy)]
struct Rule {
    /// By how much of the base it must differ,
    part: f64,
    /// and by how much in itself.
    least: f64,
    moves: Moves,
}

/// How a count moves without a change.
#[derive(Debug, Clone, Copy)]
enum Moves {
    /// Not, or by less than what is asked for.
    Not,
    /// With the host's load, so that rounds tell how far. In fewer than [`ROUNDS`] it must differ by this much of the base; without
    /// such a part it is not told of them.
    WithLoad(Option<f64>),
}

/// What the guest asks for in an operation. How many chunks a pool takes depends on how many reads are in flight together.
const REQUESTS: Rule = Rule { part: 0.02, least: 0.005, moves: Moves::Not };

/// Exits. Five rounds vary by a third to two thirds where most are interrupts, so one or two say nothing.
const EXITS: Rule = Rule { part: 0.05, least: 0.02, moves: Moves::WithLoad(None) };

/// What a call in the guest's kernel takes: the median of a thousand that are the same, so one more is a change. Half of one is where
/// two rounds do not agree.
const CALL: Rule = Rule { part: 0.0, least: 0.5, moves: Moves::Not };

/// What the whole machine executes. Interrupts merge differently, and threads poll for longer or less long: a cell of 4k moves by a
/// twelfth from run to run, and of eight rounds of a start the ends were up to a ninth apart.
const MACHINE: Rule = Rule { part: 0.02, least: 0.0, moves: Moves::WithLoad(Some(0.12)) };

/// Of fewer rounds it is not known how far a count moves.
const ROUNDS: usize = 3;

/// So many rounds of one run are all above as many of the other by chance in one of 924 comparisons; three are in one of 20.
const MANY_ROUNDS: usize = 6;

/// The tables that are compared, with their counts. What else they have is a time, or how many operations were done.
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

/// What became of a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    Better,
    Worse,
}

/// One count in both runs.
struct Pair<'row> {
    table: &'static str,
    row: &'row Merged,
    figure: &'static str,
    before: f64,
    after: f64,
    /// Of the run with fewer.
    rounds: usize,
}

/// The names of the tables that are compared.
pub(crate) fn tables() -> [&'static str; 5] {
    COMPARED.map(|(table, _)| table)
}

/// What the counts of `results` say beside those of `base`, as text.
///
/// # Errors
/// The two have no cell in common.
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
    ensure!(same + changed.len() > 0, "no cell of the tables {} is in both", tables().join(", "));
    let version = |results: &Results| results.versions.get("carom").cloned().unwrap_or_default();
    let mut text = format!("\nCounts of {}, against those of {}:\n\n", version(results), version(base));
    if !changed.is_empty() {
        let mut table = markdown::new_table_of(3, ["table", "cell", "count", "before", "after", ""]);
        for (pair, change) in &changed {
            // Of millions no parts are told.
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

/// The keys of a row, by which it is found in another run.
fn keys(row: &Merged) -> Vec<(&String, &Value)> {
    row.fields.iter().filter(|(key, _)| !row.spread.contains_key(*key)).collect()
}

/// A row's keys as words.
fn cell(row: &Merged) -> String {
    let word = |(key, value): (&String, &Value)| value.as_str().map_or_else(|| format!("{key} {value}"), str::to_owned);
    keys(row).into_iter().map(word).collect::<Vec<_>>().join(", ")
}

/// `None` where one of the runs did not count it.
fn pair<'row>(table: &'static str, row: &'row Merged, before: &Merged, figure: &'static str) -> Option<Pair<'row>> {
    let of = |row: &Merged| row.fields.get(figure).and_then(Value::as_f64);
    let rounds = row.rounds.min(before.rounds);
    Some(Pair { table, row, figure, before: of(before)?, after: of(row)?, rounds })
}

fn change(pair: &Pair<'_>, rule: Rule, after: &Spread, before: &Spread) -> Change {
    let difference = pair.after - pair.before;
    // How much lies between the nearest rounds of the two runs, and between those of one that are farthest apart.
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

    /// Of a run with a round for each of these.
    fn run<const N: usize>(size: &str, rounds: [[f64; 3]; N]) -> Results {
        results(&rounds.map(|[exits, maps, copied]| {
            let figures = [("exits", exits), ("map_requests", maps), ("copied_bytes", copied), ("operations", 4000.0)];
            sample_of("counts", vec![Row::new([("mode", "bounce".into()), ("size", size.into())], figures)])
        }))
    }

    /// Of a run that has only this table, and in it one cell with a figure beside a time.
    fn run_of<const N: usize>(table: &str, figure: &str, rounds: [f64; N]) -> Results {
        results(&rounds.map(|count| {
            let of = [("mode", "bounce".into()), ("size", "64k".into())];
            sample_of(table, vec![Row::new(of, [(figure, count), ("ns", count), ("operations", count)])])
        }))
    }

    /// The line of a figure that changed.
    fn line(text: &str, figure: &str) -> String {
        text.lines().find(|line| line.contains(figure)).unwrap_or_default().to_owned()
    }

    #[test]
    fn requests_and_copies_that_changed_are_told_as_better_or_worse() {
        let base = run("4k", [[1.0, 0.0, 4096.0]]);
        let text = text(&run("4k", [[9.0, 1.0, 2048.0]]), &base).unwrap();
        let line = |figure| line(&text, figure);
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
    fn grown_instruction_count_is_reported_worse_with_its_table() {
        let of = |rounds| run_of("io_instructions", "instructions", rounds);
        let text = text(&of([45_000.0, 45_200.0, 45_100.0]), &of([43_000.0, 43_100.0, 43_200.0])).unwrap();
        let line = line(&text, "io_instructions");
        assert!(line.contains("bounce, 64k") && line.contains("45100 ") && line.contains("worse"), "{text}");
        // Neither a time nor how many operations were done is a count that could be better.
        assert!(text.ends_with("0 better, 1 worse, 0 as before\n"), "{text}");
    }

    #[test]
    fn only_large_disjoint_instruction_changes_are_reported() {
        let of = |count| run_of("start_instructions", "instructions", [count]);
        for (after, better, worse) in [(205e6, 0, 0), (230e6, 0, 1), (170e6, 1, 0)] {
            let text = text(&of(after), &of(196e6)).unwrap();
            assert!(text.contains(&format!("{better} better, {worse} worse")), "{after}: {text}");
        }
        // Rounds that meet those of the other run say nothing.
        let of = |rounds: [f64; 2]| run_of("start_instructions", "instructions", rounds);
        assert!(text(&of([190e6, 270e6]), &of([185e6, 210e6])).unwrap().contains("0 better, 0 worse"));
    }

    #[test]
    fn many_rounds_of_which_none_meets_the_other_run_are_told() {
        let of = |least: f64| {
            run_of("start_instructions", "instructions", [0.0, 0.0, 0.0, 0.0, 9e6, 9e6].map(|more| least + more))
        };
        for (least, worse) in [(200e6, 0), (202e6, 1)] {
            let text = text(&of(least), &of(192e6)).unwrap();
            assert!(text.contains(&format!("0 better, {worse} worse")), "{least}: {text}");
        }
    }

    #[test]
    fn one_line_or_instruction_more_in_a_call_is_told() {
        for (table, figure) in [("map_counts", "lines"), ("map_counts", "instructions"), ("sync", "instructions")] {
            let of = |count| run_of(table, figure, [count]);
            let told = text(&of(297.0), &of(296.0)).unwrap();
            assert!(
                line(&told, table).contains("worse") && told.ends_with("0 better, 1 worse, 0 as before\n"),
                "{told}"
            );
            assert!(text(&of(296.0), &of(296.0)).unwrap().ends_with("1 as before\n"));
        }
    }

    #[test]
    fn half_of_a_line_is_no_change() {
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
    fn what_is_shown_of_these_tables_is_compared_but_for_times() {
        for (name, counts) in &COMPARED {
            let table = TABLES.iter().find(|table| table.name == *name).unwrap();
            for shown in table.shown.iter().filter(|shown| shown.figure != "ns") {
                assert!(counts.iter().any(|(figure, _)| *figure == shown.figure), "{name}: {}", shown.figure);
            }
        }
    }
}
