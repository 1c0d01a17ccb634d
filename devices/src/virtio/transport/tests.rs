// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the PCI transport. The device under test records the calls of the transport.

mod bus;
mod recorder;
mod violations;

use std::sync::Arc;

use vm_memory::GuestAddress;

use self::recorder::Recorder;
use super::VirtioPciDevice;
use super::common::status::{DRIVER_OK, FEATURES_OK, NEEDS_RESET};
use super::interrupts::NO_VECTOR;
use super::layout::{COMMON, DEVICE, ISR, MSIX_PENDING, MSIX_TABLE, NOTIFY, STRUCTURES_SIZE};
use crate::dma::DeviceMemory;
use crate::pci::regs::{BAR0, CAP_MSIX, CAP_PM, CAP_VENDOR, CAPABILITIES, COMMAND, COMMAND_BUS_MASTER, COMMAND_MEMORY};
use crate::pci::{BarKind, CONTROL_ENABLE, PciDevice};
use crate::platform::DeviceEvent;
use crate::platform::test_support::EventRecorder;
use crate::ram::Ram;
use crate::sync::lock;
use crate::virtio::test_support::{FakeMsi, FakeVectors};
use crate::virtio::{Interrupt, SharedRegion, VirtioPciParams};

const ACKNOWLEDGE: u8 = 1;
const DRIVER: u8 = 2;
const VERSION_1: u64 = 1 << 32;
const FEATURE: u64 = 1 << 5;
const RAM: usize = 0x10_0000;
const SHARED_SIZE: u64 = 0x60_0000;

struct Harness {
    recorder: Arc<Recorder>,
    vectors: Arc<FakeVectors>,
    events: Arc<EventRecorder>,
    function: VirtioPciDevice,
}

impl Harness {
    fn new() -> Self {
        Self::with(Recorder { shared: Some(SharedRegion { id: 0, size: SHARED_SIZE }), ..Recorder::default() })
    }

    fn with(recorder: Recorder) -> Self {
        let recorder = Arc::new(recorder);
        let memory = Arc::new(Ram::from_ranges(&[(GuestAddress(0), RAM)]).unwrap());
        let msi = Arc::new(FakeMsi::default());
        let events = Arc::new(EventRecorder::default());
        let params = VirtioPciParams {
            id: "_test".into(),
            device: recorder.clone(),
            memory: DeviceMemory::all_ram(memory),
            msi: msi.clone(),
            doorbells: None,
            observer: Some(events.clone()),
        };
        let function = VirtioPciDevice::new(params).unwrap();
        let harness = Self { recorder, vectors: msi.vectors(), events, function };
        harness.write_command(COMMAND_BUS_MASTER | COMMAND_MEMORY);
        harness
    }

    fn write_command(&self, command: u16) {
        self.function.write_config(COMMAND, &command.to_le_bytes());
    }
    fn config_byte(&self, offset: u16) -> u8 {
        let mut data = [0];
        self.function.read_config(offset, &mut data);
        data[0]
    }
    fn config_dword(&self, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.function.read_config(offset, &mut data);
        u32::from_le_bytes(data)
    }
    /// Returns the offsets of all capabilities with this ID.
    fn capabilities(&self, id: u8) -> Vec<u16> {
        let mut found = Vec::new();
        let mut at = self.config_byte(CAPABILITIES);
        while at != 0 {
            if self.config_byte(at.into()) == id {
                found.push(at.into());
            }
            at = self.config_byte(u16::from(at) + 1);
        }
        found
    }
    /// Returns the offset of the virtio capability of type `kind`.
    fn virtio_capability(&self, kind: u8) -> Option<u16> {
        self.capabilities(CAP_VENDOR).into_iter().find(|at| self.config_byte(at + 3) == kind)
    }
    fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut data = [0xee; N];
        self.function.read_bar(0, offset, &mut data);
        data
    }
    fn byte(&self, offset: u64) -> u8 {
        self.read::<1>(offset)[0]
    }
    fn word(&self, offset: u64) -> u16 {
        u16::from_le_bytes(self.read(offset))
    }
    fn dword(&self, offset: u64) -> u32 {
        u32::from_le_bytes(self.read(offset))
    }
    fn write(&self, offset: u64, data: &[u8]) {
        self.function.write_bar(0, offset, data);
    }
    fn status(&self) -> u8 {
        self.byte(COMMON + 20)
    }
    fn set_status(&self, status: u8) {
        self.write(COMMON + 20, &[status]);
    }
    fn accept(&self, features: u64) {
        for (select, half) in features.to_le_bytes().chunks(4).enumerate() {
            self.write(COMMON + 8, &u32::try_from(select).unwrap().to_le_bytes());
            self.write(COMMON + 12, half);
        }
    }
    fn negotiate(&self) {
        self.set_status(ACKNOWLEDGE);
        self.set_status(ACKNOWLEDGE | DRIVER);
        self.accept(VERSION_1 | FEATURE);
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_ne!(self.status() & FEATURES_OK, 0);
    }
    fn set_queue(&self, queue: u16, size: u16, rings: [u64; 3]) {
        self.write(COMMON + 22, &queue.to_le_bytes());
        self.write(COMMON + 24, &size.to_le_bytes());
        for (offset, ring) in [32u64, 40, 48].into_iter().zip(rings) {
            self.write(COMMON + offset, &ring.to_le_bytes()[..4]);
            self.write(COMMON + offset + 4, &ring.to_le_bytes()[4..]);
        }
        self.write(COMMON + 28, &1u16.to_le_bytes());
    }
    fn start(&self) {
        self.negotiate();
        self.set_queue(0, 16, [0x1000, 0x2000, 0x3000]);
        self.set_queue(1, 8, [0x4000, 0x5000, 0x6000]);
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    }
    fn enable_msix(&self) {
        for vector in 0..3u64 {
            let base = MSIX_TABLE + 16 * vector;
            self.write(base, &0xfee0_0000u32.to_le_bytes());
            self.write(base + 8, &(0x40 + u32::try_from(vector).unwrap()).to_le_bytes());
            self.write(base + 12, &0u32.to_le_bytes());
        }
        let capability = self.capabilities(CAP_MSIX)[0];
        self.function.write_config(capability + 2, &CONTROL_ENABLE.to_le_bytes());
    }
    fn interrupt(&self) -> Arc<dyn Interrupt> {
        self.function.interrupt()
    }
}

#[test]
fn function_has_ids_and_bars_of_a_modern_virtio_device() {
    let harness = Harness::new();
    assert_eq!(harness.config_dword(0), 0x1057_1af4);
    assert_eq!(harness.config_dword(8), 0x0880_0001);
    let bars = harness.function.bars();
    assert_eq!(bars.len(), 3);
    assert_eq!((bars[0].index, bars[0].size), (0, STRUCTURES_SIZE));
    assert_eq!((bars[1].index, bars[1].kind, bars[1].size), (1, BarKind::Io, 8));
    assert_eq!((bars[2].index, bars[2].size), (2, 0x80_0000));
    assert_eq!(bars[2].kind, BarKind::Memory64 { prefetchable: true });
}

#[test]
fn capabilities_point_to_the_structures() {
    let harness = Harness::new();
    // The first notification capability (2) describes the I/O port BAR.
    for (kind, bar, offset, len) in [(1, 0, COMMON, 56), (2, 1, 0, 8), (3, 0, ISR, 1), (4, 0, DEVICE, 8)] {
        let at = harness.virtio_capability(kind).unwrap();
        assert_eq!(harness.config_byte(at + 4), bar, "BAR of structure {kind}");
        assert_eq!(u64::from(harness.config_dword(at + 8)), offset, "offset of structure {kind}");
        assert_eq!(harness.config_dword(at + 12), len, "length of structure {kind}");
        assert_eq!(harness.config_byte(at + 2), if kind == 2 { 20 } else { 16 });
    }
    let notify = harness.virtio_capability(2).unwrap();
    assert_eq!(harness.config_dword(notify + 16), 4);
    let shared = harness.virtio_capability(8).unwrap();
    assert_eq!([harness.config_byte(shared + 2), harness.config_byte(shared + 4)], [24, 2]);
    let words: Vec<u32> = [8, 12, 16, 20].map(|offset| harness.config_dword(shared + offset)).to_vec();
    assert_eq!(words, [0, 0x60_0000, 0, 0]);
    assert_eq!(harness.config_dword(harness.capabilities(CAP_MSIX)[0]) >> 16, 2, "three vectors");
}

#[test]
fn device_without_shared_memory_has_neither_bar_nor_capability() {
    let harness = Harness::with(Recorder::default());
    assert_eq!(harness.function.bars().len(), 2);
    assert_eq!(harness.virtio_capability(8), None);
}

#[test]
fn features_are_offered_in_halves() {
    let harness = Harness::new();
    let offered: Vec<u32> = (0..3u32)
        .map(|select| {
            harness.write(COMMON, &select.to_le_bytes());
            harness.dword(COMMON + 4)
        })
        .collect();
    assert_eq!(offered, [0x20, 1, 0]);
}

#[test]
fn unoffered_or_legacy_features_are_refused() {
    for features in [0, FEATURE, VERSION_1 | 1, VERSION_1 | 1 << 28, VERSION_1 | 1 << 33, u64::MAX] {
        let harness = Harness::new();
        harness.set_status(ACKNOWLEDGE | DRIVER);
        harness.accept(features);
        harness.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_eq!(harness.status(), ACKNOWLEDGE | DRIVER, "{features:#x}");
        harness.set_status(ACKNOWLEDGE | DRIVER | DRIVER_OK);
        assert!(lock(&harness.recorder.activations).is_empty());
        assert_eq!(harness.status() & DRIVER_OK, 0);
    }
}

#[test]
fn accepted_features_cannot_change_any_more() {
    let harness = Harness::new();
    harness.negotiate();
    harness.accept(VERSION_1);
    harness.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    assert_eq!(lock(&harness.recorder.activations)[0].features, VERSION_1 | FEATURE);
}

#[test]
fn queue_registers_accept_only_legal_values() {
    let harness = Harness::new();
    assert_eq!(harness.word(COMMON + 18), 2);
    harness.write(COMMON + 22, &1u16.to_le_bytes());
    assert_eq!([harness.word(COMMON + 24), harness.word(COMMON + 28), harness.word(COMMON + 30)], [8, 0, 1]);
    for size in [0u16, 3, 16, 0x8000, 0xffff] {
        harness.write(COMMON + 24, &size.to_le_bytes());
        assert_eq!(harness.word(COMMON + 24), 8, "size {size} taken");
    }
    harness.write(COMMON + 24, &4u16.to_le_bytes());
    assert_eq!(harness.word(COMMON + 24), 4);
    harness.write(COMMON + 28, &1u16.to_le_bytes());
    assert_eq!(harness.word(COMMON + 28), 0, "enabled before FEATURES_OK");
    harness.write(COMMON + 40, &0x1234_5678_9abc_def0u64.to_le_bytes());
    assert_eq!(u64::from_le_bytes(harness.read(COMMON + 40)), 0x1234_5678_9abc_def0);
    harness.write(COMMON + 22, &2u16.to_le_bytes());
    assert_eq!(harness.word(COMMON + 24), 0, "a queue that does not exist has a size");
    harness.write(COMMON + 28, &1u16.to_le_bytes());
    harness.write(COMMON + 32, &[0xff; 8]);
    assert_eq!(u64::from_le_bytes(harness.read(COMMON + 32)), 0);
}

#[test]
fn enabled_queue_keeps_its_size_and_rings() {
    let harness = Harness::new();
    harness.negotiate();
    harness.set_queue(0, 16, [0x1000, 0x2000, 0x3000]);
    harness.set_queue(0, 4, [0x7000, 0x8000, 0x9000]);
    assert_eq!(harness.word(COMMON + 24), 16);
    assert_eq!(u64::from_le_bytes(harness.read(COMMON + 48)), 0x3000);
}

#[test]
fn device_gets_the_queues_that_the_driver_enabled() {
    let harness = Harness::new();
    harness.negotiate();
    harness.set_queue(0, 16, [0x1000, 0x2000, 0x3000]);
    harness.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    let activations = lock(&harness.recorder.activations);
    assert_eq!(activations.len(), 1);
    assert!(lock(&harness.recorder.queues).contains_key(&0));
    assert!(!lock(&harness.recorder.queues).contains_key(&1));
}

#[test]
fn unusable_rings_need_a_reset() {
    let beyond = RAM as u64;
    let bad = [
        [beyond, 0x2000, 0x3000],
        [0x1000, beyond - 2, 0x3000],
        [0x1000, 0x2000, u64::MAX - 3],
        [0x1008, 0x2000, 0x3000],
        [0x1000, 0x2001, 0x3000],
        [0x1000, 0x2000, 0x3002],
        [0x1000, 0, 0x3000],
    ];
    for rings in bad {
        let harness = Harness::new();
        harness.negotiate();
        harness.set_queue(0, 16, rings);
        harness.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        assert_ne!(harness.status() & NEEDS_RESET, 0, "{rings:x?}");
        harness.write(NOTIFY, &[0, 0]);
        assert!(lock(&harness.recorder.notified).is_empty());
        harness.set_status(0);
        assert_eq!(harness.status(), 0);
        harness.start();
        assert_eq!(harness.status() & NEEDS_RESET, 0, "the device works after a reset");
    }
}

#[test]
fn notification_reaches_only_an_active_bus_mastering_device() {
    let harness = Harness::new();
    harness.write(NOTIFY, &[0, 0]);
    assert!(lock(&harness.recorder.notified).is_empty(), "before DRIVER_OK");
    harness.start();
    harness.write_command(COMMAND_MEMORY);
    harness.write(NOTIFY, &[0, 0]);
    assert!(lock(&harness.recorder.notified).is_empty(), "without bus mastering");
    harness.write_command(COMMAND_MEMORY | COMMAND_BUS_MASTER);
    harness.write(NOTIFY, &[0, 0]);
    harness.write(NOTIFY + 4, &[1, 0]);
    harness.function.write_bar(1, 4, &[1, 0]);
    harness.function.write_bar(1, 0, &[0, 0]);
    assert_eq!(*lock(&harness.recorder.notified), [0, 1, 1, 0]);
    harness.set_status(0);
    harness.write(NOTIFY, &[0, 0]);
    harness.function.write_bar(1, 0, &[0, 0]);
    assert_eq!(lock(&harness.recorder.notified).len(), 4, "after a reset");
}

#[test]
fn failed_device_sets_needs_reset_and_interrupts() {
    let harness = Harness::new();
    harness.start();
    harness.enable_msix();
    harness.write(COMMON + 16, &2u16.to_le_bytes());
    *lock(&harness.recorder.fail) = true;
    harness.write(NOTIFY, &[0, 0]);
    assert_ne!(harness.status() & NEEDS_RESET, 0);
    assert_eq!(harness.vectors.raised(2), 1);
    harness.write(NOTIFY, &[0, 0]);
    assert_eq!(lock(&harness.recorder.notified).len(), 1, "a device that needs a reset gets no notification");
    harness.set_status(harness.status());
    assert_ne!(harness.status() & NEEDS_RESET, 0);
    harness.set_status(0);
    assert_eq!((harness.status(), *lock(&harness.recorder.resets)), (0, 1));
}

#[test]
fn observer_sees_each_activation_failure_and_reset_once() {
    let harness = Harness::new();
    harness.set_status(0);
    assert_eq!(harness.events.take(), [], "there was nothing to reset");
    harness.start();
    assert_eq!(harness.events.take(), [DeviceEvent::Activated]);
    harness.set_status(harness.status());
    harness.set_status(0);
    harness.set_status(0);
    assert_eq!(harness.events.take(), [DeviceEvent::Reset]);
    harness.start();
    *lock(&harness.recorder.fail) = true;
    harness.write_command(COMMAND_BUS_MASTER | COMMAND_MEMORY);
    harness.write(NOTIFY, &[0, 0]);
    harness.write(NOTIFY, &[0, 0]);
    assert_eq!(harness.events.take(), [DeviceEvent::Activated, DeviceEvent::Failed]);
    harness.function.reset().unwrap();
    harness.function.reset().unwrap();
    assert_eq!(harness.events.take(), [DeviceEvent::Reset]);
    harness.negotiate();
    harness.set_queue(0, 16, [RAM as u64, 0x2000, 0x3000]);
    harness.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    harness.set_status(0);
    assert_eq!(harness.events.take(), [DeviceEvent::Failed], "unusable rings activate nothing");
}

#[test]
fn missing_vector_reads_back_as_no_vector() {
    let harness = Harness::new();
    assert_eq!(harness.word(COMMON + 16), NO_VECTOR);
    for (offset, vector, kept) in [(16, 2, 2), (16, 3, NO_VECTOR), (26, 1, 1), (26, 0x8000, NO_VECTOR)] {
        harness.write(COMMON + offset, &u16::to_le_bytes(vector));
        assert_eq!(harness.word(COMMON + offset), kept);
    }
}

#[test]
fn used_buffers_raise_the_vector_of_their_queue() {
    let harness = Harness::new();
    harness.start();
    harness.enable_msix();
    harness.interrupt().queue_used(0);
    assert_eq!([0, 1, 2].map(|vector| harness.vectors.raised(vector)), [0, 0, 0], "no vector was set");
    harness.write(COMMON + 22, &1u16.to_le_bytes());
    harness.write(COMMON + 26, &1u16.to_le_bytes());
    harness.interrupt().queue_used(1);
    harness.interrupt().queue_used(77);
    assert_eq!([0, 1, 2].map(|vector| harness.vectors.raised(vector)), [0, 1, 0]);
    assert_eq!(harness.byte(ISR), 0, "with MSI-X the status has no queue bit");
}

#[test]
fn isr_status_without_msix_is_cleared_by_a_read() {
    let harness = Harness::new();
    harness.start();
    harness.interrupt().queue_used(0);
    assert_eq!(harness.byte(ISR), 1);
    harness.interrupt().config_changed(true);
    assert_eq!(harness.byte(ISR), 2);
    assert_eq!(harness.byte(ISR), 0);
}

#[test]
fn config_change_bumps_generation_and_notifies_active_driver() {
    let harness = Harness::new();
    harness.enable_msix();
    harness.write(COMMON + 16, &0u16.to_le_bytes());
    let before = harness.byte(COMMON + 21);
    harness.interrupt().config_changed(true);
    assert_ne!(harness.byte(COMMON + 21), before);
    assert_eq!((harness.vectors.raised(0), harness.byte(ISR)), (0, 0), "before DRIVER_OK");
    harness.start();
    harness.interrupt().config_changed(false);
    assert_eq!((harness.vectors.raised(0), harness.byte(ISR)), (0, 0), "not asked to notify");
    harness.interrupt().config_changed(true);
    assert_eq!((harness.vectors.raised(0), harness.byte(ISR)), (1, 2));
}

#[test]
fn configuration_access_capability_reaches_the_registers() {
    let harness = Harness::new();
    let at = harness.virtio_capability(5).unwrap();
    let access = |offset: u64, len: u32| {
        harness.function.write_config(at + 8, &u32::try_from(offset).unwrap().to_le_bytes());
        harness.function.write_config(at + 12, &len.to_le_bytes());
    };
    access(COMMON + 20, 1);
    harness.function.write_config(at + 16, &[ACKNOWLEDGE]);
    assert_eq!(harness.status(), ACKNOWLEDGE);
    assert_eq!(harness.config_byte(at + 16), ACKNOWLEDGE);
    access(COMMON + 18, 2);
    assert_eq!(harness.config_dword(at + 16), 2, "number of queues");
    access(COMMON + 20, 3);
    harness.function.write_config(at + 16, &[DRIVER]);
    access(0xffff_fffc, 4);
    harness.function.write_config(at + 16, &[1, 2, 3, 4]);
    harness.function.write_config(at + 4, &[9]);
    access(COMMON + 20, 1);
    harness.function.write_config(at + 16, &[DRIVER]);
    assert_eq!(harness.status(), ACKNOWLEDGE, "an illegal access changed something");
}

#[test]
fn device_configuration_is_read_and_written() {
    let harness = Harness::new();
    harness.write(DEVICE + 4, &[1, 2, 3, 4]);
    assert_eq!(harness.read(DEVICE + 4), [1, 2, 3, 4]);
    assert_eq!(harness.read(DEVICE + 6), [3, 4, 0, 0], "bytes beyond the end read as zero");
}

#[test]
fn shared_region_reads_zero_and_its_moves_reach_the_device() {
    let harness = Harness::new();
    let mut data = [0xee; 8];
    harness.function.write_bar(2, 0, &[1; 8]);
    harness.function.read_bar(2, SHARED_SIZE, &mut data);
    assert_eq!(data, [0; 8]);
    harness.function.bar_moved(0, 0x1_0000).unwrap();
    harness.function.bar_moved(2, 0x80_0000_0000).unwrap();
    assert_eq!(*lock(&harness.recorder.moved), [0x80_0000_0000]);
}

#[test]
fn shared_region_refuses_to_be_released() {
    let harness = Harness::new();
    harness.function.bar_moved(2, 0x80_0000_0000).unwrap();
    harness.function.bar_released(0).unwrap();
    harness.function.bar_released(2).unwrap_err();
}

#[test]
fn pci_reset_restores_power_on_with_the_assigned_addresses() {
    let harness = Harness::new();
    harness.function.assign_bar(0, 0xe000_0000);
    harness.start();
    harness.enable_msix();
    harness.function.write_config(BAR0, &0xd000_0000u32.to_le_bytes());
    harness.function.reset().unwrap();
    assert_eq!(harness.status(), 0);
    assert_eq!(harness.function.bar_address(0), None);
    assert_eq!(harness.config_dword(BAR0), 0xe000_0000);
    assert_eq!(harness.config_dword(harness.capabilities(CAP_MSIX)[0]) >> 31, 0);
    assert_eq!(*lock(&harness.recorder.resets), 1);
    harness.start();
    harness.write(NOTIFY, &[0, 0]);
    assert!(lock(&harness.recorder.notified).is_empty(), "bus mastering is off after a reset");
}

#[test]
fn device_survives_a_change_of_its_power_state() {
    let harness = Harness::new();
    harness.start();
    let at = harness.capabilities(CAP_PM)[0];
    let control = at + 4;
    assert_eq!(harness.config_dword(control), 8, "D0 with No_Soft_Reset");

    harness.function.write_config(control, &[0xff; 4]);
    assert_eq!(harness.config_dword(control), 0xb, "D3hot; nothing else can be written");
    harness.function.write_config(control, &[0; 4]);

    assert_eq!(harness.config_dword(control), 8);
    assert_ne!(harness.status(), 0);
    assert_eq!(*lock(&harness.recorder.resets), 0);
}

#[test]
fn no_access_harms_the_device() {
    let harness = Harness::new();
    // A linear congruential generator with Knuth's MMIX constants is random enough, and yields the same sequence in every run.
    let mut seed = 1u64;
    let mut random = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        seed >> 16
    };
    for _ in 0..200_000 {
        let value = random().to_le_bytes();
        let len = [1usize, 2, 4, 8][usize::try_from(random() % 4).unwrap()];
        let pages = [COMMON, COMMON, ISR, DEVICE, NOTIFY, MSIX_TABLE, MSIX_PENDING, 0x7000];
        let page = pages[usize::try_from(random() % 8).unwrap()];
        let offset = (page + random() % 128).min(STRUCTURES_SIZE - len as u64);
        let mut data = [0; 8];
        match random() % 4 {
            0 => harness.function.read_bar(0, offset, &mut data[..len]),
            1 => harness.function.write_bar(0, offset, &value[..len]),
            2 => harness.function.read_config(u16::try_from(random() % 252).unwrap(), &mut data[..len.min(4)]),
            _ => harness.function.write_config(u16::try_from(random() % 252).unwrap(), &value[..len.min(4)]),
        }
    }
    harness.set_status(0);
    harness.write_command(COMMAND_BUS_MASTER | COMMAND_MEMORY);
    harness.start();
    assert_eq!(harness.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
}
