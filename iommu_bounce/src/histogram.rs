// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Histograms of durations. The upper end of each class is twice the upper end of the class before.

use std::time::Duration;

use serde::Serialize;

/// Number of classes of a [`Histogram`].
pub const BUCKETS: usize = 32;

/// Histogram of durations. Recording takes a few additions and allocates nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Histogram {
    /// Number of recorded durations.
    pub count: u64,
    /// Sum of all durations in nanoseconds.
    pub sum_ns: u64,
    /// Longest duration in nanoseconds.
    pub max_ns: u64,
    /// Durations by class: element n counts durations of at least 2^n and below 2^(n+1) nanoseconds. The first class includes 0,
    /// and the last class includes all longer durations.
    pub buckets: [u64; BUCKETS],
}

impl Histogram {
    /// Records a duration.
    pub fn record(&mut self, took: Duration) {
        self.record_ns(nanoseconds(took));
    }

    /// Records a duration of `ns` nanoseconds.
    #[inline]
    pub(crate) fn record_ns(&mut self, ns: u64) {
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.max_ns = self.max_ns.max(ns);
        let class = (ns | 1).ilog2() as usize;
        self.buckets[class.min(BUCKETS - 1)] += 1;
    }

    /// Returns a quantile in nanoseconds: `per_mille` of every thousand durations are at most this long. The result is the upper end of a
    /// class, but at most the longest duration. If nothing was recorded, the result is 0.
    pub fn quantile_ns(&self, per_mille: u64) -> u64 {
        let wanted = u128::from(self.count) * u128::from(per_mille.min(1000));
        let mut seen = 0u128;
        for (class, count) in self.buckets.iter().enumerate() {
            seen += u128::from(*count) * 1000;
            if *count != 0 && seen >= wanted && class + 1 < BUCKETS {
                return ((2u64 << class) - 1).min(self.max_ns);
            }
        }
        self.max_ns
    }
}

/// Returns the duration in nanoseconds, or the largest `u64` if the duration is longer.
#[inline]
pub(crate) fn nanoseconds(took: Duration) -> u64 {
    took.as_secs().saturating_mul(1_000_000_000).saturating_add(u64::from(took.subsec_nanos()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(times: &[u64]) -> Histogram {
        let mut histogram = Histogram::default();
        times.iter().for_each(|ns| histogram.record(Duration::from_nanos(*ns)));
        histogram
    }

    #[test]
    fn classes_double() {
        let histogram = of(&[0, 1, 2, 3, 4, 1023, 1024, u64::MAX]);
        let filled: Vec<_> = histogram.buckets.iter().enumerate().filter(|(_, count)| **count != 0).collect();
        assert_eq!(filled, [(0, &2), (1, &2), (2, &1), (9, &1), (10, &1), (31, &1)]);
        assert_eq!((histogram.count, histogram.sum_ns, histogram.max_ns), (8, u64::MAX, u64::MAX));
    }

    #[test]
    fn quantile_is_the_end_of_a_class() {
        let mut times = vec![100; 990];
        times.extend([5000; 10]);
        let histogram = of(&times);
        assert_eq!([500, 990, 991, 1000].map(|at| histogram.quantile_ns(at)), [127, 127, 5000, 5000]);
        assert_eq!(Histogram::default().quantile_ns(500), 0);
        assert_eq!(of(&[1 << 40]).quantile_ns(500), 1 << 40);
    }
}
