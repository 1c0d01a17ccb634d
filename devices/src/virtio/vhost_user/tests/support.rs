// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A device with a driver that a test plays.

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

/// Bytes of a region of RAM.
pub(super) const REGION: usize = 0x1_0000;
/// Where rings are: descriptors, available, used.
pub(super) const RINGS: [u64; 3] = [0x1000, 0x2000, 0x3000];

/// What a driver was told.
#[derive(Default)]
pub(super) struct Told {
    /// Events that are interrupts of a queue each, where there are any.
    pub(super) events: Vec<EventFd>,
    pub(super) used: AtomicU32,
    pub(super) changed: AtomicU32,
    pub(super) failures: Mutex<Vec<String>>,
}

impl Told {
    pub(super) fn with_events(count: usize) -> Arc<Self> {
        let events = (0..count).map(|_| EventFd::new(EFD_NONBLOCK).unwrap()).collect();
        Arc::new(Self { events, ..Self::default() })
    }

    pub(super) fn failures(&self) -> Vec<String> {
        lock(&self.failures).clone()
    }
}

impl Interrupt for Told {
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

/// Waits until `what` holds.
pub(super) fn wait(what: impl Fn() -> bool) {
    let start = Instant::now();
    while !what() {
        assert!(start.elapsed() < Duration::from_secs(60), "it did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// RAM of so many regions with room between them, each of a file.
pub(super) fn ram(regions: u64) -> Arc<Ram> {
    let region = |number: u64| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(REGION as u64).unwrap();
        (GuestAddress(number * 2 * REGION as u64), REGION, Some(FileOffset::new(file, 0)))
    };
    Arc::new(Ram::from_ranges_with_files((0..regions).map(region)).unwrap())
}

/// Times that a test can wait for, and that a server on a busy machine may not keep.
pub(super) const TIMES: Times = Times { drain: Duration::from_millis(300), other: Duration::from_millis(200) };

/// Little time for an operation, and a budget that no test spends.
pub(super) const SHORT: Times = Times { drain: Duration::from_secs(20), other: Duration::from_millis(500) };

/// A file system, whose driver knows two queues.
pub(super) fn fs() -> Model {
    Model::fs("t", 1, 64)
}

/// A network card of so many pairs of queues.
pub(super) fn card(pairs: u16) -> Model {
    Model::net(&ServedNet { mac: [2; 6], mtu: None, pairs, queue_size: 64, csum: true, tso: true, uso: true })
}

/// Connects to the server of a device.
pub(super) fn connect(server: &Server, model: Model) -> Result<VhostUserDevice, ServerError> {
    connect_with(server, model, Times::default())
}

/// The same, to one that has [`TIMES`] only.
pub(super) fn connect_briefly(server: &Server, model: Model) -> Result<VhostUserDevice, ServerError> {
    connect_with(server, model, TIMES)
}

/// The same, to one that has these times.
pub(super) fn connect_with(server: &Server, model: Model, times: Times) -> Result<VhostUserDevice, ServerError> {
    VhostUserDevice::connect(address(server, model, times), None)
}

/// A device with its server and a driver that is ready.
pub(super) struct Running {
    pub(super) server: Server,
    pub(super) device: VhostUserDevice,
    pub(super) ram: Arc<Ram>,
    pub(super) told: Arc<Told>,
}

impl Running {
    /// A device of `model` whose driver has started the first `queues` queues. Each queue has an interrupt.
    pub(super) fn new(manner: Manner, model: Model, queues: u16) -> Self {
        Self::within(Times::default(), manner, model, queues)
    }

    /// The same, with a server that has [`TIMES`] only.
    pub(super) fn briefly(manner: Manner, model: Model, queues: u16) -> Self {
        Self::within(TIMES, manner, model, queues)
    }

    /// The same, with a server that has these times.
    pub(super) fn within(times: Times, manner: Manner, model: Model, queues: u16) -> Self {
        let server = Server::start(manner);
        let device = connect_with(&server, model, times).unwrap();
        let (ram, told) = (ram(1), Told::with_events(device.queue_sizes().len()));
        start(&device, &ram, &told, queues);
        Self { server, device, ram, told }
    }
}

/// Where the server of a device is, and what it has.
pub(super) fn address(server: &Server, model: Model, times: Times) -> Address {
    Address::new("d".into(), server.socket(), model, times, false)
}

/// As a driver that is ready does: it activates the device and starts queues up to `queues`.
pub(super) fn start(device: &VhostUserDevice, ram: &Arc<Ram>, told: &Arc<Told>, queues: u16) {
    start_as(device, ram, told, queues, device.features() | 1 << 32);
}

/// The same for a driver that accepted `features`.
pub(super) fn start_as(device: &VhostUserDevice, ram: &Arc<Ram>, told: &Arc<Told>, queues: u16, features: u64) {
    let memory = DeviceMemory::all_ram(ram.clone());
    device.activate(Driver { requests: Arc::default(), memory, interrupt: told.clone(), features });
    for index in 0..queues {
        start_queue(device, index, 0);
    }
}

pub(super) fn start_queue(device: &VhostUserDevice, index: u16, next: u16) {
    let mut queue = queue_at(64, RINGS.map(|ring| ring + u64::from(index) * 0x4000));
    queue.set_next_avail(next);
    device.start_queue(index, queue).unwrap();
}

/// As a driver that resets the device does.
pub(super) fn reset(device: &VhostUserDevice, queues: u16) {
    for index in 0..queues {
        device.stop_queue(index);
    }
    device.reset();
}
