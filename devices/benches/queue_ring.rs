// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What keeping the last requests to a queue costs: chains of two buffers that are taken, walked and given back, with the ring and without, in
//! turns within one measurement.

use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use devices::virtio::QueueLoad;

/// Chains in a turn.
const TURN: u16 = 64;
/// Turns, at least.
const LEAST: u64 = 15;

/// Both take turns, and one of them is measured.
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
                // The one in the middle, so that what other programs take of the host does not count; as if it had been that many.
                took.sort_unstable();
                took[took.len() / 2].mul_f64(rounds as f64 / f64::from(TURN))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, with_and_without);
criterion_main!(benches);
