// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Speed of the guest patch's slot allocator with different numbers of threads. `guest/tests/allocator/bench.c` measures it
//! natively, without a guest.

use std::env;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use carom_integration::Site;

use crate::table::{Measured, Row, Scope, Shown, Table, Work};

const SHOWN: &[Shown] = &[
    Shown::new("million_s", "slots allocated and freed per second, in millions", 1),
    Shown::new("million_s_each", "slots per second of each thread with its own core, in millions", 1),
];

pub(crate) const TABLE: Table = Table::new("allocator", "threads", SHOWN, work).once();

fn work(_: Scope, _: &Site) -> Vec<Work> {
    let run = |_: &Site, _: &str| measure();
    vec![Work { name: "natively".into(), estimate: Duration::from_secs(5), run: Box::new(run) }]
}

fn measure() -> Result<Measured> {
    let script =
        env::var_os("CAROM_ALLOCATOR").context("CAROM_ALLOCATOR is not set; run scripts/bench, which sets it")?;
    let output = Command::new(&script).arg("--scaling").stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot start {}", script.display()))?;
    ensure!(output.status.success(), "{} failed: {}", script.display(), output.status);
    Ok(Measured { rows: rows(&String::from_utf8_lossy(&output.stdout))?, ..Measured::default() })
}

/// Parses the benchmark's output. Each line contains the number of threads, and two rates in million operations per second. The
/// first rate is the sum over all threads. The second rate is the rate of a single thread that has its own core.
fn rows(text: &str) -> Result<Vec<Row>> {
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let rows: Vec<Row> = lines
        .filter_map(|words| {
            let [threads, all, each] = words[..] else { return None };
            let threads: u32 = threads.parse().ok()?;
            let figures = [("million_s", all.parse().ok()?), ("million_s_each", each.parse().ok()?)];
            Some(Row::new([("operation", "take and give back".into()), ("threads", threads.into())], figures))
        })
        .collect();
    ensure!(!rows.is_empty(), "the allocator's benchmark printed no figures: {text}");
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_figures_become_rows_and_the_heading_does_not() {
        let rows = rows("threads  million op/s  for each\n      1   67.52   67.52\n     16  132.20   66.10\n").unwrap();
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[1].key("threads").and_then(serde_json::Value::as_u64), Some(16));
        assert!((rows[1].figures["million_s"] - 132.2).abs() < 1e-9, "{rows:?}");
    }

    #[test]
    fn output_without_figures_is_an_error() {
        assert!(rows("threads  million op/s\n").is_err());
    }
}
