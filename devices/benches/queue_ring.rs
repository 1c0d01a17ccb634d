// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Cost of recording the last requests to a virtqueue for crash reports. In each turn, the device side of a queue takes, walks and returns
//! chains of two buffers. Turns with and without recording alternate within one measurement.

use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use devices::virtio::QueueLoad;

/// Number of chains in a turn.
const TURN: u16 = 64;
/// Minimum number of turns of a measurement.
const LEAST: u64 = 15;

/// Makes two measurements: first of turns without recording, then of turns with recording. In each measurement, turns of both variants
/// alternate, but only the turns of one variant are timed.
fn with_and_without(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("chain");
    let mut loads = [QueueLoad::new(false), QueueLoad::new(true)];
    for (measured, name) in ["without", "with_the_ring"].into_iter().enumerate() {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|rounds| {
                let turns = rounds.div_ceil(TURN.into()).max(LEAST);
                let mut took = Vec::new();
                for _ in 0..turns {
                    for (number, load) in loads.iter_mut().enumerate() {
                        let began = Instant::now();
                        load.turn(TURN);
                        if number == measured {
                            took.push(began.elapsed());
                        }
                    }
                }
                // Report the median turn, which excludes delays by other programs on the host. Scale this time to the number of chains that
                // Criterion requested.
                took.sort_unstable();
                took[took.len() / 2].mul_f64(rounds as f64 / f64::from(TURN))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, with_and_without);
criterion_main!(benches);
