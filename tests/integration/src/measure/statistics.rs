// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Statistics of repeated measurements.

use serde::{Deserialize, Serialize};

/// Returns the median: the middle figure, or the mean of the two middle figures. Returns `None` without figures.
#[must_use]
pub fn median(figures: impl Iterator<Item = f64>) -> Option<f64> {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    let (low, high) = (figures.get(figures.len().checked_sub(1)? / 2)?, figures.get(figures.len() / 2)?);
    Some(f64::midpoint(*low, *high))
}

/// Returns an interval that contains the median with a probability of at least 95 %, for any distribution. Returns `None` for
/// fewer than six figures, because even the range from the minimum to the maximum of five figures contains the median with a
/// lower probability.
#[must_use]
pub fn interval(figures: &[f64]) -> Option<(f64, f64)> {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    // Each figure is below the median with a probability of 1/2. So the number of figures below the median has a binomial
    // distribution.
    let count = sorted.len();
    let (mut heads, mut below, mut outside) = (0.5f64.powi(i32::try_from(count).ok()?), 0.0, None);
    for (rank, left) in (0..count).zip((0..=count).rev()) {
        below += heads;
        if below > 0.025 {
            break;
        }
        outside = Some(rank);
        #[expect(clippy::cast_precision_loss, reason = "repetitions are few")]
        let next = left as f64 / (rank + 1) as f64;
        heads *= next;
    }
    let rank = outside?;
    Some((*sorted.get(rank)?, *sorted.get(count.checked_sub(rank + 1)?)?))
}

/// Spread of a figure's repetitions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Minimum.
    pub min: f64,
    /// Maximum.
    pub max: f64,
    /// Coefficient of variation: the sample's standard deviation divided by the mean. 0 if the mean is 0.
    pub cv: f64,
}

impl Spread {
    /// Calculates the spread. Returns `None` without figures.
    #[must_use]
    pub fn of(figures: &[f64]) -> Option<Self> {
        let (first, rest) = figures.split_first()?;
        let min = rest.iter().copied().fold(*first, f64::min);
        let max = rest.iter().copied().fold(*first, f64::max);
        #[expect(clippy::cast_precision_loss, reason = "repetitions are few")]
        let count = figures.len() as f64;
        let mean = figures.iter().sum::<f64>() / count;
        let squares: f64 = figures.iter().map(|figure| (figure - mean).powi(2)).sum();
        let deviation = if rest.is_empty() { 0.0 } else { (squares / (count - 1.0)).sqrt() };
        Some(Self { min, max, cv: if mean == 0.0 { 0.0 } else { deviation / mean.abs() } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_middle_or_the_mean_of_the_middle_two() {
        assert_eq!(median([3.0, 1.0, 9.0].into_iter()), Some(3.0));
        assert_eq!(median([4.0, 1.0, 2.0, 9.0].into_iter()), Some(3.0));
        assert_eq!(median([].into_iter()), None);
    }

    #[test]
    fn interval_has_the_ranks_of_the_tables() {
        let ranks = |count: u32| interval(&(1..=count).rev().map(f64::from).collect::<Vec<_>>());
        assert_eq!(ranks(5), None);
        // Ranks for 95 %, as in tables of the sign test.
        for (count, low, high) in [(6, 1.0, 6.0), (8, 1.0, 8.0), (9, 2.0, 8.0), (20, 6.0, 15.0), (30, 10.0, 21.0)] {
            assert_eq!(ranks(count), Some((low, high)), "{count}");
        }
    }

    #[test]
    fn spread_has_the_ends_and_the_deviation_of_a_sample() {
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(Spread::of(&[5.0]), Some(Spread { min: 5.0, max: 5.0, cv: 0.0 }));
        assert_eq!(Spread::of(&[0.0, 0.0]), Some(Spread { min: 0.0, max: 0.0, cv: 0.0 }));
        let spread = Spread::of(&[8.0, 12.0, 10.0]).unwrap();
        assert_eq!((spread.min, spread.max), (8.0, 12.0));
        assert!((spread.cv - 0.2).abs() < 1e-12, "{spread:?}");
    }
}
