// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a read of 4 KiB takes of a disk's thread, where the image is in the host's page cache: alone, and many at a time.

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use devices::virtio::block::ReadLoad;

/// Turns, at least.
const LEAST: u64 = 301;

fn reads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("read");
    let mut load = ReadLoad::new();
    for at_a_time in [1u16, 16, 64] {
        group.bench_function(format!("{at_a_time}_at_a_time"), |bencher| {
            bencher.iter_custom(|rounds| {
                let turns = rounds.div_ceil(at_a_time.into()).clamp(LEAST, 10 * LEAST);
                let mut took: Vec<Duration> = (0..turns).map(|_| load.turn(at_a_time)).collect();
                // The one in the middle, so that what other programs take of the host does not count; as if it had been that many.
                took.sort_unstable();
                took[took.len() / 2].mul_f64(rounds as f64 / f64::from(at_a_time))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, reads);
criterion_main!(benches);
