// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Long version of the model test: `CAROM_MODEL_REQUESTS=1000000000 cargo test --release -p iommu_bounce --test model long`.
//! `CAROM_MODEL_SEED=7` changes the seed.
//!
//! Generating a request takes much longer than serving it. So the test generates a pool of a few thousand requests at a time, and
//! draws sequences from the pool.

use std::env;
use std::fmt::Debug;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use crate::ops::{HostFailure, Op, any_op, map_failure};

/// Number of requests in the pool, and number of sequences that are drawn from the pool before it is replaced.
const POOL: usize = 4096;
const SEQUENCES: u32 = 2000;
/// Maximum length of a sequence.
const LONGEST: u64 = 80;
/// Default number of requests.
const REQUESTS: u64 = 20_000;
/// Interval of progress messages.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

type Step = (Option<HostFailure>, Op);

/// Prints the sent requests if the test fails.
struct Sent<'s> {
    seed: u64,
    steps: &'s [Step],
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("seed {}: {:#?}", self.seed, self.steps);
        }
    }
}

fn variable<T: FromStr<Err: Debug>>(name: &str, otherwise: T) -> T {
    env::var(name).map_or(otherwise, |text| text.parse().expect("a number"))
}

#[test]
fn engine_and_model_agree_for_long() {
    let wanted = variable("CAROM_MODEL_REQUESTS", REQUESTS);
    let seed = variable("CAROM_MODEL_SEED", 1u64);
    let bytes = [seed.to_le_bytes(); 4].concat();
    let mut runner =
        TestRunner::new_with_rng(ProptestConfig::default(), TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let step = (prop::option::weighted(0.2, map_failure()), any_op());
    let (mut done, mut reported) = (0, Instant::now());
    while done < wanted {
        let make_up = |_| step.new_tree(&mut runner).expect("generation never fails").current();
        let pool: Vec<Step> = (0..POOL).map(make_up).collect();
        for _ in 0..SEQUENCES {
            if done >= wanted {
                break;
            }
            let len = 1 + runner.rng().next_u64() % LONGEST;
            let mut draw = |_| pool[runner.rng().next_u32() as usize % POOL].clone();
            let steps: Vec<Step> = (0..len).map(&mut draw).collect();
            let sent = Sent { seed, steps: &steps };
            super::agree(sent.steps);
            done += len;
        }
        if reported.elapsed() >= REPORT_INTERVAL {
            eprintln!("{done} requests");
            reported = Instant::now();
        }
    }
}
