// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Thread of a queue. It reads the guest's requests, turns them into operations and answers them. It also decides how long to wait for
//! more requests.
//!
//! `requests` is the thread's main loop. `request` reads a request. `prepare` checks the request, and chooses its answer or its operations.
//! `flight` tracks a request while its operations run, step by step (`transfer`, `ranges`).
//!
//! `disk`, one folder up, holds the state that all queues of a disk share.

mod coalescing;
mod flight;
mod gap;
mod idle_poll;
mod preemption;
mod prepare;
mod ranges;
mod request;
pub(super) mod requests;
pub(super) mod transfer;
mod trial;
