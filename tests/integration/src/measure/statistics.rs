// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What comes of a figure that was measured several times.

use serde::{Deserialize, Serialize};

/// The middle one; of an even number, the mean of the two in the middle. `None` of none.
#[must_use]
pub fn median(figures: impl Iterator<Item = f64>) -> Option<f64> {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    let (low, high) = (figures.get(figures.len().checked_sub(1)? / 2)?, figures.get(figures.len() / 2)?);
    Some(f64::midpoint(*low, *high))
}

/// How far a figure's repetitions are apart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// Coefficient of variation: the standard deviation of the sample, as a part of the mean. 0 where the mean is.
    pub cv: f64,
}

impl Spread {
    /// Of one figure or more. `None` of none.
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
    fn median_is_the_middle_or_between_the_two_there() {
        assert_eq!(median([3.0, 1.0, 9.0].into_iter()), Some(3.0));
        assert_eq!(median([4.0, 1.0, 2.0, 9.0].into_iter()), Some(3.0));
        assert_eq!(median([].into_iter()), None);
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
