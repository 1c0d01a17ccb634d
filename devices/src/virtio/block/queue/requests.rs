// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The work of the thread that serves a queue.

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
use super::linger::Linger;
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

/// Requests that are read from the queue at a time.
const BATCH: usize = 16;
/// So many requests at a time are few.
const FEW: usize = 4;
/// Bytes of requests that are under way at a time, unless one alone has more: a pause waits for all of them.
const MOST_BYTES: u64 = 128 << 20;
/// How many looks at the queue are made between looks at the clock.
const LOOKS: u32 = 16;
/// How long answers wait for those of requests that are there already, so that the driver is told once.
const LONGEST_UNTOLD: Duration = Duration::from_micros(50);

/// The work of the thread that serves a queue.
pub(in crate::virtio::block) struct Requests {
    index: u16,
    queue: DeviceQueue,
    driver: Driver,
    disk: Arc<Disk>,
    /// Has a ring once the thread has begun.
    engine: Engine,
    /// Requests under way. The place of each is the number of its operations.
    flights: Vec<Option<Flight>>,
    /// As how many bytes each of them counts, and all of them.
    weights: Vec<u64>,
    weight: u64,
    /// The next request would be too much beside them.
    is_full: bool,
    /// Places without a request.
    free: Vec<usize>,
    /// How many of the requests under way write.
    writes: usize,
    /// What was read from the queue and is begun next, and what is given back next. Both keep their room.
    read: Vec<Request>,
    answers: Vec<Answer>,
    owner: Arc<Owner>,
    /// The driver knows no flushes, and relies on each write being durable.
    durable: bool,
    /// How long the limit on the rate holds the next request back.
    held: Option<Duration>,
    linger: Linger,
    coalescing: Coalescing,
    preemption: Preemption,
    /// Answers that the driver was not told of, and since when there are any.
    untold: u32,
    untold_since: Option<Instant>,
    failed: bool,
    throttle: Throttle,
}

impl Requests {
    /// # Errors
    /// The process can have no more descriptors.
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
            linger: Linger::default(),
            coalescing: Coalescing::default(),
            preemption: Preemption::default(),
            untold: 0,
            untold_since: None,
            failed: false,
            throttle: Throttle::default(),
        })
    }

    fn under_way(&self) -> usize {
        self.flights.len() - self.free.len()
    }

    /// Whether a request has to end before another can begin.
    fn has_no_room(&self) -> bool {
        self.is_full || self.free.is_empty()
    }

    /// Begins all requests that there are, and answers those that are done. The driver is asked to tell of more only when none is left.
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
            self.tell(any)?;
            if any {
                if self.linger.is_idle() {
                    self.linger.ended(Instant::now());
                }
                self.begin();
                self.submit()?;
                self.give_back()?;
            } else if self.held.is_some() || self.has_no_room() || !(self.came_soon(orders)? || self.more_came()?) {
                // Those that are held back, or have no room, have the thread woken by time, or by a request's end.
                break;
            }
        }
        self.tell(false)?;
        self.submit()
    }

    /// Tells the driver of answers, unless `more` requests are to be begun first: then it has the answers of several at a time, if
    /// these do not take long.
    fn tell(&mut self, more: bool) -> Result<(), DeviceError> {
        let Some(since) = self.untold_since else { return Ok(()) };
        if more && !self.is_untold_long(since.elapsed()) {
            return Ok(());
        }
        (self.untold, self.untold_since) = (0, None);
        if wants_interrupt(&mut self.queue, &self.driver.memory.view()).map_err(ring_error(self.index))? {
            self.driver.interrupt.queue_used(self.index);
        }
        Ok(())
    }

    /// Looks for more to do before the driver is told of answers, if that pays.
    fn more_to_coalesce(&mut self, orders: &Orders) -> Result<bool, DeviceError> {
        let Some(since) = self.untold_since else { return Ok(false) };
        let start = Instant::now();
        if self.held.is_some() || self.has_no_room() || self.is_copied_to() || self.is_untold_long(start - since) {
            return Ok(false);
        }
        let patience = self.coalescing.begin(self.untold);
        if patience.is_zero() {
            return Ok(false);
        }
        let came = self.look(orders, start, patience)?;
        if came {
            self.coalescing.came(start.elapsed());
        } else {
            self.coalescing.missed(self.untold);
        }
        Ok(came)
    }

    fn is_untold_long(&self, time: Duration) -> bool {
        time >= LONGEST_UNTOLD.max(self.coalescing.longest())
    }

    /// Whether a thread of io_uring's copies what is written to the page cache: it may need the CPU, and wakes this one.
    fn is_copied_to(&self) -> bool {
        self.writes > 0 && self.disk.image.is_cached()
    }

    /// Looks for more to do for a while, when the driver was told of all.
    fn came_soon(&mut self, orders: &Orders) -> Result<bool, DeviceError> {
        if self.is_copied_to() {
            return Ok(false);
        }
        let start = Instant::now();
        let patience = self.linger.begin(start);
        self.look(orders, start, patience)
    }

    /// Looks for requests, or ends of operations, from `start` on for this time. The driver is not asked to tell of them.
    fn look(&mut self, orders: &Orders, start: Instant, patience: Duration) -> Result<bool, DeviceError> {
        let memory = &self.driver.memory.view();
        while start.elapsed() < patience && !orders.call() {
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

    /// Reads requests that the driver has added, as many as there is room for and the limit on the rate lets pass. The one after them
    /// stays in the queue, as if the driver had not added it yet.
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

    /// Begins the requests that were read.
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

    /// Begins a request, beside which few others are begun and nothing is under way if they `are_few`; the answer, if there is one
    /// already.
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
                let number = self.free.pop().expect("no more requests are read than there is room for");
                self.flights[number] = Some(flight);
                self.weights[number] = weight;
                self.weight += weight;
                self.advance(number, Ok(()), are_few)
            }
        }
    }

    /// Goes on with a request whose last operation had this outcome; its answer, when it is done.
    fn advance(&mut self, number: usize, outcome: Result<(), Failure>, are_few: bool) -> Option<Answer> {
        let flight = self.flights.get_mut(number)?.as_mut()?;
        match outcome.and_then(|()| flight.next(&self.driver.memory)) {
            Ok(Some(op)) => {
                // SAFETY: What the operation uses belongs to the request, which stays until its end was told: `Drop` waits for
                // that too.
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
                        warn!("{}: the image: {error}{hint}; the request fails", self.disk.id);
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

    /// Goes on with requests whose operations have ended, and answers those that are done.
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

    /// Gives requests back to the driver that are answered.
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
        self.untold_since.get_or_insert_with(Instant::now);
        self.untold = self.untold.saturating_add(count);
        Ok(())
    }

    /// Has operations end whose memory is to be taken away.
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

    /// Ends what a device has under way that has failed.
    fn end(&mut self) -> Result<(), DeviceError> {
        self.cancel_unwanted();
        let submitted = self.submit();
        self.reap().and(submitted)
    }

    fn fail(&mut self, error: &DeviceError) {
        self.failed = true;
        self.driver.interrupt.failed(error);
    }

    /// Waits until nothing is under way.
    fn drain(&mut self) {
        while self.under_way() != 0 {
            self.cancel_unwanted();
            if let Err(error) = self.engine.submit(1) {
                warn!("{}: waiting for the image: {error}", self.disk.id);
                std::thread::sleep(KERNEL_AGAIN);
            }
            if let Err(error) = self.reap() {
                self.fail(&error);
            }
        }
        if !self.failed
            && let Err(error) = self.tell(false)
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
    /// Makes the ring. The thread cannot make another once its system calls are filtered.
    fn begin(&mut self) {
        let size = u16::try_from(self.flights.len()).unwrap_or(u16::MAX);
        self.engine = Engine::new(self.disk.image.clone(), size, self.disk.mode);
    }

    fn run(&mut self, orders: &Orders) -> Wait {
        // Requests of a device that has failed end all the same, but nobody is told.
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
    /// The kernel must be done with the guest's memory. Where the task ran in a thread, that has waited for it.
    fn drop(&mut self) {
        self.abandon();
    }
}
