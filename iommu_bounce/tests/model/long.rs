// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The same for as long as one likes: `CAROM_MODEL_REQUESTS=1000000000 cargo test --release -p iommu_bounce --test model long`, and for
//! another start `CAROM_MODEL_SEED=7`.
//!
//! Making a request up takes many times as long as serving it. So a few thousand are made up at a time, of which sequences are drawn.

use std::env;
use std::fmt::Debug;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use crate::ops::{HostFailure, Op, any_op, map_failure};

/// What is drawn from, and how many sequences are drawn before others are made up.
const POOL: usize = 4096;
const SEQUENCES: u32 = 2000;
/// Longest sequence.
const LONGEST: u64 = 80;
/// Requests where nobody says how many.
const REQUESTS: u64 = 20_000;
/// How often to say how far it came.
const TOLD: Duration = Duration::from_secs(60);

type Step = (Option<HostFailure>, Op);

/// Says what was sent when the test fails.
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
    let (mut done, mut told) = (0, Instant::now());
    while done < wanted {
        let make_up = |_| step.new_tree(&mut runner).expect("nothing is refused").current();
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
        if told.elapsed() >= TOLD {
            eprintln!("{done} requests");
            told = Instant::now();
        }
    }
}
