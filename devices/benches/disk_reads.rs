// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Benchmark of the CPU time that a disk's thread needs for a 4 KiB read from the host's page cache. In each turn, the driver submits 1, 16
//! or 64 reads together, and the disk serves them.

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use devices::virtio::block::ReadLoad;

/// Minimum number of turns of a measurement.
const LEAST: u64 = 301;

fn reads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("read");
    let mut load = ReadLoad::new();
    for at_a_time in [1u16, 16, 64] {
        group.bench_function(format!("{at_a_time}_at_a_time"), |bencher| {
            bencher.iter_custom(|rounds| {
                let turns = rounds.div_ceil(at_a_time.into()).clamp(LEAST, 10 * LEAST);
                let mut took: Vec<Duration> = (0..turns).map(|_| load.turn(at_a_time)).collect();
                // Report the time of the median turn, so that delays by other programs on the host have no effect. Scale this time to the
                // number of reads that Criterion requested.
                took.sort_unstable();
                took[took.len() / 2].mul_f64(rounds as f64 / f64::from(at_a_time))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, reads);
criterion_main!(benches);
