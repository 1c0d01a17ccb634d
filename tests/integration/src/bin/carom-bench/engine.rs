// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cost of requests in the virtio-iommu's engine alone. `iommu_bounce/benches/map_unmap.rs` measures it natively, without a
//! guest.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use carom_integration::Site;
use serde_json::Value;

use crate::table::{Measured, Row, Scope, Shown, Table, Work};

const SHOWN: &[Shown] =
    &[Shown::new("ns", "time in the engine per request, per MAP and its UNMAP, or per range of a MAP_LIST, in ns", 0)];

pub(crate) const TABLE: Table = Table::new("engine", "mappings", SHOWN, work).once();

/// Measured cases. Each entry has the kind of request, the number of requests that the engine handles at a time, the number of
/// existing mappings, and the directory with the benchmark's estimates.
const CASES: [(&str, u32, u32, &str); 12] = [
    ("MAP and UNMAP", 1, 100, "map_unmap/100"),
    ("UNMAP, one by one", 1, 10_000, "unmap_batch/alone/1"),
    ("UNMAP, one by one", 8, 10_000, "unmap_batch/alone/8"),
    ("UNMAP, one by one", 64, 10_000, "unmap_batch/alone/64"),
    ("UNMAP, together", 1, 10_000, "unmap_batch/together/1"),
    ("UNMAP, together", 8, 10_000, "unmap_batch/together/8"),
    ("UNMAP, together", 64, 10_000, "unmap_batch/together/64"),
    ("MAP and UNMAP", 1, 1_000_000, "map_unmap/1000000"),
    ("MAP, one by one", 32, 10_000, "map_list/alone/32"),
    ("MAP, one by one", 256, 10_000, "map_list/alone/256"),
    ("MAP_LIST, each range", 32, 10_000, "map_list/together/32"),
    ("MAP_LIST, each range", 256, 10_000, "map_list/together/256"),
];

fn work(_: Scope, _: &Site) -> Vec<Work> {
    let run = |_: &Site, _: &str| measure();
    vec![Work { name: "natively".into(), estimate: Duration::from_secs(30), run: Box::new(run) }]
}

fn measure() -> Result<Measured> {
    let program =
        env::var_os("CAROM_ENGINE_BENCH").context("CAROM_ENGINE_BENCH is not set; run scripts/bench, which sets it")?;
    let dir = tempfile::tempdir().context("cannot create a temporary directory for the benchmark's estimates")?;
    let mut bench = Command::new(&program);
    bench.args(["--bench", "--noplot", "--quiet", "--warm-up-time", "1", "--measurement-time", "2"]);
    let status = bench.env("CRITERION_HOME", dir.path()).stdin(Stdio::null()).stdout(Stdio::null()).status();
    let status = status.with_context(|| format!("cannot start {}", program.display()))?;
    ensure!(status.success(), "{} failed: {status}", program.display());
    Ok(Measured { rows: rows(dir.path())?, ..Measured::default() })
}

/// Reads the rows from criterion's directory of estimates.
fn rows(dir: &Path) -> Result<Vec<Row>> {
    let row = |&(request, together, mappings, place): &(&str, u32, u32, &str)| {
        let file = dir.join(place).join("new/estimates.json");
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let estimates: Value =
            serde_json::from_str(&text).with_context(|| format!("cannot read {}", file.display()))?;
        let ns = estimates["median"]["point_estimate"].as_f64();
        let ns = ns.with_context(|| format!("{} contains no median", file.display()))?;
        let of = [("request", request.into()), ("at_once", together.into()), ("mappings", mappings.into())];
        Ok(Row::new(of, [("ns", ns / f64::from(together))]))
    };
    CASES.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(dir: &Path, place: &str, median: &str) {
        let dir = dir.join(place).join("new");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("estimates.json"), format!(r#"{{"median": {median}}}"#)).unwrap();
    }

    #[test]
    fn times_are_those_of_one_request() {
        let dir = tempfile::tempdir().unwrap();
        CASES.iter().for_each(|case| estimate(dir.path(), case.3, r#"{"point_estimate": 640.0}"#));

        let rows = rows(dir.path()).unwrap();

        assert_eq!(rows.len(), CASES.len());
        assert!((rows[0].figures["ns"] - 640.0).abs() < 1e-9);
        assert!((rows[6].figures["ns"] - 10.0).abs() < 1e-9, "{:?}", rows[6]);
    }

    #[test]
    fn missing_estimates_are_named() {
        let dir = tempfile::tempdir().unwrap();
        assert!(format!("{:#}", rows(dir.path()).unwrap_err()).contains("map_unmap/100"));
        CASES.iter().for_each(|case| estimate(dir.path(), case.3, "{}"));
        assert!(format!("{:#}", rows(dir.path()).unwrap_err()).contains("no median"));
    }
}
