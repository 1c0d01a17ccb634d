// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Supply of chunks within the budget. The engine's thread takes chunks and retires them. The stash's thread allocates chunks ahead of
//! requests, and drops retired chunks.

use std::io;
use std::ops::DerefMut;

use iommu_bounce::ChunkError;
use log::warn;

use super::chunk::is_shortage;

/// Number of chunks in a full stash. A driver that grows its pool asks for a few chunks in a row.
pub(super) const TARGET: usize = 4;

/// Chunks in all states, and the budget.
#[derive(Debug)]
pub(super) struct Supply<C> {
    /// Maximum number of chunks in all states together.
    budget: u64,
    /// Number of chunks that are backed, parked or lost.
    backed: u64,
    /// Chunks ready to be backed.
    stash: Vec<C>,
    /// Chunks that the stash's thread must drop.
    retired: Vec<C>,
    /// Number of chunks that the stash's thread is allocating or dropping.
    busy: u64,
    /// True if the driver uses windows, so that a stash is useful.
    in_use: bool,
    /// True if the last allocation failed. The stash's thread then does not allocate again until a chunk is freed, or the budget or
    /// `in_use` is set.
    starved: bool,
    stop: bool,
}

/// Work for the stash's thread.
enum Job<C> {
    Drop(Vec<C>),
    Allocate,
}

impl<C> Supply<C> {
    /// Returns a supply with this budget and no chunks.
    pub(super) fn new(budget: u64) -> Self {
        Self {
            budget,
            backed: 0,
            stash: Vec::with_capacity(TARGET),
            retired: Vec::new(),
            busy: 0,
            in_use: false,
            starved: false,
            stop: false,
        }
    }

    /// Returns the number of chunks that count against the budget.
    pub(super) fn held(&self) -> u64 {
        self.backed + self.busy + (self.stash.len() + self.retired.len()) as u64
    }

    /// True if backed, parked and lost chunks use up the budget.
    pub(super) fn is_used_up(&self) -> bool {
        self.backed >= self.budget
    }

    /// Counts a chunk that was backed or lost.
    pub(super) fn note_backed(&mut self) {
        self.backed += 1;
    }

    /// Stops counting a lost chunk whose memory has been freed.
    pub(super) fn note_recovered(&mut self) {
        self.backed -= 1;
        self.starved = false;
    }

    /// Takes over a chunk that is no longer backed. The stash's thread then drops the chunk.
    pub(super) fn retire(&mut self, chunk: C) {
        self.backed -= 1;
        self.starved = false;
        self.retired.push(chunk);
    }

    /// Changes the budget. Drops stashed chunks beyond the new budget immediately. Backed chunks stay.
    pub(super) fn set_budget(&mut self, budget: u64) {
        self.budget = budget;
        self.starved = false;
        while self.held() > self.budget && self.stash.pop().is_some() {}
    }

    /// Records that the driver has begun or stopped using windows. Drops the stash if the driver has stopped.
    pub(super) fn set_in_use(&mut self, in_use: bool) {
        self.in_use = in_use;
        self.starved = false;
        if !in_use {
            self.stash.clear();
        }
    }

    /// Makes the stash's thread end.
    pub(super) fn stop(&mut self) {
        self.stop = true;
    }

    /// True if another chunk may be stashed.
    fn has_room(&self) -> bool {
        self.in_use && self.stash.len() < TARGET && self.held() < self.budget
    }

    fn next_job(&mut self) -> Option<Job<C>> {
        if !self.retired.is_empty() {
            let chunks = std::mem::take(&mut self.retired);
            self.busy += chunks.len() as u64;
            return Some(Job::Drop(chunks));
        }
        if self.starved || !self.has_room() {
            return None;
        }
        self.busy += 1;
        Some(Job::Allocate)
    }
}

/// Lock around a [`Supply`], with the condition variables of its threads.
pub(super) trait Monitor {
    type Chunk;
    /// Guard of the lock.
    type Guard<'g>: DerefMut<Target: AsMut<Supply<Self::Chunk>>>
    where
        Self: 'g;

    fn lock(&self) -> Self::Guard<'_>;
    /// Releases the lock and waits until the stash's thread may have work.
    fn wait_for_work<'g>(&'g self, guard: Self::Guard<'g>) -> Self::Guard<'g>;
    /// Releases the lock and waits until the stash's thread may have done some work.
    fn wait_until_done<'g>(&'g self, guard: Self::Guard<'g>) -> Self::Guard<'g>;
    /// Wakes threads that wait for the stash.
    fn report_done(&self);
    fn allocate(&self) -> io::Result<Self::Chunk>;
}

/// Runs the stash's thread until the owner stops it.
pub(super) fn run(monitor: &impl Monitor) {
    let mut complained = false;
    let mut guard = monitor.lock();
    while !guard.as_mut().stop {
        let Some(job) = guard.as_mut().next_job() else {
            guard = monitor.wait_for_work(guard);
            continue;
        };
        drop(guard);
        match job {
            Job::Drop(chunks) => {
                let count = chunks.len() as u64;
                drop(chunks);
                guard = monitor.lock();
                guard.as_mut().busy -= count;
            }
            Job::Allocate => {
                let result = monitor.allocate();
                guard = monitor.lock();
                let supply = guard.as_mut();
                supply.busy -= 1;
                match result {
                    Ok(chunk) if supply.has_room() => supply.stash.push(chunk),
                    Ok(_) => {}
                    Err(error) => {
                        supply.starved = true;
                        if !complained && !is_shortage(&error) {
                            warn!("cannot allocate window memory ahead of requests: {error} (reported once)");
                            complained = true;
                        }
                    }
                }
            }
        }
        monitor.report_done();
    }
}

/// Takes a chunk from the stash. If the stash is empty and the budget allows it, allocates a new chunk. The caller must count the chunk as
/// backed before it releases the lock.
pub(super) fn take<'g, M: Monitor>(
    monitor: &'g M,
    mut guard: M::Guard<'g>,
) -> Result<(M::Guard<'g>, M::Chunk), ChunkError> {
    loop {
        let supply = guard.as_mut();
        if let Some(chunk) = supply.stash.pop() {
            return Ok((guard, chunk));
        }
        if supply.held() < supply.budget {
            let chunk = monitor.allocate().map_err(shortage)?;
            return Ok((guard, chunk));
        }
        if supply.busy == 0 && supply.retired.is_empty() {
            return Err(ChunkError::NoResources);
        }
        // Wait until the stash's thread has dropped or allocated a chunk, because a chunk may be available then.
        guard = monitor.wait_until_done(guard);
    }
}

pub(super) fn shortage(error: io::Error) -> ChunkError {
    if is_shortage(&error) { ChunkError::NoResources } else { ChunkError::Host(error) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use loom::sync::{Condvar, Mutex, MutexGuard};

    use super::*;

    /// Chunk that counts the existing chunks. loom does not model this counter.
    struct Counted(Arc<AtomicU64>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    struct State(Supply<Counted>);

    impl AsMut<Supply<Counted>> for State {
        fn as_mut(&mut self) -> &mut Supply<Counted> {
            &mut self.0
        }
    }

    /// Lock and condition variables of loom, which tries all orders of events.
    struct Model {
        state: Mutex<State>,
        work: Condvar,
        done: Condvar,
        live: Arc<AtomicU64>,
        /// Maximum number of chunks at any time.
        most: u64,
    }

    impl Monitor for Model {
        type Chunk = Counted;
        type Guard<'g> = MutexGuard<'g, State>;

        fn lock(&self) -> MutexGuard<'_, State> {
            self.state.lock().unwrap()
        }
        fn wait_for_work<'g>(&'g self, guard: MutexGuard<'g, State>) -> MutexGuard<'g, State> {
            self.work.wait(guard).unwrap()
        }
        fn wait_until_done<'g>(&'g self, guard: MutexGuard<'g, State>) -> MutexGuard<'g, State> {
            self.done.wait(guard).unwrap()
        }
        fn report_done(&self) {
            self.done.notify_all();
        }
        fn allocate(&self) -> io::Result<Counted> {
            assert!(self.live.fetch_add(1, Ordering::Relaxed) < self.most, "more chunks than the budget");
            Ok(Counted(self.live.clone()))
        }
    }

    impl Model {
        /// Does the work of a WINDOW_ADD.
        fn add(&self) -> Result<Counted, ChunkError> {
            let (mut guard, chunk) = take(self, self.lock())?;
            guard.as_mut().note_backed();
            self.work.notify_one();
            Ok(chunk)
        }
        /// Does the work of a WINDOW_DEL.
        fn del(&self, chunk: Counted) {
            self.lock().as_mut().retire(chunk);
            self.work.notify_one();
        }
        fn change(&self, change: impl FnOnce(&mut Supply<Counted>)) {
            change(self.lock().as_mut());
            self.work.notify_one();
        }
    }

    /// Runs `driver`, the stash's thread and `owner` concurrently, in all orders of events with at most three preemptions. loom also
    /// reports endless waits. In the end, only the chunks that `driver` returns may be backed, and all existing chunks must be counted.
    fn check(budget: u64, driver: fn(&Model) -> Vec<Counted>, owner: fn(&Model)) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let live = Arc::new(AtomicU64::new(0));
            let model = loom::sync::Arc::new(Model {
                state: Mutex::new(State(Supply::new(budget))),
                work: Condvar::new(),
                done: Condvar::new(),
                live: live.clone(),
                most: budget,
            });
            model.change(|supply| supply.set_in_use(true));
            let [stash, other] = [model.clone(), model.clone()];
            let stash = loom::thread::spawn(move || run(&*stash));
            let other = loom::thread::spawn(move || driver(&other));
            owner(&model);
            let kept = other.join().unwrap();
            model.change(Supply::stop);
            stash.join().unwrap();

            let mut guard = model.lock();
            let supply = guard.as_mut();
            assert_eq!(supply.busy, 0);
            assert_eq!(supply.backed, kept.len() as u64);
            assert_eq!(supply.held(), live.load(Ordering::Relaxed), "a chunk is not counted");
        });
    }

    #[test]
    fn returned_chunk_is_available_at_once_in_any_event_order() {
        check(
            1,
            |model| {
                let chunk = model.add().unwrap();
                model.del(chunk);
                vec![model.add().unwrap()]
            },
            |_| {},
        );
    }

    #[test]
    fn budget_holds_while_it_is_lowered_and_the_stash_is_filled() {
        check(
            2,
            |model| {
                let first = model.add().unwrap();
                let second = model.add();
                model.del(first);
                second.into_iter().collect()
            },
            |model| model.change(|supply| supply.set_budget(1)),
        );
    }

    #[test]
    fn driver_that_stops_using_windows_leaves_no_chunks() {
        check(
            2,
            |model| {
                let chunk = model.add().unwrap();
                model.del(chunk);
                model.change(|supply| supply.set_in_use(false));
                Vec::new()
            },
            |model| model.change(|supply| supply.set_budget(2)),
        );
    }
}
