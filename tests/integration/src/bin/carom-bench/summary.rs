// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the tables come to: how many times another mode's operations bounce windows do, of each round its own ratio.

use std::collections::BTreeMap;

use carom_integration::measure::statistics::{Spread, median};
use serde::{Deserialize, Serialize};

use crate::sample::{Sample, rows};
use crate::table::Row;

/// The modes that are set against each other.
const PAIRS: [(&str, &str); 6] = [
    ("bounce", "no-viommu"),
    ("bounce", "strict"),
    ("bounce", "lazy"),
    ("bounce", "qemu-strict"),
    ("bounce", "qemu-lazy"),
    ("bounce", "ch-lazy"),
];

/// A ratio over the rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ratio {
    /// Its median.
    pub(crate) median: f64,
    /// In how many rounds there are both.
    pub(crate) rounds: usize,
    /// Between which values it lies.
    #[serde(flatten)]
    pub(crate) spread: Spread,
}

/// The ratios of operations a second at depth 64 with one job, by `MODE_to_OTHER_PATTERN_SIZE`.
pub(crate) fn of(samples: &[&Sample]) -> BTreeMap<String, Ratio> {
    let mut ratios: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let all: Vec<(u32, &Row)> = rows(samples, "throughput").filter(|(_, row)| is_usual(row)).collect();
    for (mode, other) in PAIRS {
        for (round, row) in all.iter().filter(|(_, row)| is(row, "mode", mode)) {
            let beside = all.iter().find(|(its, row_of)| {
                its == round
                    && is(row_of, "mode", other)
                    && ["pattern", "size"].iter().all(|key| row_of.key(key) == row.key(key))
            });
            let (Some(own), Some(base)) = (iops(row), beside.and_then(|(_, row)| iops(row))) else { continue };
            let word = |key: &str| row.key(key).and_then(|value| value.as_str()).unwrap_or_default().to_owned();
            let name = format!("{mode}_to_{other}_{}_{}", word("pattern"), word("size")).replace('-', "_");
            ratios.entry(name).or_default().push(own / base);
        }
    }
    let ratio = |figures: Vec<f64>| {
        Some(Ratio { median: median(figures.iter().copied())?, rounds: figures.len(), spread: Spread::of(&figures)? })
    };
    ratios.into_iter().filter_map(|(name, figures)| Some((name, ratio(figures)?))).collect()
}

fn is_usual(row: &Row) -> bool {
    row.key("depth").is_some_and(|depth| *depth == 64) && row.key("jobs").is_some_and(|jobs| *jobs == 1)
}

fn is(row: &Row, key: &str, value: &str) -> bool {
    row.key(key).is_some_and(|own| *own == value)
}

fn iops(row: &Row) -> Option<f64> {
    row.figures.get("iops").copied().filter(|iops| *iops > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::tests::sample;

    #[test]
    fn each_round_is_set_against_itself() {
        let samples = [
            sample(0, "bounce", "4k", 900.0),
            sample(0, "no-viommu", "4k", 1000.0),
            sample(1, "bounce", "4k", 100.0),
            sample(1, "no-viommu", "4k", 200.0),
            sample(1, "bounce", "64k", 100.0),
        ];
        let summary = of(&samples.iter().collect::<Vec<_>>());
        assert_eq!(summary.keys().collect::<Vec<_>>(), ["bounce_to_no_viommu_read_4k"]);
        let ratio = &summary["bounce_to_no_viommu_read_4k"];
        assert!((ratio.median - 0.7).abs() < 1e-9 && ratio.rounds == 2, "{ratio:?}");
        assert!((ratio.spread.min - 0.5).abs() < 1e-9 && (ratio.spread.max - 0.9).abs() < 1e-9, "{ratio:?}");
    }
}
