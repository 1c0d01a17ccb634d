// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Test harness: a device with a driver that the test controls.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use virtio_queue::QueueT;
use vm_memory::{FileOffset, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::super::connection::Times;
use super::super::device::VhostUserDevice;
use super::super::error::ServerError;
use super::super::link::Address;
use super::super::model::Model;
use super::super::net::ServedNet;
use super::server::{Manner, Server};
use crate::dma::DeviceMemory;
use crate::ram::Ram;
use crate::sync::lock;
use crate::virtio::byte_driver::queue_at;
use crate::virtio::{DeviceError, Driver, Interrupt, VirtioDevice};

/// Size of a RAM region in bytes.
pub(super) const REGION: usize = 0x1_0000;
/// Addresses of the descriptor table, available ring and used ring of the first queue.
pub(super) const RINGS: [u64; 3] = [0x1000, 0x2000, 0x3000];

/// Interrupt implementation that records the notifications to the driver.
#[derive(Default)]
pub(super) struct InterruptRecord {
    /// Interrupt eventfds by queue. A queue whose index is beyond the end has no interrupt eventfd.
    pub(super) events: Vec<EventFd>,
    pub(super) used: AtomicU32,
    pub(super) changed: AtomicU32,
    pub(super) failures: Mutex<Vec<String>>,
}

impl InterruptRecord {
    pub(super) fn with_events(count: usize) -> Arc<Self> {
        let events = (0..count).map(|_| EventFd::new(EFD_NONBLOCK).unwrap()).collect();
        Arc::new(Self { events, ..Self::default() })
    }

    pub(super) fn failures(&self) -> Vec<String> {
        lock(&self.failures).clone()
    }
}

impl Interrupt for InterruptRecord {
    fn queue_used(&self, _: u16) {
        self.used.fetch_add(1, Ordering::SeqCst);
    }
    fn queue_event(&self, queue: u16) -> Option<EventFd> {
        self.events.get(usize::from(queue)).map(|event| event.try_clone().unwrap())
    }
    fn config_changed(&self, _: bool) {
        self.changed.fetch_add(1, Ordering::SeqCst);
    }
    fn failed(&self, error: &DeviceError) {
        lock(&self.failures).push(error.to_string());
    }
}

/// Waits until `what` returns true.
pub(super) fn wait(what: impl Fn() -> bool) {
    let start = Instant::now();
    while !what() {
        assert!(start.elapsed() < Duration::from_secs(60), "the condition is still false after 60 s");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns RAM with `regions` regions. Each region is backed by its own file, and a gap follows each region.
pub(super) fn ram(regions: u64) -> Arc<Ram> {
    let region = |number: u64| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(REGION as u64).unwrap();
        (GuestAddress(number * 2 * REGION as u64), REGION, Some(FileOffset::new(file, 0)))
    };
    Arc::new(Ram::from_ranges_with_files((0..regions).map(region)).unwrap())
}

/// Short time limits, for tests that wait until a limit is over. A correct server on a busy machine may exceed these limits.
pub(super) const TIMES: Times = Times { drain: Duration::from_millis(300), other: Duration::from_millis(200) };

/// Short time limit for an operation, with a budget that no test spends.
pub(super) const SHORT: Times = Times { drain: Duration::from_secs(20), other: Duration::from_millis(500) };

/// Returns the description of a file system with two queues.
pub(super) fn fs() -> Model {
    Model::fs("t", 1, 64)
}

/// Returns the description of a network card with `pairs` queue pairs.
pub(super) fn card(pairs: u16) -> Model {
    Model::net(&ServedNet { mac: [2; 6], mtu: None, pairs, queue_size: 64, csum: true, tso: true, uso: true })
}

/// Connects to the server of a device.
pub(super) fn connect(server: &Server, model: Model) -> Result<VhostUserDevice, ServerError> {
    connect_with(server, model, Times::default())
}

/// Connects to the server of a device, with the limits [`TIMES`].
pub(super) fn connect_briefly(server: &Server, model: Model) -> Result<VhostUserDevice, ServerError> {
    connect_with(server, model, TIMES)
}

/// Connects to the server of a device, with these time limits.
pub(super) fn connect_with(server: &Server, model: Model, times: Times) -> Result<VhostUserDevice, ServerError> {
    VhostUserDevice::connect(address(server, model, times), None)
}

/// Device with its server and a driver that is ready.
pub(super) struct Running {
    pub(super) server: Server,
    pub(super) device: VhostUserDevice,
    pub(super) ram: Arc<Ram>,
    pub(super) interrupts: Arc<InterruptRecord>,
}

impl Running {
    /// Returns a device of `model` whose driver has started the first `queues` queues. Each queue has an interrupt eventfd.
    pub(super) fn new(manner: Manner, model: Model, queues: u16) -> Self {
        Self::within(Times::default(), manner, model, queues)
    }

    /// Does the same as [`new`](Self::new), with the time limits [`TIMES`].
    pub(super) fn briefly(manner: Manner, model: Model, queues: u16) -> Self {
        Self::within(TIMES, manner, model, queues)
    }

    /// Does the same as [`new`](Self::new), with these time limits.
    pub(super) fn within(times: Times, manner: Manner, model: Model, queues: u16) -> Self {
        let server = Server::start(manner);
        let device = connect_with(&server, model, times).unwrap();
        let (ram, interrupts) = (ram(1), InterruptRecord::with_events(device.queue_sizes().len()));
        start(&device, &ram, &interrupts, queues);
        Self { server, device, ram, interrupts }
    }
}

/// Returns the address of a device's server.
pub(super) fn address(server: &Server, model: Model, times: Times) -> Address {
    Address::new("d".into(), server.socket(), model, times, false)
}

/// Activates the device and starts the first `queues` queues, as a driver that is ready does.
pub(super) fn start(device: &VhostUserDevice, ram: &Arc<Ram>, interrupts: &Arc<InterruptRecord>, queues: u16) {
    start_as(device, ram, interrupts, queues, device.features() | 1 << 32);
}

/// Does the same as [`start`], for a driver that accepted `features`.
pub(super) fn start_as(
    device: &VhostUserDevice,
    ram: &Arc<Ram>,
    interrupts: &Arc<InterruptRecord>,
    queues: u16,
    features: u64,
) {
    let memory = DeviceMemory::all_ram(ram.clone());
    device.activate(Driver { requests: Arc::default(), memory, interrupt: interrupts.clone(), features });
    for index in 0..queues {
        start_queue(device, index, 0);
    }
}

pub(super) fn start_queue(device: &VhostUserDevice, index: u16, next: u16) {
    let mut queue = queue_at(64, RINGS.map(|ring| ring + u64::from(index) * 0x4000));
    queue.set_next_avail(next);
    device.start_queue(index, queue).unwrap();
}

/// Stops the first `queues` queues and resets the device, as its driver does.
pub(super) fn reset(device: &VhostUserDevice, queues: u16) {
    for index in 0..queues {
        device.stop_queue(index);
    }
    device.reset();
}
