// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device behind its transport, with a driver that the tests play.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use iommu_bounce::{DmaMapper, Permissions};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::ends::MOST_INPUT;
use super::spec::{DEVICE_TYPE, queue};
use super::traffic::MOST_PRINTED;
use super::{ConsoleParams, Size, VirtioConsole, create};
use crate::dma::{DeviceMemory, DmaTable, TableMapper, fault_relay};
use crate::pci::PciDevice;
use crate::pci::regs::{COMMAND, COMMAND_BUS_MASTER, COMMAND_IO, COMMAND_MEMORY};
use crate::platform::DeviceEvent;
use crate::platform::test_support::Witness;
use crate::ram::Ram;
use crate::sync::lock;
use crate::virtio::test_support::{FakeDoorbells, FakeMsi, SOON, set_bus_master, spoil};
use crate::virtio::{VirtioDevice, VirtioPciDevice};

const ACCESS_PLATFORM: u32 = 1 << 1;
const VERSION_1: u32 = 1 << 0;
/// Descriptors, available ring and used ring, by queue.
const RINGS: [[u64; 3]; 2] = [[0x1000, 0x2000, 0x3000], [0x5000, 0x6000, 0x7000]];
/// Buffers, by queue.
const BUFFERS: [u64; 2] = [0x4000, 0x8000];
/// How far IOVAs are from guest-physical addresses where the device is behind an IOMMU.
const OFFSET: u64 = 0x1000_0000;
const NOTIFY_PORT: u64 = 0xc000;
/// A descriptor's buffer is for the device to write.
const WRITE: u16 = 2;
/// ISR status and device configuration: offsets in the BAR.
const ISR: u64 = 0x1000;
const CONFIG: u64 = 0x2000;
/// The configuration has changed, in the ISR status.
const CONFIG_CHANGED: u8 = 2;

/// What the guest has printed, and whether each write takes its time.
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

/// Output that tells of each write, and waits until it may end or nobody is left to say so.
struct Gate(Sender<()>, Receiver<()>);

impl Write for Gate {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Both fail where the test is over.
        let _ = self.0.send(());
        let _ = self.1.recv();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Harness {
    paper: Paper,
    ram: Arc<Ram>,
    function: Arc<VirtioPciDevice>,
    device: Arc<VirtioConsole>,
    witness: Arc<Witness>,
    doorbells: Arc<FakeDoorbells>,
    mapper: Option<TableMapper>,
    relay: crate::dma::FaultRelay,
    /// Elements that were put into the available rings.
    added: [u16; 2],
}

impl Harness {
    fn new(translated: bool) -> Self {
        let paper = Paper::default();
        Self { paper: paper.clone(), ..Self::printing_to(translated, Box::new(paper)) }
    }

    /// With another output than its paper.
    fn printing_to(translated: bool, output: Box<dyn Write + Send>) -> Self {
        let paper = Paper::default();
        let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap());
        let (sender, relay) = fault_relay();
        let table = translated.then(|| Arc::new(DmaTable::new("console", ram.clone(), Some((8, sender)))));
        let memory = table.clone().map_or_else(|| DeviceMemory::all_ram(ram.clone()), DeviceMemory::mapped);
        let mapper = table.map(TableMapper::new);
        let (witness, doorbells) = (Arc::new(Witness::default()), Arc::new(FakeDoorbells::default()));
        let params = ConsoleParams {
            id: "_console".into(),
            output,
            memory,
            msi: Arc::new(FakeMsi::default()),
            doorbells: Some(doorbells.clone()),
            observer: Some(witness.clone()),
        };
        let (function, device) = create(params).unwrap();
        let command = COMMAND_BUS_MASTER | COMMAND_MEMORY | COMMAND_IO;
        function.assign_bar(1, NOTIFY_PORT);
        function.write_config(COMMAND, &command.to_le_bytes());
        function.bar_moved(1, NOTIFY_PORT).unwrap();
        Self { paper, ram, function, device, witness, doorbells, mapper, relay, added: [0; 2] }
    }

    fn offset(&self) -> u64 {
        if self.mapper.is_some() { OFFSET } else { 0 }
    }

    fn map(&mut self, gpa: u64, len: u64, permissions: Permissions) {
        let slice = self.ram.get_slice(GuestAddress(gpa), usize::try_from(len).unwrap()).unwrap();
        if let Some(mapper) = &mut self.mapper {
            mapper.map(gpa + OFFSET, slice, permissions).unwrap();
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.function.write_bar(0, offset, data);
    }

    fn status(&self) -> u8 {
        let mut status = [0];
        self.function.read_bar(0, 20, &mut status);
        status[0]
    }

    fn isr(&self) -> u8 {
        let mut isr = [0];
        self.function.read_bar(0, ISR, &mut isr);
        isr[0]
    }

    fn config(&self) -> [u8; 4] {
        let mut config = [0; 4];
        self.function.read_bar(0, CONFIG, &mut config);
        config
    }

    /// Sets the device up as a driver does.
    fn start(&mut self) {
        for page in RINGS.into_iter().flatten().chain(BUFFERS) {
            self.map(page, 0x1000, Permissions::READ | Permissions::WRITE);
        }
        let offset = self.offset();
        self.write(20, &[1]);
        self.write(20, &[3]);
        let high = VERSION_1 | if self.mapper.is_some() { ACCESS_PLATFORM } else { 0 };
        // The size of the terminal.
        self.write(8, &0u32.to_le_bytes());
        self.write(12, &1u32.to_le_bytes());
        self.write(8, &1u32.to_le_bytes());
        self.write(12, &high.to_le_bytes());
        self.write(20, &[11]);
        assert_eq!(self.status(), 11, "features are accepted");
        for (index, rings) in (0u16..).zip(RINGS) {
            self.write(22, &index.to_le_bytes());
            self.write(24, &16u16.to_le_bytes());
            for (place, ring) in [32, 40, 48].into_iter().zip(rings) {
                self.write(place, &(ring + offset).to_le_bytes());
            }
            self.write(28, &1u16.to_le_bytes());
        }
        self.write(20, &[15]);
    }

    /// Puts a request of one buffer into a queue, and tells the device.
    fn add(&mut self, index: u16, address: u64, len: u32, flags: u16) {
        let (rings, added) = (RINGS[usize::from(index)], self.added[usize::from(index)]);
        let slot = u64::from(added % 16);
        let descriptor = GuestAddress(rings[0] + 16 * slot);
        self.ram.write_obj(address, descriptor).unwrap();
        self.ram.write_obj(len, GuestAddress(descriptor.0 + 8)).unwrap();
        self.ram.write_obj(flags, GuestAddress(descriptor.0 + 12)).unwrap();
        self.ram.write_obj(added % 16, GuestAddress(rings[1] + 4 + 2 * slot)).unwrap();
        self.added[usize::from(index)] += 1;
        self.ram.write_obj(added + 1, GuestAddress(rings[1] + 2)).unwrap();
        self.function.write_bar(1, 4 * u64::from(index), &index.to_le_bytes());
    }

    /// Has the guest print `text`.
    fn print(&mut self, text: &[u8]) {
        self.ram.write_slice(text, GuestAddress(BUFFERS[1])).unwrap();
        self.add(queue::TX, BUFFERS[1] + self.offset(), u32::try_from(text.len()).unwrap(), 0);
    }

    /// Gives the device a buffer for input.
    fn listen(&mut self, len: u32) {
        self.add(queue::RX, BUFFERS[0] + self.offset(), len, WRITE);
    }

    fn used(&self, index: u16) -> u16 {
        self.ram.read_obj(GuestAddress(RINGS[usize::from(index)][2] + 2)).unwrap()
    }

    fn wait_used(&self, index: u16) {
        wait_until(|| self.used(index) == self.added[usize::from(index)]);
    }

    /// What the last buffer for input got.
    fn typed(&self) -> Vec<u8> {
        self.wait_used(queue::RX);
        let slot = u64::from((self.added[0] - 1) % 16);
        let len: u32 = self.ram.read_obj(GuestAddress(RINGS[0][2] + 4 + 8 * slot + 4)).unwrap();
        let mut bytes = vec![0; len as usize];
        self.ram.read_slice(&mut bytes, GuestAddress(BUFFERS[0])).unwrap();
        bytes
    }

    /// Has the guest print a request of two buffers to paper that takes its time, and pauses the device when it is in the second one.
    /// Returns what is to be printed.
    fn pause_in_a_request(&mut self) -> Vec<u8> {
        const PLACES: [u64; 2] = [0x2_0000, 0x4_0000];
        let [first, second] =
            [1000u32, 100_000].map(|len| (0..len).map(|at| (at % 251).to_le_bytes()[0]).collect::<Vec<_>>());
        for (place, text) in PLACES.into_iter().zip([&first, &second]) {
            self.ram.write_slice(text, GuestAddress(place)).unwrap();
        }
        // The first descriptor goes on with number 8.
        let [from, to] = [14, 16 * 8].map(|offset| GuestAddress(RINGS[1][0] + offset));
        self.ram.write_obj(8u16, from).unwrap();
        self.ram.write_obj(PLACES[1], to).unwrap();
        self.ram.write_obj(100_000u64, GuestAddress(to.0 + 8)).unwrap();
        self.paper.1.store(true, Ordering::Relaxed);
        self.add(queue::TX, PLACES[0], 1000, 1);
        wait_until(|| lock(&self.paper.0).len() > first.len());
        self.function.pause();
        self.paper.1.store(false, Ordering::Relaxed);
        assert_eq!(self.used(queue::TX), 0, "the request is printed to its end");
        first.into_iter().chain(second).collect()
    }

    fn printed(&self) -> Vec<u8> {
        self.wait_used(queue::TX);
        lock(&self.paper.0).clone()
    }
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn guest_prints_and_gets_what_is_typed() {
    for translated in [false, true] {
        let mut harness = Harness::new(translated);
        let mut id = [0; 4];
        harness.function.read_config(0, &mut id);
        assert_eq!(u32::from_le_bytes(id), (u32::from(DEVICE_TYPE) + 0x1040) << 16 | 0x1af4);
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
fn queues_stand_still_while_bus_mastering_is_off() {
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
fn input_that_nobody_reads_is_bounded_and_none_is_lost() {
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
fn driver_is_told_of_the_size_at_its_start_and_of_each_change() {
    let mut harness = Harness::new(false);
    harness.device.resize(Size { columns: 132, rows: 43 });
    assert_eq!(harness.config(), [132, 0, 43, 0]);
    harness.start();
    wait_until(|| harness.isr() & CONFIG_CHANGED != 0);
    harness.device.resize(Size { columns: 80, rows: 300 });
    wait_until(|| harness.isr() & CONFIG_CHANGED != 0);
    assert_eq!(harness.config(), [80, 0, 44, 1]);
    // The same again is no change.
    harness.device.resize(Size { columns: 80, rows: 300 });
    harness.print(b"x");
    harness.printed();
    assert_eq!(harness.device.counters().resizes, 2);
    harness.write(20, &[0]);
    harness.start();
    wait_until(|| harness.device.counters().resizes == 3);
}

#[test]
fn driver_that_breaks_a_rule_is_told_to_reset_and_can() {
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
        // The next descriptor that it names is out of the table.
        harness.ram.write_obj(99u16, GuestAddress(RINGS[usize::from(index)][0] + 14)).unwrap();
        harness.add(index, address, len, flags);
        wait_until(|| harness.status() & 64 != 0);
        assert_eq!(harness.used(index), 0);
        harness.write(20, &[0]);
        assert_eq!(harness.status(), 0);
        assert_eq!(harness.witness.take(), [DeviceEvent::Activated, DeviceEvent::Failed, DeviceEvent::Reset]);
    }
}

#[test]
fn device_behind_the_iommu_reaches_nothing_that_is_not_mapped() {
    let mut harness = Harness::new(true);
    harness.start();
    // A guest-physical address is no IOVA.
    harness.add(queue::TX, BUFFERS[1], 1, 0);
    wait_until(|| harness.status() & 64 != 0);
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
        // It comes while the device is paused.
        old.print(b"after");
        let text = serde_json::to_string(&old.function.save().unwrap()).unwrap();
        for (columns, resizes) in [(80, 0), (132, 1)] {
            let mut new = Harness::new(translated);
            new.device.resize(Size { columns, rows: 25 });
            let mut page = [0; 0x1000];
            for address in RINGS.into_iter().flatten().chain(BUFFERS) {
                old.ram.read_slice(&mut page, GuestAddress(address)).unwrap();
                new.ram.write_slice(&page, GuestAddress(address)).unwrap();
                new.map(address, 0x1000, Permissions::READ | Permissions::WRITE);
            }
            new.added = old.added;
            new.function.restore(&serde_json::from_str(&text).unwrap()).unwrap();
            assert_eq!(serde_json::to_string(&new.function.save().unwrap()).unwrap(), text);
            thread::sleep(Duration::from_millis(5));
            assert!(lock(&new.paper.0).is_empty() && new.device.counters().resizes == 0, "it is paused");
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
    let state = serde_json::to_string(&old.function.save().unwrap()).unwrap();
    let new = Harness::new(false);
    let mut ram = vec![0; 0x10_0000];
    old.ram.read_slice(&mut ram, GuestAddress(0)).unwrap();
    new.ram.write_slice(&ram, GuestAddress(0)).unwrap();
    new.function.restore(&serde_json::from_str(&state).unwrap()).unwrap();
    assert_eq!(serde_json::to_string(&new.function.save().unwrap()).unwrap(), state);

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
    harness.write(20, &[0]);
    harness.function.resume();
    for ring in RINGS.into_iter().flatten() {
        harness.ram.write_slice(&[0; 0x1000], GuestAddress(ring)).unwrap();
    }
    harness.added = [0; 2];
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
    // It goes before the harness, whose thread would wait for it.
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
    harness.wait_used(queue::TX);
    harness.mapper = Some(unmapping.join().unwrap());
}

#[test]
fn state_that_no_device_can_have_is_refused() {
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
        let mut state = state.clone();
        // A field that need not be there is in the place of its own.
        let (object, field) = pointer.rsplit_once('/').unwrap();
        state.payload.pointer_mut(object).expect(pointer)[field] = value;
        let new = Harness::new(false);
        assert!(new.function.restore(&state).is_err(), "{pointer}");
        new.function.reset().unwrap();
        assert_eq!(new.status(), 0);
    }
}

proptest! {
    #[test]
    fn device_of_a_spoiled_state_can_be_reset(
        changes in prop::collection::vec((any::<usize>(), any::<u64>()), 1..4)
    ) {
        let mut old = Harness::new(false);
        old.start();
        old.device.receive(b"typed");
        old.function.pause();
        let mut value = serde_json::to_value(old.function.save().unwrap()).unwrap();
        for (place, with) in changes {
            spoil(&mut value, place, with);
        }
        let new = Harness::new(false);
        new.function.pause();
        if let Ok(state) = serde_json::from_value(value) && new.function.restore(&state).is_ok() {
            new.function.save().unwrap();
            new.function.resume();
            new.function.pause();
        }
        new.function.reset().unwrap();
        prop_assert_eq!(new.status(), 0);
    }

    #[test]
    fn any_rings_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..0x1200)) {
        super::fuzzing::run(&bytes);
    }
}
