// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a queue: it reads the guest's requests, turns them into operations, answers them, and decides how long to wait for more.
//!
//! `requests` is the thread's work. `request` reads a request, `prepare` checks it and chooses its answer or its operations, and `flight`
//! keeps it while these run, step by step (`transfer`, `ranges`).
//!
//! State that all queues of a disk share belongs to `disk`, one folder up.

mod coalescing;
mod flight;
mod gap;
mod linger;
mod preemption;
mod prepare;
mod ranges;
mod request;
pub(super) mod requests;
pub(super) mod transfer;
mod trial;
