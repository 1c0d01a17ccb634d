// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A thread that looks for requests in guest memory, so that a driver which makes many of them need not leave the guest
//! for each.
//!
//! A request that comes by a notification costs an exit of the vCPU, which is far more than the request itself where
//! exits are dear. So when requests come fast, this thread takes over: it asks for no notifications (virtio 1.3, section
//! 2.7.7), watches the available ring, and serves what it finds while the driver spins for its answer *in* the guest. It
//! gives up, and has notifications sent again, when nothing came for as long as a number of requests would take, and when those that
//! come take less than a thirty-second of the time: it measures both again and again.
//!
//! The queue belongs to whoever holds its lock; the thread watches the ring without it. A notification that is on its way
//! when the thread takes over is served by the vCPU as ever.

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

/// How many looks at the ring are made between looks at the clock, which is dear on some hosts.
const LOOKS_PER_TIME: u32 = 1024;

/// The thread, and the way to wake it.
pub(super) struct Poller {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    /// There is a CPU of the host for it.
    allowed: AtomicBool,
    wanted: AtomicBool,
    /// There are requests that nobody tells of.
    asked: AtomicBool,
    stop: AtomicBool,
}

impl Poller {
    /// Starts the thread for `queues`, asleep. It takes over if that is `allowed`.
    ///
    /// # Errors
    /// The host gives no thread.
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

    /// Has the thread take over the request queue. Costs little when it has already.
    pub(super) fn wake(&self) {
        if self.shared.allowed.load(Ordering::Acquire)
            && !self.shared.wanted.swap(true, Ordering::AcqRel)
            && let Some(thread) = &self.thread
        {
            thread.thread().unpark();
        }
    }

    /// The same, whether it may take over or not: it serves what is there.
    pub(super) fn serve(&self) {
        self.shared.asked.store(true, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Lets the thread take over, or not: then it gives up as soon as no request waits.
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

    /// Serves requests until none come any more, the driver goes, or the device is dropped.
    fn poll(&self, queues: &Queues, mut watch: Watch) {
        let mut idle = Idle { served: true, since: None };
        let mut pace = Pace::polled(watch.patience());
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
                let ends = !allowed || pays == Some(false);
                served.and_then(|go_on| if go_on && ends { queues.end_polling(&watch) } else { Ok(go_on) })
            } else if !allowed || self.stopped() || idle.is_over(pace.patience(), &mut stalls) {
                queues.end_polling(&watch)
            } else {
                Ok(true)
            };
            match go_on {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    debug!("{error}, found by polling");
                    watch.fail(&error);
                    return;
                }
            }
            if self.stopped() {
                // Whatever came in between, no vCPU runs any more that could wait for it.
                return;
            }
        }
    }
}

/// Notes the time that served requests can have waited, if the thread had no CPU.
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

/// How long nothing came.
struct Idle {
    /// Something came since the last look at the clock.
    served: bool,
    /// When a look at the clock first found that nothing had come.
    since: Option<Instant>,
}

impl Idle {
    /// To be called after looks that found nothing: whether nothing came for `patience`.
    fn is_over(&mut self, patience: Duration, stalls: &mut Stalls) -> bool {
        if std::mem::take(&mut self.served) {
            self.since = None;
        }
        let now = Instant::now();
        stalls.looked(now);
        now.duration_since(*self.since.get_or_insert(now)) >= patience
    }
}
