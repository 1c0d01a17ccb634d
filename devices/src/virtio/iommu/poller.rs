// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Thread that polls guest memory for requests, so that a driver with many requests does not need a VM exit for each request.
//!
//! Each notification of a request costs an exit of the vCPU. On hosts where exits are expensive, the exit costs far more than the request
//! itself. So when requests arrive fast, this thread takes over the request queue. The thread suppresses notifications (virtio 1.3, section
//! 2.7.7), watches the available ring, and serves requests while the driver spins for the answer *in* the guest.
//!
//! While the thread polls, it continues to measure how fast requests arrive. The thread stops polling and asks for notifications again in
//! each of these cases:
//! * Polling is forbidden.
//! * No request arrived for 32 times the duration of one request (at least 50 µs, at most 5 ms).
//! * The thread serves requests for less than 1/32 of its time.
//! * Other work runs on the thread's CPU, and exits are or may be faster (see [`super::contention`]).
//!
//! The holder of the lock on the queues owns the request queue. The thread watches the ring without the lock. If a notification is in
//! flight when the thread takes over, the vCPU that sent the notification serves the queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use log::debug;

use super::pace::Pace;
use super::queues::{Queues, Served, Watch};
use super::stalls::Stalls;
use crate::sandbox::{self, ThreadRole, calls};

/// Role of the thread that polls the request queue.
pub const POLL_ROLE: ThreadRole = ThreadRole { name: "iommu_poll", calls: &[calls::MAPPINGS, calls::MESSAGES] };

/// Number of checks of the ring between two reads of the clock. The number is high, because reads of the clock are expensive on some hosts.
const LOOKS_PER_TIME: u32 = 1024;

/// Handle of the polling thread.
pub(super) struct Poller {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    /// True if polling is allowed, because a host CPU is free for the thread.
    allowed: AtomicBool,
    wanted: AtomicBool,
    /// True if requests are pending and the driver will send no notification for them.
    asked: AtomicBool,
    stop: AtomicBool,
}

impl Poller {
    /// Starts the thread for `queues`. The thread sleeps at first. If `allowed` is true, the thread may take over the request queue.
    ///
    /// # Errors
    /// The host cannot start a thread.
    pub(super) fn spawn(queues: Arc<Queues>, allowed: bool) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            allowed: AtomicBool::new(allowed),
            wanted: AtomicBool::new(false),
            asked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let of_thread = shared.clone();
        let thread = sandbox::start(POLL_ROLE, POLL_ROLE.name.into(), move || of_thread.run(&queues))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Wakes the thread to take over the request queue, if polling is allowed. The call is cheap if the thread already polls.
    pub(super) fn wake(&self) {
        if self.shared.allowed.load(Ordering::Acquire)
            && !self.shared.wanted.swap(true, Ordering::AcqRel)
            && let Some(thread) = &self.thread
        {
            thread.thread().unpark();
        }
    }

    /// Wakes the thread to serve all pending requests, even if polling is not allowed.
    pub(super) fn serve(&self) {
        self.shared.asked.store(true, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Allows or forbids polling. If polling is forbidden, the thread stops polling as soon as no request is pending.
    pub(super) fn allow(&self, allowed: bool) {
        self.shared.allowed.store(allowed, Ordering::Release);
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                log::error!("the virtio-iommu's polling thread panicked");
            }
        }
    }
}

impl Shared {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn run(&self, queues: &Queues) {
        while !self.stopped() {
            let asked = self.asked.swap(false, Ordering::AcqRel);
            if asked || self.wanted.load(Ordering::Acquire) {
                if let Some(watch) = queues.begin_polling() {
                    self.poll(queues, watch);
                }
                self.wanted.store(false, Ordering::Release);
            } else {
                thread::park();
            }
        }
    }

    /// Polls and serves requests until polling is forbidden or no longer pays, the driver is gone, or the device is dropped.
    fn poll(&self, queues: &Queues, mut watch: Watch) {
        let mut idle = Idle { served: true, since: None };
        let mut pace = Pace::polled(watch.poll_time());
        let mut stalls = Stalls::new(Instant::now());
        loop {
            let mut looks = LOOKS_PER_TIME;
            while looks != 0 && !watch.sees_requests() {
                std::hint::spin_loop();
                looks -= 1;
            }
            let allowed = self.allowed.load(Ordering::Acquire);
            let go_on = if looks != 0 {
                idle.served = true;
                let (served, pays) = pace.measure(|| queues.serve_polled(&mut watch));
                note(queues, &mut stalls, std::mem::take(&mut watch.served));
                let ends = !allowed || pays == Some(false) || watch.steps_back;
                served.and_then(|go_on| if go_on && ends { queues.end_polling(&watch) } else { Ok(go_on) })
            } else if !allowed || self.stopped() || idle.is_over(pace.poll_time(), &mut stalls) {
                queues.end_polling(&watch)
            } else {
                Ok(true)
            };
            match go_on {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    debug!("{error} (found by the polling thread)");
                    watch.fail(&error);
                    return;
                }
            }
            if self.stopped() {
                // The device is being dropped. No vCPU runs any more, so no driver waits for later requests.
                return;
            }
        }
    }
}

/// If the thread had no CPU, records how long the served requests may have waited.
fn note(queues: &Queues, stalls: &mut Stalls, served: Served) {
    match served.between {
        Some(between) if !served.late => {
            if let Some(waited) = stalls.served(between) {
                queues.note_stall(waited);
            }
        }
        between => stalls.served_late(between.map_or_else(Instant::now, |(_, ended)| ended)),
    }
}

/// Measures the time without requests.
struct Idle {
    /// True if requests were served since the last read of the clock.
    served: bool,
    /// First read of the clock after the last request.
    since: Option<Instant>,
}

impl Idle {
    /// Returns true if no request arrived for `poll_time`. Call this function when the checks of the ring have found no request.
    fn is_over(&mut self, poll_time: Duration, stalls: &mut Stalls) -> bool {
        if std::mem::take(&mut self.served) {
            self.since = None;
        }
        let now = Instant::now();
        stalls.looked(now);
        now.duration_since(*self.since.get_or_insert(now)) >= poll_time
    }
}
