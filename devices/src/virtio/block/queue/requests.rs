// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Main loop of the thread that serves a queue.

use std::hint::spin_loop;
use std::num::Wrapping;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{io, mem};

use log::warn;
use virtio_queue::{Queue, QueueT};
use vm_memory::Bytes;
use vmm_sys_util::eventfd::EventFd;

use super::coalescing::Coalescing;
use super::flight::{Answer, Flight};
use super::idle_poll::IdlePoll;
use super::preemption::Preemption;
use super::prepare::{Prepared, prepare};
use super::request::{self, Request};
use super::transfer::Failure;
use crate::counters::count;
use crate::file_size;
use crate::throttle::Throttle;
use crate::virtio::block::disk::{Disk, Owner};
use crate::virtio::block::io::engine::{Engine, IoMode};
use crate::virtio::block::io::ring::KERNEL_AGAIN;
use crate::virtio::block::spec::{feature, status};
use crate::virtio::chain::{OUTSIDE, broken, ring_error};
use crate::virtio::notification::{more_came, outstanding, wants_interrupt};
use crate::virtio::queue::DeviceQueue;
use crate::virtio::queue_worker::QueueTask;
use crate::virtio::{DeviceError, Driver, QueueState};
use crate::worker::{Orders, Task, Wait};

/// Maximum number of requests that are read from the queue at a time.
const BATCH: usize = 16;
/// Maximum number of requests that start together and still count as few requests.
const FEW: usize = 4;
/// Maximum total bytes of the requests under way. The limit keeps pauses short, because a pause waits for all these requests. A single
/// request may be larger.
const MOST_BYTES: u64 = 128 << 20;
/// Number of checks of the queue between two reads of the clock.
const LOOKS: u32 = 16;
/// Maximum time that the thread postpones the notification of answers while it starts requests that are already in the queue. A postponed
/// notification can cover several answers. Coalescing can extend this time.
const LONGEST_UNNOTIFIED: Duration = Duration::from_micros(50);

/// Task of the thread that serves a queue.
pub(in crate::virtio::block) struct Requests {
    index: u16,
    queue: DeviceQueue,
    driver: Driver,
    disk: Arc<Disk>,
    /// I/O engine. Until the thread has started, the engine has no io_uring ring.
    engine: Engine,
    /// Requests under way. The engine identifies the operations of a request by the request's index in this list.
    flights: Vec<Option<Flight>>,
    /// Weight of each request in `flights` (`weights`), and total weight of the requests under way (`weight`), in bytes.
    weights: Vec<u64>,
    weight: u64,
    /// True if the next request would exceed the limit on bytes under way.
    is_full: bool,
    /// Free indices of `flights`.
    free: Vec<usize>,
    /// Number of write requests under way.
    writes: usize,
    /// Requests that the thread has read from the queue and starts next (`read`), and answers that the thread returns next (`answers`).
    /// Both vectors keep their capacity when they are empty.
    read: Vec<Request>,
    answers: Vec<Answer>,
    owner: Arc<Owner>,
    /// True if each write must be durable when it completes, because the driver has not accepted the flush feature.
    durable: bool,
    /// Time for which the rate limit delays the next request.
    held: Option<Duration>,
    idle_poll: IdlePoll,
    coalescing: Coalescing,
    preemption: Preemption,
    /// Number of returned answers that the driver was not notified of yet (`unnotified`), and the time when the first of these answers was
    /// returned (`unnotified_since`).
    unnotified: u32,
    unnotified_since: Option<Instant>,
    failed: bool,
    throttle: Throttle,
}

impl Requests {
    /// # Errors
    /// The process has no free file descriptor.
    pub(in crate::virtio::block) fn new(
        index: u16,
        queue: Queue,
        driver: Driver,
        disk: Arc<Disk>,
        doorbell: &EventFd,
    ) -> io::Result<Self> {
        let places = usize::from(queue.size());
        let owner = Owner::new(index, driver.interrupt.clone(), doorbell.try_clone()?);
        Ok(Self {
            index,
            engine: Engine::new(disk.image.clone(), 0, IoMode::Plain),
            durable: driver.features & feature::FLUSH == 0,
            queue: DeviceQueue::new(index, queue, &driver),
            driver,
            disk,
            flights: (0..places).map(|_| None).collect(),
            weights: vec![0; places],
            weight: 0,
            is_full: false,
            free: (0..places).rev().collect(),
            writes: 0,
            read: Vec::with_capacity(BATCH),
            answers: Vec::with_capacity(places),
            owner: Arc::new(owner),
            held: None,
            idle_poll: IdlePoll::default(),
            coalescing: Coalescing::default(),
            preemption: Preemption::default(),
            unnotified: 0,
            unnotified_since: None,
            failed: false,
            throttle: Throttle::default(),
        })
    }

    fn under_way(&self) -> usize {
        self.flights.len() - self.free.len()
    }

    /// Returns true if a request has to end before another request can start.
    fn has_no_room(&self) -> bool {
        self.is_full || self.free.is_empty()
    }

    /// Starts all requests in the queue, and answers the requests that are complete. Asks the driver for notifications only when the queue
    /// is empty.
    fn serve(&mut self, orders: &Orders) -> Result<(), DeviceError> {
        let outstanding = outstanding(&self.queue, &self.driver.memory.view()).map_err(ring_error(self.index))?;
        self.preemption.woken(outstanding);
        loop {
            self.cancel_unwanted();
            self.reap()?;
            if orders.call() {
                break;
            }
            self.pop()?;
            let any = !self.read.is_empty();
            if !any && self.more_to_coalesce(orders)? {
                continue;
            }
            self.notify(any)?;
            if any {
                if self.idle_poll.is_idle() {
                    self.idle_poll.ended(Instant::now());
                }
                self.begin();
                self.submit()?;
                self.give_back()?;
            } else if self.held.is_some() || self.has_no_room() || !(self.came_soon(orders)? || self.more_came()?) {
                // The thread now sleeps. The doorbell, the rate limit's timer, or the end of a request wakes it.
                break;
            }
        }
        self.notify(false)?;
        self.submit()
    }

    /// Notifies the driver of answers. If `more` is true, further requests are about to start. The notification is then postponed, unless
    /// answers have already waited too long.
    fn notify(&mut self, more: bool) -> Result<(), DeviceError> {
        let Some(since) = self.unnotified_since else { return Ok(()) };
        if more && !self.is_unnotified_long(since.elapsed()) {
            return Ok(());
        }
        (self.unnotified, self.unnotified_since) = (0, None);
        if wants_interrupt(&mut self.queue, &self.driver.memory.view()).map_err(ring_error(self.index))? {
            self.driver.interrupt.queue_used(self.index);
        }
        Ok(())
    }

    /// Polls for more work before the driver is notified of answers, if coalescing expects more requests. Returns true if there is more
    /// work.
    fn more_to_coalesce(&mut self, orders: &Orders) -> Result<bool, DeviceError> {
        let Some(since) = self.unnotified_since else { return Ok(false) };
        let start = Instant::now();
        if self.held.is_some() || self.has_no_room() || self.is_copied_to() || self.is_unnotified_long(start - since) {
            return Ok(false);
        }
        let poll_time = self.coalescing.begin(self.unnotified);
        if poll_time.is_zero() {
            return Ok(false);
        }
        let came = self.look(orders, start, poll_time)?;
        if came {
            self.coalescing.came(start.elapsed());
        } else {
            self.coalescing.missed(self.unnotified);
        }
        Ok(came)
    }

    fn is_unnotified_long(&self, time: Duration) -> bool {
        time >= LONGEST_UNNOTIFIED.max(self.coalescing.longest())
    }

    /// Returns true if a kernel thread of io_uring may be copying written data to the page cache. In this case, this thread does not poll,
    /// because the kernel thread may need this CPU. The kernel thread wakes this thread at the end of the copy.
    fn is_copied_to(&self) -> bool {
        self.writes > 0 && self.disk.image.is_cached()
    }

    /// Polls for more work for a while, after the driver was notified of all answers. Returns true if there is more work.
    fn came_soon(&mut self, orders: &Orders) -> Result<bool, DeviceError> {
        if self.is_copied_to() {
            return Ok(false);
        }
        let start = Instant::now();
        let poll_time = self.idle_poll.begin(start);
        self.look(orders, start, poll_time)
    }

    /// Polls for new requests and for operations that have ended, until `poll_time` after `start`. Returns true if there is a new request
    /// or an ended operation. Does not ask the driver for notifications.
    fn look(&mut self, orders: &Orders, start: Instant, poll_time: Duration) -> Result<bool, DeviceError> {
        let memory = &self.driver.memory.view();
        while start.elapsed() < poll_time && !orders.call() {
            for _ in 0..LOOKS {
                let available = self.queue.avail_idx(memory, Ordering::Acquire).map_err(ring_error(self.index))?;
                if available != Wrapping(self.queue.next_avail()) || self.engine.has_ended() {
                    return Ok(true);
                }
                spin_loop();
            }
        }
        Ok(false)
    }

    fn more_came(&self) -> Result<bool, DeviceError> {
        more_came(&self.queue, &self.driver.memory.view()).map_err(ring_error(self.index))
    }

    fn submit(&mut self) -> Result<(), DeviceError> {
        let queue = self.index;
        self.engine.submit(0).map_err(|source| DeviceError::Io { queue, source })
    }

    /// Reads at most [`BATCH`] requests from the queue, and not more than `flights` has free indices. A request that exceeds the rate limit
    /// or the limit on bytes stays in the queue, as if the driver had not added the request yet.
    fn pop(&mut self) -> Result<(), DeviceError> {
        (self.held, self.is_full) = (None, false);
        let most = self.free.len().min(BATCH);
        if most == 0 {
            return Ok(());
        }
        let memory = &self.driver.memory.view();
        let size = self.queue.size();
        let ring = ring_error(self.index);
        let mut weight = self.weight;
        while self.read.len() < most
            && let Some(chain) = self.queue.next_chain(memory).map_err(&ring)?
        {
            let request = request::read(chain, memory, size).map_err(broken(self.index))?;
            weight += request.weight();
            if weight > MOST_BYTES && weight != request.weight() {
                self.queue.put_back(1);
                self.is_full = true;
                break;
            }
            if let Some(limiter) = &self.disk.limiter
                && let Err(wait) = limiter.pass(request.bytes(), Instant::now())
            {
                self.queue.put_back(1);
                count(&self.disk.counts.rate_waits, 1);
                self.held = Some(wait);
                break;
            }
            self.queue.note(request.head, request.noted());
            self.read.push(request);
        }
        Ok(())
    }

    /// Starts the requests that were read from the queue.
    fn begin(&mut self) {
        let mut read = mem::take(&mut self.read);
        let are_few = read.len() <= FEW && self.under_way() == 0;
        for request in read.drain(..) {
            if let Some(answer) = self.start(request, are_few) {
                self.answers.push(answer);
            }
        }
        self.read = read;
    }

    /// Starts a request. If the request is already complete, returns the request's answer. `are_few` is true if few requests start now and
    /// no request is under way.
    fn start(&mut self, request: Request, are_few: bool) -> Option<Answer> {
        let (head, place, weight) = (request.head, request.status, request.weight());
        match prepare(request, &self.disk, &self.driver.memory, &self.owner, self.durable) {
            Prepared::Answered { status: code, used } => {
                if code != status::OK {
                    count(&self.disk.counts.errors, 1);
                }
                Some(Answer { head, place, status: code, used })
            }
            Prepared::UnderWay(flight) => {
                self.writes += usize::from(flight.is_write());
                let number = self.free.pop().expect("`pop` reads no more requests than there are free indices");
                self.flights[number] = Some(flight);
                self.weights[number] = weight;
                self.weight += weight;
                self.advance(number, Ok(()), are_few)
            }
        }
    }

    /// Starts the next operation of the request at index `number`. `outcome` is the result of the last operation. Returns the answer if the
    /// request is complete.
    fn advance(&mut self, number: usize, outcome: Result<(), Failure>, are_few: bool) -> Option<Answer> {
        let flight = self.flights.get_mut(number)?.as_mut()?;
        match outcome.and_then(|()| flight.next(&self.driver.memory)) {
            Ok(Some(op)) => {
                // SAFETY: The memory that the operation uses belongs to the request, and the request is kept until the operation's end is
                // returned. `Drop` also waits for that end.
                unsafe { self.engine.begin(number as u64, &op, are_few) };
                None
            }
            outcome => {
                let outcome = outcome.map(drop);
                if let Err(Failure::Host(error)) = outcome {
                    flight.report(error);
                    if self.throttle.pass() {
                        let error = io::Error::from_raw_os_error(error);
                        let hint = file_size::hint(&error);
                        warn!(
                            "{}: a request to the image failed: {error}{hint}; the guest sees an I/O error",
                            self.disk.id
                        );
                    }
                }
                self.writes -= usize::from(flight.is_write());
                let answer = flight.answer(outcome, &self.disk.counts);
                self.flights[number] = None;
                self.weight -= self.weights[number];
                self.free.push(number);
                Some(answer)
            }
        }
    }

    /// Continues requests whose operations have ended, and answers the requests that are complete.
    fn reap(&mut self) -> Result<(), DeviceError> {
        while let Some(ended) = self.engine.next_ended() {
            let number = usize::try_from(ended.number).unwrap_or(usize::MAX);
            let Some(Some(flight)) = self.flights.get_mut(number) else { continue };
            let outcome = flight.ended(ended.result, &self.driver.memory);
            if let Some(answer) = self.advance(number, outcome, false) {
                self.answers.push(answer);
            }
        }
        self.submit()?;
        self.give_back()
    }

    /// Returns the answered requests to the driver.
    fn give_back(&mut self) -> Result<(), DeviceError> {
        if self.failed {
            self.answers.clear();
        }
        if self.answers.is_empty() {
            return Ok(());
        }
        let memory = &self.driver.memory.view();
        let ring = ring_error(self.index);
        let count = u32::try_from(self.answers.len()).unwrap_or(u32::MAX);
        for Answer { head, place, status, used } in self.answers.drain(..) {
            memory.write_obj(status, place).map_err(|_| broken(self.index)(OUTSIDE))?;
            self.queue.note_status(head, status);
            self.queue.add_used(memory, head, used).map_err(&ring)?;
        }
        self.unnotified_since.get_or_insert_with(Instant::now);
        self.unnotified = self.unnotified.saturating_add(count);
        Ok(())
    }

    /// Cancels the operations whose guest memory is about to be unmapped.
    fn cancel_unwanted(&mut self) {
        let unwanted = self.owner.take_unwanted();
        if unwanted.is_empty() {
            return;
        }
        for (number, flight) in (0..).zip(&mut self.flights) {
            if let Some(flight) = flight
                && unwanted.iter().any(|unwanted| flight.is(*unwanted))
            {
                flight.cancel();
                self.engine.cancel(number);
            }
        }
    }

    /// Continues the requests of a failed device until they end. Starts no new requests.
    fn end(&mut self) -> Result<(), DeviceError> {
        self.cancel_unwanted();
        let submitted = self.submit();
        self.reap().and(submitted)
    }

    fn fail(&mut self, error: &DeviceError) {
        self.failed = true;
        self.driver.interrupt.failed(error);
    }

    /// Waits until no request is under way.
    fn drain(&mut self) {
        while self.under_way() != 0 {
            self.cancel_unwanted();
            if let Err(error) = self.engine.submit(1) {
                warn!("{}: cannot wait for operations on the image: {error}; retrying", self.disk.id);
                std::thread::sleep(KERNEL_AGAIN);
            }
            if let Err(error) = self.reap() {
                self.fail(&error);
            }
        }
        if !self.failed
            && let Err(error) = self.notify(false)
        {
            self.fail(&error);
        }
    }
}

impl QueueTask for Requests {
    fn state(&self, _: u16) -> Option<QueueState> {
        Some(QueueState::of(&self.queue))
    }
}

impl Task for Requests {
    /// Creates the io_uring ring. The thread cannot create the ring later, because the thread's system calls are then filtered.
    fn begin(&mut self) {
        let size = u16::try_from(self.flights.len()).unwrap_or(u16::MAX);
        self.engine = Engine::new(self.disk.image.clone(), size, self.disk.mode);
    }

    fn run(&mut self, orders: &Orders) -> Wait {
        // Requests of a failed device still end, but the driver is not notified.
        let served = if self.failed { self.end() } else { self.serve(orders) };
        if let Err(error) = served {
            self.fail(&error);
        }
        let held = self.held.filter(|_| !self.failed);
        if self.engine.has_unsubmitted() {
            Wait::Time(held.map_or(KERNEL_AGAIN, |held| held.min(KERNEL_AGAIN)))
        } else if self.under_way() != 0 {
            held.map_or(Wait::Source, Wait::SourceOrTime)
        } else {
            held.map_or(Wait::Doorbell, Wait::Time)
        }
    }

    fn settle(&mut self) {
        self.drain();
    }

    fn source(&self) -> Option<BorrowedFd<'_>> {
        self.engine.source()
    }

    fn panicked(&self) {
        self.driver.interrupt.failed(&DeviceError::Panicked { queue: self.index });
    }

    fn abandon(&mut self) {
        self.failed = true;
        self.drain();
    }
}

impl Drop for Requests {
    /// Waits until the kernel no longer uses the guest's memory. If the task ran in a thread, `abandon` or `settle` has already waited.
    fn drop(&mut self) {
        self.abandon();
    }
}
