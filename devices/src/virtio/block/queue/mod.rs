// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Thread of a queue. The thread reads the guest's requests, turns the requests into operations, and answers the requests. The thread also
//! decides how long to poll for more requests.
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
