// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The queues of a running driver in front of the engine: what vCPUs and the polling thread share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use iommu_bounce::{Engine, Histogram};
use log::debug;
use virtio_queue::Queue;
use vm_memory::{Bytes, GuestAddress};

use super::events::{EVENT_QUEUE, deliver};
use super::pace::Pace;
use super::requests::{REQUEST_QUEUE, RequestQueue};
use crate::patience::Operation;
use crate::ram::Ram;
use crate::sync::{lock, lock_soon};
use crate::virtio::{DeviceError, Driver, Interrupt, QueueState};

/// What a driver has set up.
struct Active {
    /// How many drivers came before.
    number: u64,
    memory: Arc<Ram>,
    requests: Option<RequestQueue>,
    events: Option<Queue>,
    interrupt: Arc<dyn Interrupt>,
    pace: Pace,
    /// The driver was asked for no notifications, because the polling thread watches the request queue.
    polled: bool,
    /// When requests were served last.
    served: Served,
}

/// When requests were served.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Served {
    /// When the first of a batch was begun, and the last one answered. `None` if there was none.
    pub(super) between: Option<(Instant, Instant)>,
    /// Another thread had the engine or the queue first.
    pub(super) late: bool,
}

/// The queues, if a driver has set any up, and the engine. Whoever holds the lock owns the queues.
pub(super) struct Queues {
    engine: Arc<Mutex<Engine>>,
    active: Mutex<Option<Active>>,
    /// How many drivers there have been.
    drivers: AtomicU64,
    /// The rings are left alone. Changed with `active` locked.
    paused: AtomicBool,
    /// Stalls: times without a CPU of the polling thread while requests came.
    stalls: Mutex<Histogram>,
}

/// Where the polling thread looks for requests, without a lock.
pub(super) struct Watch {
    number: u64,
    memory: Arc<Ram>,
    interrupt: Arc<dyn Interrupt>,
    index: GuestAddress,
    /// The available ring's index at which everything has been served.
    next: u16,
    patience: Duration,
    /// When the requests were served that were seen last.
    pub(super) served: Served,
}

impl Watch {
    /// Whether the driver has put requests into the queue since they were last served.
    pub(super) fn sees_requests(&self) -> bool {
        let index: Result<u16, _> = self.memory.load(self.index, Ordering::Acquire);
        // The ring was checked when the driver set it up.
        index.is_ok_and(|index| u16::from_le(index) != self.next)
    }

    /// For how long to go on without requests, as measured before polling began.
    pub(super) fn patience(&self) -> Duration {
        self.patience
    }

    /// Tells the driver that the device cannot go on.
    pub(super) fn fail(&self, error: &DeviceError) {
        self.interrupt.failed(error);
    }
}

impl Queues {
    /// No queues yet, in front of `engine`.
    pub(super) fn new(engine: Arc<Mutex<Engine>>) -> Self {
        Self {
            engine,
            active: Mutex::new(None),
            drivers: AtomicU64::new(0),
            paused: AtomicBool::new(false),
            stalls: Mutex::default(),
        }
    }

    /// The engine.
    pub(super) fn engine(&self) -> &Mutex<Engine> {
        &self.engine
    }

    /// Notes such a time.
    pub(super) fn note_stall(&self, time: Duration) {
        lock(&self.stalls).record(time);
    }

    /// Stalls: times without a CPU of the polling thread while requests came.
    pub(super) fn stalls(&self) -> Histogram {
        *lock(&self.stalls)
    }

    /// The same; `None` if another thread holds the lock.
    pub(super) fn stalls_soon(&self) -> Option<Histogram> {
        lock_soon(&self.stalls).map(|stalls| *stalls)
    }

    /// A driver, whose queues are to be started.
    pub(super) fn open(&self, driver: &Driver) {
        let number = self.drivers.fetch_add(1, Ordering::Relaxed);
        *lock(&self.active) = Some(Active {
            number,
            memory: driver.memory.ram().clone(),
            requests: None,
            events: None,
            interrupt: driver.interrupt.clone(),
            pace: Pace::default(),
            polled: false,
            served: Served::default(),
        });
    }

    /// A queue of the driver's.
    pub(super) fn start(&self, index: u16, queue: Queue) {
        if let Some(active) = lock(&self.active).as_mut() {
            match index {
                REQUEST_QUEUE => active.requests = Some(RequestQueue::new(queue)),
                EVENT_QUEUE => active.events = Some(queue),
                _ => {}
            }
        }
    }

    /// Lets go of a queue. When it returns, nobody touches it any more, the polling thread neither.
    pub(super) fn stop(&self, index: u16) -> Option<QueueState> {
        let mut active = lock(&self.active);
        let active = active.as_mut()?;
        match index {
            REQUEST_QUEUE => {
                // Who polls it sees another driver's number.
                active.number = self.drivers.fetch_add(1, Ordering::Relaxed);
                active.polled = false;
                active.requests.take().map(|requests| requests.state())
            }
            EVENT_QUEUE => active.events.take().map(|queue| QueueState::of(&queue)),
            _ => None,
        }
    }

    /// How far a queue is served.
    pub(super) fn state(&self, index: u16) -> Option<QueueState> {
        let active = lock(&self.active);
        let active = active.as_ref()?;
        match index {
            REQUEST_QUEUE => active.requests.as_ref().map(RequestQueue::state),
            EVENT_QUEUE => active.events.as_ref().map(QueueState::of),
            _ => None,
        }
    }

    /// Stops polling and serving until [`Self::resume`]. When it returns, the rings are left alone.
    ///
    /// Requests that the driver made before, and that the polling thread would have seen, are served first, up to one that was
    /// interrupted. vCPUs may run and make more; those wait.
    pub(super) fn pause(&self) {
        let mut active = lock(&self.active);
        self.paused.store(true, Ordering::Relaxed);
        let Some(active) = active.as_mut().filter(|active| active.polled) else { return };
        // Who polls sees another driver's number.
        active.number = self.drivers.fetch_add(1, Ordering::Relaxed);
        active.polled = false;
        active.pace.restart();
        if let Err(error) = active.drain(&self.engine) {
            debug!("{error}, found by polling");
            active.interrupt.failed(&error);
        }
    }

    /// Lets requests be served again, and hands over faults that came meanwhile. Returns true if requests wait that no notification
    /// will follow: their serving was interrupted, or they came during the pause.
    pub(super) fn resume(&self) -> bool {
        let mut active = lock(&self.active);
        self.paused.store(false, Ordering::Relaxed);
        if let Some(active) = active.as_mut() {
            active.deliver_waiting(&mut lock(&self.engine));
        }
        let requests = active.as_ref().and_then(|active| Some((active.requests.as_ref()?, &active.memory)));
        // Who serves a ring that is broken tells the driver.
        requests.is_some_and(|(requests, memory)| requests.has_requests(memory).unwrap_or(true))
    }

    /// Lets go of the queues. When it returns, nobody touches them any more, the polling thread neither.
    pub(super) fn close(&self) {
        *lock(&self.active) = None;
    }

    /// Serves what the driver has put into `queue`, after its notification; `true` if requests come so fast that polling
    /// for them pays.
    pub(super) fn notified(&self, queue: u16) -> Result<bool, DeviceError> {
        let mut active = lock(&self.active);
        let Some(active) = active.as_mut().filter(|_| !self.is_paused()) else { return Ok(false) };
        if queue != REQUEST_QUEUE || active.polled {
            return active.serve(queue, &self.engine).map(|()| false);
        }
        let mut pace = std::mem::take(&mut active.pace);
        let (served, pays) = pace.measure(|| active.serve(queue, &self.engine));
        active.pace = pace;
        served.map(|()| pays == Some(true))
    }

    /// Hands faults that were reported to the driver, as far as it has given buffers.
    pub(super) fn hand_over_faults(&self) {
        let mut active = lock(&self.active);
        if let Some(active) = active.as_mut().filter(|_| !self.is_paused()) {
            active.deliver_waiting(&mut lock(&self.engine));
        }
    }

    /// To be called with `active` locked.
    fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Asks the driver for no notifications of requests; `None` if there is no driver.
    pub(super) fn begin_polling(&self) -> Option<Watch> {
        let mut active = lock(&self.active);
        let active = active.as_mut().filter(|_| !self.is_paused())?;
        let requests = active.requests.as_mut()?;
        requests.suppress_notifications(&active.memory).ok()?;
        active.polled = true;
        Some(Watch {
            number: active.number,
            memory: active.memory.clone(),
            interrupt: active.interrupt.clone(),
            index: requests.available_index(),
            next: requests.served_index(),
            patience: active.pace.patience(),
            served: Served::default(),
        })
    }

    /// Serves what `watch` sees; `false` if its driver is gone.
    pub(super) fn serve_polled(&self, watch: &mut Watch) -> Result<bool, DeviceError> {
        let _operation = Operation::begin();
        let (mut active, late) = lock_or_wait(&self.active);
        let Some(active) = active.as_mut().filter(|active| active.number == watch.number) else { return Ok(false) };
        active.serve(REQUEST_QUEUE, &self.engine)?;
        watch.served = Served { late: late || active.served.late, ..active.served };
        let Some(requests) = active.requests.as_mut() else { return Ok(true) };
        watch.next = requests.served_index();
        if requests.is_interrupted() {
            // The device is about to be paused or reset. What is in the queue is served when it goes on.
            requests.resume_notifications(&active.memory)?;
            active.polled = false;
            return Ok(false);
        }
        Ok(true)
    }

    /// Has the driver notify again; `true` if requests came meanwhile, and polling must go on to serve them.
    pub(super) fn end_polling(&self, watch: &Watch) -> Result<bool, DeviceError> {
        let mut active = lock(&self.active);
        let Some(active) = active.as_mut().filter(|active| active.number == watch.number) else { return Ok(false) };
        let Some(requests) = active.requests.as_mut() else { return Ok(false) };
        if requests.resume_notifications(&active.memory)? {
            requests.suppress_notifications(&active.memory)?;
            return Ok(true);
        }
        active.polled = false;
        active.pace.restart();
        Ok(false)
    }
}

/// Locks, and says if another thread had the lock first.
fn lock_or_wait<T>(mutex: &Mutex<T>) -> (MutexGuard<'_, T>, bool) {
    mutex.try_lock().map_or_else(|_| (lock(mutex), true), |guard| (guard, false))
}

impl Active {
    /// Serves the request queue if `queue` is that one, and hands over faults, of which a request may have brought one
    /// about, as a buffer for them may have come.
    fn serve(&mut self, queue: u16, engine: &Mutex<Engine>) -> Result<(), DeviceError> {
        let (mut engine, late) = lock_or_wait(engine);
        if let (REQUEST_QUEUE, Some(requests)) = (queue, &mut self.requests) {
            let told = requests.serve(&self.memory, &mut engine);
            self.served = Served { between: engine.served_between(), late };
            if told? {
                self.interrupt.queue_used(REQUEST_QUEUE);
            }
        }
        if queue == EVENT_QUEUE || engine.has_faults() { self.deliver(&mut engine) } else { Ok(()) }
    }

    /// Serves what is in the request queue, at most as many requests as fit into it, and asks for notifications of the next one.
    fn drain(&mut self, engine: &Mutex<Engine>) -> Result<(), DeviceError> {
        let Some(requests) = &mut self.requests else { return Ok(()) };
        if requests.resume_notifications(&self.memory)? { self.serve(REQUEST_QUEUE, engine) } else { Ok(()) }
    }

    /// Hands over faults. If the queue is broken, the next notification fails for the same reason, and the driver is told then.
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
