// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the device with its transport: the server has the queues only while the function may use the bus.

use std::sync::Arc;

use super::super::device::VhostUserDevice;
use super::super::model::Model;
use super::server::request::*;
use super::server::{Asked, Manner, Server};
use super::support::{RINGS, card, connect, fs, ram, wait};
use crate::dma::DeviceMemory;
use crate::pci::PciDevice;
use crate::virtio::byte_driver::set_up;
use crate::virtio::test_support::{FakeDoorbells, FakeMsi, set_bus_master};
use crate::virtio::{VirtioDevice, VirtioPciDevice, VirtioPciParams};

/// Creates the PCI function of a device, and initializes the device as a driver with two queues does.
fn started(device: Arc<VhostUserDevice>) -> VirtioPciDevice {
    let features = device.features();
    let params = VirtioPciParams {
        id: "d".into(),
        device,
        memory: DeviceMemory::all_ram(ram(1)),
        msi: Arc::new(FakeMsi::default()),
        doorbells: Some(Arc::new(FakeDoorbells::default())),
        observer: None,
    };
    let function = VirtioPciDevice::new(params).unwrap();
    set_bus_master(&function, true);
    let rings = |queue: u16| RINGS.map(|ring| ring + 0x4000 * u64::from(queue));
    assert!(set_up(&function, features, [0, 1].map(|queue| (queue, 64, rings(queue)))), "features are accepted");
    function
}

/// Returns the number of requests of this kind.
fn count(asked: &[Asked], request: u32) -> usize {
    asked.iter().filter(|one| one.request == request).count()
}

fn server_has_the_queues_while_on_the_bus(model: impl Fn() -> Model) {
    let server = Server::start(Manner::default());
    let device = Arc::new(connect(&server, model()).unwrap());
    let function = started(device.clone());
    assert_eq!(count(&server.take(), SET_VRING_KICK), 2);
    set_bus_master(&function, false);
    assert_eq!(count(&server.take(), GET_VRING_BASE), 2, "the queues were stopped before the write returned");
    // A server that connects while bus mastering is off gets no queue.
    server.close();
    wait(|| device.counters().server_losses == 1);
    server.listen(Manner::default());
    wait(|| device.counters().server_connections == 2);
    assert_eq!(count(&server.wait_for(SET_MEM_TABLE), SET_VRING_KICK), 0);
    // A pause and a resume of the VM do not give the server a queue either.
    function.pause();
    function.resume();
    assert_eq!(count(&server.take(), SET_VRING_KICK), 0);
    set_bus_master(&function, true);
    assert_eq!(count(&server.take(), SET_VRING_KICK), 2);
    let mut status = [0];
    function.read_bar(0, 20, &mut status);
    assert_eq!(status, [15]);
}

#[test]
fn server_of_a_card_has_queues_only_as_bus_master() {
    server_has_the_queues_while_on_the_bus(|| card(1));
}

#[test]
fn server_of_a_file_system_has_queues_only_as_bus_master() {
    server_has_the_queues_while_on_the_bus(fs);
}
