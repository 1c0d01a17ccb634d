// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Benchmark that compares two virtqueues. Only one of the virtqueues records its last requests for crash reports. In each turn, the device
//! side of the queue takes descriptor chains of two buffers, walks the chains and returns them.

use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use devices::virtio::QueueLoad;

/// Number of chains in a turn.
const TURN: u16 = 64;
/// Minimum number of turns of a measurement.
const LEAST: u64 = 15;

/// Makes two measurements. Each measurement alternates turns without and with recording. The first measurement counts only the time of
/// turns without recording, and the second only the time of turns with recording.
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
                // Report the time of the median turn, so that delays by other programs on the host have no effect. Scale this time to the
                // number of chains that Criterion requested.
                took.sort_unstable();
                took[took.len() / 2].mul_f64(rounds as f64 / f64::from(TURN))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, with_and_without);
criterion_main!(benches);
