// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Busy loops that take CPU time from all measured guests alike, as other VMs on the same CPUs would.

use std::hint;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// Busy loops, which run until this value is dropped.
pub(crate) struct BusyLoops {
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl BusyLoops {
    /// Starts `count` loops, each in a thread with the usual priority.
    ///
    /// # Errors
    /// The host cannot start so many threads.
    pub(crate) fn start(count: u32) -> io::Result<Self> {
        let mut loops = Self { ended: Arc::default(), threads: Vec::new() };
        for number in 0..count {
            let ended = loops.ended.clone();
            let spin = move || {
                while !ended.load(Ordering::Relaxed) {
                    (0..10_000).for_each(|_| hint::spin_loop());
                }
            };
            loops.threads.push(thread::Builder::new().name(format!("busy{number}")).spawn(spin)?);
        }
        Ok(loops)
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The loop does not panic.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_run_until_they_are_dropped() {
        let loops = BusyLoops::start(2).unwrap();
        let ended = Arc::downgrade(&loops.ended);
        assert!(loops.threads.len() == 2 && loops.threads.iter().all(|thread| !thread.is_finished()));
        drop(loops);
        assert!(ended.upgrade().is_none(), "a loop still runs");
        assert!(BusyLoops::start(0).unwrap().threads.is_empty());
    }
}
