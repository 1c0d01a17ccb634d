// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queues of the active driver, and the engine. vCPU threads and the polling thread share the queues and the engine.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use iommu_bounce::{Engine, Histogram};
use log::debug;
use virtio_queue::Queue;
use vm_memory::{Bytes, GuestAddress};

use super::contention::{Contention, Moment};
use super::events::{EVENT_QUEUE, deliver};
use super::pace::Pace;
use super::requests::{REQUEST_QUEUE, RequestQueue};
use crate::peer_timeouts::Operation;
use crate::ram::Ram;
use crate::scheduling::cpu_time;
use crate::sync::{lock, lock_soon};
use crate::virtio::{DeviceError, Driver, Interrupt, QueueState};

/// State that exists while a driver is active.
struct Active {
    /// Number that changes whenever polling must end: for each new driver, at each stop of the request queue, and at each pause of a polled
    /// queue.
    number: u64,
    memory: Arc<Ram>,
    requests: Option<RequestQueue>,
    events: Option<Queue>,
    interrupt: Arc<dyn Interrupt>,
    pace: Pace,
    contention: Contention,
    /// True if notifications are suppressed, because the polling thread watches the request queue.
    polled: bool,
    /// Start and end of the last batch of requests, and a flag for a wait for a lock.
    served: Served,
}

/// Start and end of a batch of requests, and a flag for a wait for a lock.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Served {
    /// Start of the first request and end of the last request. `None` if the batch was empty.
    pub(super) between: Option<(Instant, Instant)>,
    /// True if this thread had to wait for the lock on the engine or the queues.
    pub(super) late: bool,
}

/// The engine, and the queues of the driver if a driver is active. The thread that holds the lock on `active` owns the queues.
pub(super) struct Queues {
    engine: Arc<Mutex<Engine>>,
    active: Mutex<Option<Active>>,
    /// Next value of [`Active::number`].
    drivers: AtomicU64,
    /// True if no thread may access the rings. The value changes only while `active` is locked.
    paused: AtomicBool,
    /// Histogram of stalls. A stall is the time that a request waited because the polling thread had no CPU.
    stalls: Mutex<Histogram>,
}

/// View of the available ring, for the polling thread. The thread needs no lock to look for new requests.
pub(super) struct Watch {
    number: u64,
    memory: Arc<Ram>,
    interrupt: Arc<dyn Interrupt>,
    index: GuestAddress,
    /// Index in the available ring of the next request to serve.
    next: u16,
    poll_time: Duration,
    /// Start and end of the last batch of requests, and a flag for a wait for a lock.
    pub(super) served: Served,
    /// True if the thread must stop polling, because exits may be faster.
    pub(super) steps_back: bool,
}

impl Watch {
    /// Returns true if the driver has added requests since the last batch.
    pub(super) fn sees_requests(&self) -> bool {
        let index: Result<u16, _> = self.memory.load(self.index, Ordering::Acquire);
        // The read cannot fail, because the ring's address was checked when the driver set up the queue.
        index.is_ok_and(|index| u16::from_le(index) != self.next)
    }

    /// Returns the maximum time to poll for the next request, as measured before polling began.
    pub(super) fn poll_time(&self) -> Duration {
        self.poll_time
    }

    /// Reports a failure of the device to the driver.
    pub(super) fn fail(&self, error: &DeviceError) {
        self.interrupt.failed(error);
    }
}

impl Queues {
    /// Returns the queues for `engine`. No driver is active yet.
    pub(super) fn new(engine: Arc<Mutex<Engine>>) -> Self {
        Self {
            engine,
            active: Mutex::new(None),
            drivers: AtomicU64::new(0),
            paused: AtomicBool::new(false),
            stalls: Mutex::default(),
        }
    }

    /// Returns the engine.
    pub(super) fn engine(&self) -> &Mutex<Engine> {
        &self.engine
    }

    /// Records a stall.
    pub(super) fn note_stall(&self, time: Duration) {
        lock(&self.stalls).record(time);
    }

    /// Returns the histogram of stalls.
    pub(super) fn stalls(&self) -> Histogram {
        *lock(&self.stalls)
    }

    /// Returns the histogram of stalls. Returns `None` if another thread holds the lock on the histogram for more than a few microseconds.
    pub(super) fn stalls_soon(&self) -> Option<Histogram> {
        lock_soon(&self.stalls).map(|stalls| *stalls)
    }

    /// Makes a driver active. The driver's queues are not started yet.
    pub(super) fn open(&self, driver: &Driver) {
        let number = self.drivers.fetch_add(1, Ordering::Relaxed);
        *lock(&self.active) = Some(Active {
            number,
            memory: driver.memory.ram().clone(),
            requests: None,
            events: None,
            interrupt: driver.interrupt.clone(),
            pace: Pace::default(),
            contention: Contention::default(),
            polled: false,
            served: Served::default(),
        });
    }

    /// Starts a queue of the driver.
    pub(super) fn start(&self, index: u16, queue: Queue) {
        if let Some(active) = lock(&self.active).as_mut() {
            match index {
                REQUEST_QUEUE => active.requests = Some(RequestQueue::new(queue)),
                EVENT_QUEUE => active.events = Some(queue),
                _ => {}
            }
        }
    }

    /// Stops a queue, and returns the position in its rings. When this function returns, no thread accesses the queue any more.
    pub(super) fn stop(&self, index: u16) -> Option<QueueState> {
        let mut active = lock(&self.active);
        let active = active.as_mut()?;
        match index {
            REQUEST_QUEUE => {
                // The polling thread sees the new number and stops polling.
                active.number = self.drivers.fetch_add(1, Ordering::Relaxed);
                active.polled = false;
                active.requests.take().map(|requests| requests.state())
            }
            EVENT_QUEUE => active.events.take().map(|queue| QueueState::of(&queue)),
            _ => None,
        }
    }

    /// Returns the position in the rings of a queue.
    pub(super) fn state(&self, index: u16) -> Option<QueueState> {
        let active = lock(&self.active);
        let active = active.as_ref()?;
        match index {
            REQUEST_QUEUE => active.requests.as_ref().map(RequestQueue::state),
            EVENT_QUEUE => active.events.as_ref().map(QueueState::of),
            _ => None,
        }
    }

    /// Forbids threads to poll or serve the queues until [`Self::resume`]. When this function returns, no thread accesses the rings any
    /// more.
    ///
    /// If the queue is polled, this function first serves the requests that the driver has already added. The function ends early if the
    /// VMM interrupts a request. vCPUs may still run and add more requests, which wait for the resume.
    pub(super) fn pause(&self) {
        let mut active = lock(&self.active);
        self.paused.store(true, Ordering::Relaxed);
        let Some(active) = active.as_mut().filter(|active| active.polled) else { return };
        // The polling thread sees the new number and stops polling.
        active.number = self.drivers.fetch_add(1, Ordering::Relaxed);
        active.polled = false;
        active.pace.restart();
        if let Err(error) = active.drain(&self.engine) {
            debug!("{error} (found at a pause of the polled queue)");
            active.interrupt.failed(&error);
        }
    }

    /// Allows threads to serve the queues again, and delivers the faults that were reported during the pause. Returns true if requests are
    /// pending and the driver will send no further notification for them. These requests were interrupted, or the driver added the requests
    /// during the pause.
    pub(super) fn resume(&self) -> bool {
        let mut active = lock(&self.active);
        self.paused.store(false, Ordering::Relaxed);
        if let Some(active) = active.as_mut() {
            active.deliver_waiting(&mut lock(&self.engine));
        }
        let requests = active.as_ref().and_then(|active| Some((active.requests.as_ref()?, &active.memory)));
        // A broken ring counts as a ring with requests, because serving the ring reports the failure to the driver.
        requests.is_some_and(|(requests, memory)| requests.has_requests(memory).unwrap_or(true))
    }

    /// Replaces the comparison of polling with exits.
    #[cfg(test)]
    pub(super) fn set_contention(&self, contention: Contention) {
        lock(&self.active).as_mut().expect("a driver is active").contention = contention;
    }

    /// Drops the queues. When this function returns, no thread accesses the queues any more.
    pub(super) fn close(&self) {
        *lock(&self.active) = None;
    }

    /// Serves `queue` after a notification of the driver. Returns true if requests arrive so fast that polling pays, and exits are not
    /// known to be faster.
    pub(super) fn notified(&self, queue: u16) -> Result<bool, DeviceError> {
        let mut active = lock(&self.active);
        let Some(active) = active.as_mut().filter(|_| !self.is_paused()) else { return Ok(false) };
        if queue != REQUEST_QUEUE || active.polled {
            return active.serve(queue, &self.engine).map(|()| false);
        }
        let mut pace = std::mem::take(&mut active.pace);
        let (served, pays) = pace.measure(|| active.serve(queue, &self.engine));
        active.pace = pace;
        served?;
        Ok(pays.is_some_and(|pays| active.may_poll(pays) && pays))
    }

    /// Delivers pending faults to the driver, while the event queue has buffers for the faults.
    pub(super) fn hand_over_faults(&self) {
        let mut active = lock(&self.active);
        if let Some(active) = active.as_mut().filter(|_| !self.is_paused()) {
            active.deliver_waiting(&mut lock(&self.engine));
        }
    }

    /// Returns true if the device is paused. Call this function while `active` is locked.
    fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Suppresses notifications of requests, and begins polling. Returns `None` if no driver is active, or the device is paused.
    pub(super) fn begin_polling(&self) -> Option<Watch> {
        let mut active = lock(&self.active);
        let active = active.as_mut().filter(|_| !self.is_paused())?;
        let requests = active.requests.as_mut()?;
        requests.suppress_notifications(&active.memory).ok()?;
        active.polled = true;
        active.contention.begin_polling(moment(requests));
        Some(Watch {
            number: active.number,
            memory: active.memory.clone(),
            interrupt: active.interrupt.clone(),
            index: requests.available_index(),
            next: requests.served_index(),
            poll_time: active.pace.poll_time(),
            served: Served::default(),
            steps_back: false,
        })
    }

    /// Serves the requests that `watch` sees. Returns false if polling must end: the driver is gone, or a request was interrupted.
    pub(super) fn serve_polled(&self, watch: &mut Watch) -> Result<bool, DeviceError> {
        let _operation = Operation::begin();
        let (mut active, late) = lock_or_wait(&self.active);
        let Some(active) = active.as_mut().filter(|active| active.number == watch.number) else { return Ok(false) };
        active.serve(REQUEST_QUEUE, &self.engine)?;
        watch.served = Served { late: late || active.served.late, ..active.served };
        let Some(requests) = active.requests.as_mut() else { return Ok(true) };
        watch.next = requests.served_index();
        if let Some((_, ended)) = watch.served.between {
            watch.steps_back = active.contention.polled(ended, watch.next, cpu_time);
        }
        if requests.is_interrupted() {
            // The VMM is about to pause or reset the device. `resume` finds the requests that are still in the queue.
            requests.resume_notifications(&active.memory)?;
            active.contention.end_polling(moment(requests));
            active.polled = false;
            return Ok(false);
        }
        Ok(true)
    }

    /// Asks the driver for notifications again, and ends polling. Returns true if the driver has added requests since the last check, so
    /// that polling must continue.
    pub(super) fn end_polling(&self, watch: &Watch) -> Result<bool, DeviceError> {
        let mut active = lock(&self.active);
        let Some(active) = active.as_mut().filter(|active| active.number == watch.number) else { return Ok(false) };
        let Some(requests) = active.requests.as_mut() else { return Ok(false) };
        if requests.resume_notifications(&active.memory)? {
            requests.suppress_notifications(&active.memory)?;
            return Ok(true);
        }
        active.contention.end_polling(moment(requests));
        active.polled = false;
        active.pace.restart();
        Ok(false)
    }
}

/// Returns the state of the calling thread, which polls `requests`.
fn moment(requests: &RequestQueue) -> Moment {
    Moment { now: Instant::now(), cpu: cpu_time(), position: requests.served_index() }
}

/// Locks `mutex`. Returns the guard, and true if another thread held the lock.
fn lock_or_wait<T>(mutex: &Mutex<T>) -> (MutexGuard<'_, T>, bool) {
    mutex.try_lock().map_or_else(|_| (lock(mutex), true), |guard| (guard, false))
}

impl Active {
    /// Returns true if exits are not known to be faster than polling. `fast` is true if the requests since the last call arrived so fast
    /// that polling would pay.
    fn may_poll(&mut self, fast: bool) -> bool {
        let position = self.requests.as_ref().map(RequestQueue::served_index);
        position.is_some_and(|position| self.contention.notified(Instant::now(), position, fast))
    }

    /// Serves a queue after a notification, or after polling has found requests. Afterwards, delivers faults if faults are pending or
    /// `queue` is the event queue.
    fn serve(&mut self, queue: u16, engine: &Mutex<Engine>) -> Result<(), DeviceError> {
        let (mut engine, late) = lock_or_wait(engine);
        if let (REQUEST_QUEUE, Some(requests)) = (queue, &mut self.requests) {
            let answered = requests.serve(&self.memory, &mut engine);
            self.served = Served { between: engine.served_between(), late };
            if answered? {
                self.interrupt.queue_used(REQUEST_QUEUE);
            }
        }
        if queue == EVENT_QUEUE || engine.has_faults() { self.deliver(&mut engine) } else { Ok(()) }
    }

    /// Asks for notifications again, and serves the requests in the queue. The queue size limits the number of requests that one call
    /// serves.
    fn drain(&mut self, engine: &Mutex<Engine>) -> Result<(), DeviceError> {
        let Some(requests) = &mut self.requests else { return Ok(()) };
        if requests.resume_notifications(&self.memory)? { self.serve(REQUEST_QUEUE, engine) } else { Ok(()) }
    }

    /// Delivers pending faults. If the delivery fails, this function only logs the error. The next notification fails for the same reason,
    /// and reports the error to the driver.
    fn deliver_waiting(&mut self, engine: &mut Engine) {
        if let Err(error) = self.deliver(engine) {
            debug!("{error}");
        }
    }

    fn deliver(&mut self, engine: &mut Engine) -> Result<(), DeviceError> {
        if let Some(events) = &mut self.events
            && deliver(events, &self.memory, engine)?
        {
            self.interrupt.queue_used(EVENT_QUEUE);
        }
        Ok(())
    }
}
