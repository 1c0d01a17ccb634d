// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Time that a disk's thread needs for a read of 4 KiB from the host's page cache, for single reads and for many reads at a time.

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use devices::virtio::block::ReadLoad;

/// Minimum number of turns.
const LEAST: u64 = 301;

fn reads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("read");
    let mut load = ReadLoad::new();
    for at_a_time in [1u16, 16, 64] {
        group.bench_function(format!("{at_a_time}_at_a_time"), |bencher| {
            bencher.iter_custom(|rounds| {
                let turns = rounds.div_ceil(at_a_time.into()).clamp(LEAST, 10 * LEAST);
                let mut took: Vec<Duration> = (0..turns).map(|_| load.turn(at_a_time)).collect();
                // The median excludes time that other programs take on the host. The median is scaled to the requested number of rounds.
                took.sort_unstable();
                took[took.len() / 2].mul_f64(rounds as f64 / f64::from(at_a_time))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, reads);
criterion_main!(benches);
