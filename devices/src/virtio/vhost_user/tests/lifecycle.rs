// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the requests that the front end sends to a server, from the activation to the reset of the device.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::server::request::*;
use super::server::{Asked, MEM_SLOTS, Manner, REPLY_ACK, Server};
use super::support::{InterruptRecord, REGION, RINGS, Running, connect, fs, ram, reset, start, start_queue, wait};
use crate::state::StateError;
use crate::virtio::{QueueState, VirtioDevice};

/// Writes an eventfd that the server received.
fn ring(event: &OwnedFd) {
    rustix::io::write(event, &1u64.to_ne_bytes()).unwrap();
}

/// Reads an eventfd that the server received. Returns true if the eventfd was written since the last read.
fn was_rung(event: &OwnedFd) -> bool {
    rustix::io::read(event, &mut [0; 8]).is_ok()
}

fn of(asked: &[Asked], request: u32) -> Vec<&Asked> {
    asked.iter().filter(|one| one.request == request).collect()
}

/// Requests that set up a queue.
const QUEUE: [u32; 7] =
    [SET_VRING_NUM, SET_VRING_BASE, SET_VRING_ADDR, SET_VRING_CALL, SET_VRING_ERR, SET_VRING_KICK, SET_VRING_ENABLE];

#[test]
fn server_gets_memory_and_queues_only_on_activation() {
    let server = Server::start(Manner::default());
    let device = connect(&server, fs()).unwrap();
    let first =
        [SET_OWNER, GET_FEATURES, GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_MAX_MEM_SLOTS];
    assert_eq!(server.requests(), first);
    assert_eq!((device.properties().device_type, device.features()), (26, 1 << 28 | 1 << 29));
    let mut tag = [0; 4];
    device.read_config(0, &mut tag);
    assert_eq!(&tag, b"t\0\0\0");

    let interrupts = InterruptRecord::with_events(2);
    start(&device, &ram(2), &interrupts, 2);
    let asked = server.take();
    let numbers: Vec<u32> = asked.iter().map(|one| one.request).collect();
    assert_eq!(numbers, [&[SET_FEATURES, SET_MEM_TABLE], QUEUE.as_slice(), &QUEUE].concat());
    assert_eq!(asked[0].number(0), 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28);
    // The memory table contains guest-physical addresses, not addresses of this process.
    let table = &asked[1];
    assert_eq!((table.payload[0], table.files.len()), (2, 2));
    let second: Vec<u64> = (0..4).map(|field| table.number(8 + 32 + 8 * field)).collect();
    assert_eq!(second, [2 * REGION as u64, REGION as u64, 2 * REGION as u64, 0]);
    let addresses = of(&asked, SET_VRING_ADDR)[0];
    assert_eq!([8, 16, 24].map(|place| addresses.number(place)), [RINGS[0], RINGS[2], RINGS[1]]);
    assert!(interrupts.failures().is_empty());
}

#[test]
fn kick_and_call_bypass_the_front_end() {
    let Running { server, device, interrupts, .. } = Running::new(Manner::default(), fs(), 2);
    let asked = server.take();
    let kick = &of(&asked, SET_VRING_KICK)[1].files[0];
    // The front end notifies the server once at the start of the queue, for buffers that were added earlier.
    wait(|| was_rung(kick));
    device.doorbell(1).unwrap().write(1).unwrap();
    assert!(was_rung(kick) && !was_rung(kick));
    device.notify(1).unwrap();
    // A notification by a vCPU writes the same eventfd.
    wait(|| was_rung(kick));
    ring(&of(&asked, SET_VRING_CALL)[1].files[0]);
    assert_eq!(interrupts.events[1].read().unwrap(), 1);
    assert_eq!(interrupts.used.load(Ordering::SeqCst), 0);
}

#[test]
fn front_end_interrupts_a_driver_without_interrupt_eventfds() {
    let server = Server::start(Manner::default());
    let device = connect(&server, fs()).unwrap();
    let interrupts = InterruptRecord::with_events(0);
    start(&device, &ram(1), &interrupts, 2);
    ring(&of(&server.take(), SET_VRING_CALL)[0].files[0]);
    wait(|| interrupts.used.load(Ordering::SeqCst) == 1);
}

#[test]
fn error_of_a_queue_fails_the_device() {
    let Running { server, device: _device, interrupts, .. } = Running::new(Manner::default(), fs(), 2);
    ring(&of(&server.take(), SET_VRING_ERR)[0].files[0]);
    wait(|| !interrupts.failures().is_empty());
    assert_eq!(interrupts.failures(), ["the vhost-user server reported an error in a queue"]);
}

#[test]
fn paused_device_stops_its_queues_and_resumes_at_their_base() {
    let Running { server, device, ram, .. } = Running::new(Manner { base: 7, ..Manner::default() }, fs(), 1);
    server.take();
    ram.write_obj(5u16, GuestAddress(RINGS[2] + 2)).unwrap();
    device.pause();
    assert_eq!(server.requests(), [SET_VRING_ENABLE, GET_VRING_BASE]);
    assert_eq!(device.queue_state(0), Some(QueueState { next_avail: 7, next_used: 5 }));
    assert_eq!(device.queue_state(1), None);
    start_queue(&device, 1, 0);
    assert!(server.requests().is_empty(), "the device is paused");
    device.resume();
    let asked = server.take();
    assert_eq!(of(&asked, SET_VRING_BASE)[0].payload, [0u32, 7].map(u32::to_le_bytes).concat());
    assert_eq!(of(&asked, SET_VRING_ENABLE).len(), 2);
    assert!(matches!(device.save(), Err(StateError::Unsupported(_))));
}

#[test]
fn reset_takes_all_queues_and_the_next_driver_starts_anew() {
    let Running { server, device, ram, interrupts } = Running::new(Manner { base: 7, ..Manner::default() }, fs(), 2);
    server.take();
    reset(&device, 2);
    let stop = [SET_VRING_ENABLE, GET_VRING_BASE];
    assert_eq!(server.requests(), [stop, stop].concat());
    start(&device, &ram, &interrupts, 2);
    let asked = server.take();
    assert_eq!(of(&asked, SET_VRING_BASE)[1].payload, [1u32, 0].map(u32::to_le_bytes).concat());
    assert!(interrupts.failures().is_empty());
    drop(device);
    assert!(server.requests().is_empty(), "the end of the device only closes the socket");
}

#[test]
fn added_ram_is_sent_once_and_only_while_a_driver_runs() {
    let server = Server::start(Manner::default());
    let device = connect(&server, fs()).unwrap();
    let (ram, interrupts) = (ram(1), InterruptRecord::with_events(2));
    let more = super::support::ram(3);
    let late = more.iter().last().unwrap();
    server.take();
    device.add_ram(late).unwrap();
    assert!(server.requests().is_empty(), "without a driver the server gets no memory");
    start(&device, &ram, &interrupts, 1);
    server.take();
    device.add_ram(ram.iter().next().unwrap()).unwrap();
    assert!(server.requests().is_empty(), "the server has this region already");
    device.add_ram(late).unwrap();
    let asked = server.take();
    assert_eq!((asked.len(), asked[0].request, asked[0].files.len()), (1, ADD_MEM_REG, 1));
    assert_eq!(asked[0].number(8), late.start_addr().0);
    device.take_ram(late);
    assert_eq!(server.requests(), [REM_MEM_REG]);
}

#[test]
fn queues_stop_for_a_new_memory_table_without_add_mem_reg() {
    let manner = Manner { protocol: REPLY_ACK, ..Manner::default() };
    let Running { server, device, .. } = Running::new(manner, fs(), 1);
    server.take();
    device.add_ram(ram(3).iter().last().unwrap()).unwrap();
    let asked = server.take();
    let numbers: Vec<u32> = asked.iter().map(|one| one.request).collect();
    assert_eq!(numbers, [[SET_VRING_ENABLE, GET_VRING_BASE, SET_MEM_TABLE].as_slice(), &QUEUE].concat());
    assert_eq!((asked[2].payload[0], asked[2].files.len()), (2, 2));
}

#[test]
fn regions_beyond_the_server_limit_are_refused() {
    let server = Server::start(Manner { regions: 2, ..Manner::default() });
    let device = connect(&server, fs()).unwrap();
    let (ram, interrupts) = (ram(2), InterruptRecord::with_events(2));
    start(&device, &ram, &interrupts, 1);
    let error = device.add_ram(super::support::ram(3).iter().last().unwrap()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the vhost-user server supports 2 memory regions, and all are in use; use a server with more regions"
    );
    assert!(interrupts.failures().is_empty());

    let server = Server::start(Manner { protocol: MEM_SLOTS | REPLY_ACK, ..Manner::default() });
    let device = connect(&server, fs()).unwrap();
    start(&device, &super::support::ram(10), &interrupts, 1);
    let asked = server.take();
    assert_eq!((of(&asked, SET_MEM_TABLE)[0].payload[0], of(&asked, ADD_MEM_REG).len()), (8, 2));
    assert!(interrupts.failures().is_empty());
    assert!(asked.iter().flat_map(|one| &one.files).all(|file| file.as_raw_fd() >= 0));
}
