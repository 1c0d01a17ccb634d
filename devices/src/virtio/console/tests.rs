// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the device through its PCI transport. The tests act as the driver.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use iommu_bounce::{DmaMapper, Permissions};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::ends::MOST_INPUT;
use super::spec::{DEVICE_TYPE, queue};
use super::traffic::MOST_PRINTED;
use super::{ConsoleParams, Size, VirtioConsole, create};
use crate::pci::PciDevice;
use crate::sync::lock;
use crate::virtio::VirtioDevice;
use crate::virtio::test_driver::*;
use crate::virtio::test_support::{FakeMsi, SOON, set_bus_master};

const RINGS: Rings = Rings { first: [0x1000, 0x2000, 0x3000], stride: 0x4000, size: 16 };
/// Addresses of the input buffer and of the output buffer.
const BUFFERS: [u64; 2] = [0x4000, 0x8000];
/// Offset of the ISR status in the BAR.
const ISR: u64 = 0x1000;
/// ISR status bit: the configuration has changed.
const CONFIG_CHANGED: u8 = 2;

/// Output of the guest. The flag makes each write slow.
#[derive(Clone, Default)]
struct Paper(Arc<Mutex<Vec<u8>>>, Arc<AtomicBool>);

impl Write for Paper {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.1.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(20));
        }
        lock(&self.0).extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Output that reports each write to the test. A write blocks until the test sends a message or closes its end of the channel.
struct Gate(Sender<()>, Receiver<()>);

impl Write for Gate {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // After the test has ended, both calls fail, so ignore their errors.
        let _ = self.0.send(());
        let _ = self.1.recv();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Terminal {
    paper: Paper,
}

type Harness = TestDriver<VirtioConsole, Terminal>;

impl Harness {
    fn new(translated: bool) -> Self {
        let paper = Paper::default();
        let mut harness = Self::printing_to(translated, Box::new(paper.clone()));
        harness.paper = paper;
        harness
    }

    /// Creates a device that prints to `output`, not to a `Paper`.
    fn printing_to(translated: bool, output: Box<dyn Write + Send>) -> Self {
        let platform = TestPlatform::new(0x10_0000, translated);
        let params = ConsoleParams {
            id: "_console".into(),
            output,
            memory: platform.memory.clone(),
            msi: Arc::new(FakeMsi::default()),
            doorbells: Some(platform.doorbells.clone()),
            observer: Some(platform.recorder.clone()),
        };
        platform.drive(create(params).unwrap(), RINGS, Terminal { paper: Paper::default() })
    }

    fn isr(&self) -> u8 {
        self.read::<1>(ISR)[0]
    }

    /// Maps the rings and the buffers.
    fn map_all(&mut self) {
        self.map_pages([queue::RX, queue::TX].into_iter().flat_map(|queue| RINGS.of(queue)).chain(BUFFERS));
    }

    /// Initialises the device like a driver that accepts the `SIZE` feature.
    fn start(&mut self) {
        self.map_all();
        self.set_up(1, [queue::RX, queue::TX]);
    }

    /// Adds a request with one buffer to a queue, and notifies the device.
    fn add(&mut self, index: u16, address: u64, len: u32, flags: u16) {
        self.chain(index, &[(address, len, flags)]);
        self.ring(index);
    }

    /// Lets the guest print `text`.
    fn print(&mut self, text: &[u8]) {
        self.ram.write_slice(text, GuestAddress(BUFFERS[1])).unwrap();
        self.add(queue::TX, BUFFERS[1] + self.offset(), u32::try_from(text.len()).unwrap(), 0);
    }

    /// Adds an input buffer.
    fn listen(&mut self, len: u32) {
        self.add(queue::RX, BUFFERS[0] + self.offset(), len, WRITE);
    }

    /// Returns the content of the last used input buffer.
    fn typed(&self) -> Vec<u8> {
        self.served(queue::RX);
        self.bytes(BUFFERS[0], self.last_len(queue::RX) as usize)
    }

    /// Lets the guest print a request with two buffers to a slow output. Pauses the device while the device prints the second buffer.
    /// Returns the whole text.
    fn pause_in_a_request(&mut self) -> Vec<u8> {
        const PLACES: [u64; 2] = [0x2_0000, 0x4_0000];
        let [first, second] =
            [1000u32, 100_000].map(|len| (0..len).map(|at| (at % 251).to_le_bytes()[0]).collect::<Vec<_>>());
        for (place, text) in PLACES.into_iter().zip([&first, &second]) {
            self.ram.write_slice(text, GuestAddress(place)).unwrap();
        }
        self.paper.1.store(true, Ordering::Relaxed);
        let parts = PLACES.into_iter().zip([(1000, NEXT), (100_000, 0)]);
        let parts: Vec<Part> = parts.map(|(place, (len, flags))| (place, len, flags)).collect();
        self.chain(queue::TX, &parts);
        self.ring(queue::TX);
        wait_until(|| lock(&self.paper.0).len() > first.len());
        self.function.pause();
        self.paper.1.store(false, Ordering::Relaxed);
        assert_eq!(self.used(queue::TX), 0, "the pause came too late: the whole request was printed");
        first.into_iter().chain(second).collect()
    }

    fn printed(&self) -> Vec<u8> {
        self.served(queue::TX);
        lock(&self.paper.0).clone()
    }
}

#[test]
fn output_and_input_pass_through_the_console() {
    for translated in [false, true] {
        let mut harness = Harness::new(translated);
        harness.check_id(DEVICE_TYPE);
        assert_eq!(harness.device.receive(b"for nobody"), 10);
        harness.start();
        harness.print(b"login: ");
        assert_eq!(harness.printed(), b"login: ");
        assert_eq!(harness.device.receive(b"root\n"), 5);
        harness.listen(3);
        assert_eq!(harness.typed(), b"roo");
        harness.listen(16);
        assert_eq!(harness.typed(), b"t\n");
        harness.listen(16);
        harness.device.receive(b"x");
        assert_eq!(harness.typed(), b"x");
        let counters = harness.device.counters();
        assert_eq!((counters.tx_bytes, counters.rx_bytes, counters.resizes), (7, 6, 0));
        assert_eq!(harness.doorbells.count(), 2);
    }
}

#[test]
fn queues_stop_while_bus_mastering_is_off() {
    for translated in [false, true] {
        let mut harness = Harness::new(translated);
        harness.start();
        harness.listen(16);
        set_bus_master(&harness.function, false);
        harness.device.receive(b"typed");
        harness.print(b"printed");
        harness.device.notify(queue::TX).unwrap();
        thread::sleep(SOON);
        assert_eq!([queue::RX, queue::TX].map(|queue| harness.used(queue)), [0, 0]);
        assert_eq!(harness.ram.read_obj::<u8>(GuestAddress(BUFFERS[0])).unwrap(), 0);
        assert!(lock(&harness.paper.0).is_empty());
        set_bus_master(&harness.function, true);
        assert_eq!((harness.typed(), harness.printed()), (b"typed".to_vec(), b"printed".to_vec()));
    }
}

#[test]
fn unread_input_is_bounded_and_not_lost() {
    let mut harness = Harness::new(false);
    harness.start();
    let typed: Vec<u8> = (0..MOST_INPUT + 100).map(|number| number.to_le_bytes()[0]).collect();
    assert_eq!(harness.device.receive(&typed), MOST_INPUT);
    assert_eq!(harness.device.receive(&typed[MOST_INPUT..]), 0);
    harness.listen(100);
    assert_eq!(harness.typed(), typed[..100]);
    assert_eq!(harness.device.receive(&typed[MOST_INPUT..]), 100);
    harness.listen(0x1000);
    assert_eq!(harness.typed(), typed[100..]);
}

#[test]
fn driver_is_notified_of_initial_and_changed_size() {
    let mut harness = Harness::new(false);
    harness.device.resize(Size { columns: 132, rows: 43 });
    assert_eq!(harness.config(0), [132, 0, 43, 0]);
    harness.start();
    wait_until(|| harness.isr() & CONFIG_CHANGED != 0);
    harness.device.resize(Size { columns: 80, rows: 300 });
    wait_until(|| harness.isr() & CONFIG_CHANGED != 0);
    assert_eq!(harness.config(0), [80, 0, 44, 1]);
    // If the size does not change, the driver is not notified.
    harness.device.resize(Size { columns: 80, rows: 300 });
    harness.print(b"x");
    harness.printed();
    assert_eq!(harness.device.counters().resizes, 2);
    harness.write(20, &[0]);
    harness.start();
    wait_until(|| harness.device.counters().resizes == 3);
}

#[test]
fn broken_rule_fails_the_device_until_reset() {
    let most = u32::try_from(MOST_PRINTED).unwrap();
    for (index, address, len, flags) in [
        (queue::TX, BUFFERS[1], 1, WRITE),
        (queue::TX, 1 << 40, 1, 0),
        (queue::TX, BUFFERS[1], 1, 1),
        (queue::TX, 0, most + 1, 0),
        (queue::TX, u64::MAX - 1, 0x2000, 0),
        (queue::RX, BUFFERS[0], 1, 0),
        (queue::RX, BUFFERS[0], 0, WRITE),
        (queue::RX, 1 << 40, 1, WRITE),
        (queue::RX, BUFFERS[0], 0, WRITE | 1),
    ] {
        let mut harness = Harness::new(false);
        harness.start();
        harness.device.receive(b"typed");
        harness.chain_to_nowhere(index, (address, len, flags));
        harness.ring(index);
        harness.fails_until_reset(index);
    }
}

#[test]
fn unmapped_output_buffer_faults_behind_the_iommu() {
    let mut harness = Harness::new(true);
    harness.start();
    // This address is a guest-physical address, not an IOVA.
    harness.add(queue::TX, BUFFERS[1], 1, 0);
    harness.broken();
    let (faults, _) = harness.relay.take();
    assert_eq!((faults[0].iova, faults[0].access), (BUFFERS[1], Permissions::READ));
    assert!(lock(&harness.paper.0).is_empty());
}

#[test]
fn restored_device_keeps_input_and_reports_new_terminal_size() {
    for translated in [false, true] {
        let mut old = Harness::new(translated);
        old.device.resize(Size { columns: 80, rows: 25 });
        old.start();
        wait_until(|| old.device.counters().resizes == 1);
        old.print(b"before");
        old.printed();
        old.device.receive(b"typed");
        old.function.pause();
        // The request arrives while the device is paused.
        old.print(b"after");
        for (columns, resizes) in [(80, 0), (132, 1)] {
            let mut new = Harness::new(translated);
            new.device.resize(Size { columns, rows: 25 });
            new.map_all();
            new.restore_from(&old);
            thread::sleep(Duration::from_millis(5));
            assert!(lock(&new.paper.0).is_empty() && new.device.counters().resizes == 0, "the device is paused");
            new.function.resume();
            assert_eq!(new.printed(), b"after");
            new.listen(16);
            assert_eq!(new.typed(), b"typed");
            assert_eq!(new.device.counters().resizes, resizes);
        }
    }
}

#[test]
fn pause_waits_only_for_current_write_and_resume_prints_rest() {
    const LEN: u32 = 64 << 10;
    let mut harness = Harness::new(false);
    harness.start();
    let text: Vec<u8> = (0..LEN / 4).flat_map(u32::to_le_bytes).collect();
    harness.ram.write_slice(&text, GuestAddress(0x2_0000)).unwrap();
    harness.paper.1.store(true, Ordering::Relaxed);
    (0..16).for_each(|_| harness.add(queue::TX, 0x2_0000, LEN, 0));
    wait_until(|| !lock(&harness.paper.0).is_empty());

    harness.function.pause();

    let printed = lock(&harness.paper.0).len();
    assert!(printed < text.len(), "{printed} bytes are printed before the device pauses");
    harness.paper.1.store(false, Ordering::Relaxed);
    harness.function.resume();
    assert!(harness.printed() == text.repeat(16));
    assert_eq!(harness.device.counters().tx_bytes, 16 * u64::from(LEN));
}

#[test]
fn partly_printed_request_continues_in_a_restored_device() {
    let mut old = Harness::new(false);
    old.start();
    let text = old.pause_in_a_request();
    let mut new = Harness::new(false);
    new.restore_from(&old);

    new.function.resume();

    wait_until(|| new.used(queue::TX) == 1);
    let before = lock(&old.paper.0).clone();
    assert!([before, lock(&new.paper.0).clone()].concat() == text);
}

#[test]
fn first_request_after_mid_request_reset_is_printed_whole() {
    let mut harness = Harness::new(false);
    harness.start();
    harness.pause_in_a_request();
    harness.reset([queue::RX, queue::TX]);
    harness.function.resume();
    lock(&harness.paper.0).clear();

    harness.start();
    harness.print(b"login: ");

    assert_eq!(harness.printed(), b"login: ");
}

#[test]
fn unmap_does_not_wait_for_the_output() {
    const OTHER: u64 = 0x9000;
    let (reached, at_gate) = mpsc::channel();
    let (go, gate) = mpsc::channel();
    let mut harness = Harness::printing_to(true, Box::new(Gate(reached, gate)));
    // Declare `go` after the harness, so that `go` is dropped first. Otherwise the harness would wait for its thread, which waits for `go`.
    let go = go;
    harness.start();
    harness.map(OTHER, 0x1000, Permissions::READ);
    harness.print(b"x");
    at_gate.recv_timeout(Duration::from_secs(60)).unwrap();

    let mut mapper = harness.mapper.take().unwrap();
    let (unmapped, is_unmapped) = mpsc::channel();
    let unmapping = thread::spawn(move || {
        let outcome = mapper.unmap(OTHER + OFFSET, 0x1000);
        unmapped.send(outcome.is_ok()).unwrap();
        mapper
    });

    assert_eq!(is_unmapped.recv_timeout(Duration::from_secs(60)), Ok(true));
    drop(go);
    harness.served(queue::TX);
    harness.mapper = Some(unmapping.join().unwrap());
}

#[test]
fn impossible_state_is_rejected() {
    let mut old = Harness::new(false);
    old.start();
    old.function.pause();
    let state = old.function.save().unwrap();
    for (pointer, value) in [
        ("/device/kind", serde_json::json!("rng")),
        ("/device/payload/input", serde_json::json!(vec![0; MOST_INPUT + 1])),
        ("/device/payload/told", serde_json::json!({"columns": 1})),
        ("/device/payload/printed", serde_json::json!(MOST_PRINTED + 1)),
    ] {
        Harness::new(false).refuses(&state, pointer, &value);
    }
}

proptest! {
    #[test]
    fn device_with_corrupt_state_can_be_reset(changes in changes()) {
        let mut old = Harness::new(false);
        old.start();
        old.device.receive(b"typed");
        old.function.pause();
        Harness::new(false).survives(&old.function.save().unwrap(), changes);
    }

    #[test]
    fn random_rings_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..0x1200)) {
        super::fuzzing::run(&bytes);
    }
}
