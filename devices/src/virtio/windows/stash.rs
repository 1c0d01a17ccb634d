// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread that allocates chunks before they are asked for and gives the memory of released ones back.

use std::sync::PoisonError;

use log::warn;

use super::chunk::{Chunk, is_shortage};
use super::memory::{Shared, State};
use crate::sync::lock;

/// Chunks kept ready: a driver that grows its pool asks for a few in a row.
pub(super) const TARGET: usize = 4;

/// What there is to do.
enum Job {
    Drop(Vec<Chunk>),
    Allocate,
}

/// Runs until the owner says stop.
pub(super) fn run(shared: &Shared) {
    let mut complained = false;
    let mut state = lock(&shared.state);
    while !state.stop {
        let Some(job) = next_job(&mut state) else {
            state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(state);
        match job {
            Job::Drop(chunks) => {
                let count = chunks.len() as u64;
                drop(chunks);
                state = lock(&shared.state);
                state.busy -= count;
            }
            Job::Allocate => {
                let result = Chunk::allocate(shared.chunk_size, shared.hugepages);
                state = lock(&shared.state);
                state.busy -= 1;
                match result {
                    Ok(chunk) if has_room(&state) => state.stash.push(chunk),
                    Ok(_) => {}
                    Err(error) => {
                        state.starved = true;
                        if !complained && !is_shortage(&error) {
                            warn!("window memory could not be allocated ahead: {error} (reported once)");
                            complained = true;
                        }
                    }
                }
            }
        }
        shared.done.notify_all();
    }
}

fn next_job(state: &mut State) -> Option<Job> {
    if !state.retired.is_empty() {
        let chunks = std::mem::take(&mut state.retired);
        state.busy += chunks.len() as u64;
        return Some(Job::Drop(chunks));
    }
    if state.starved || !has_room(state) {
        return None;
    }
    state.busy += 1;
    Some(Job::Allocate)
}

/// Whether another chunk may be stashed.
fn has_room(state: &State) -> bool {
    state.in_use && state.stash.len() < TARGET && state.held() < state.budget
}
