// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Test harness: a device with its PCI transport, and a driver that the test controls.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use iommu_bounce::{DmaMapper, Permissions};
use proptest::prelude::*;
use serde_json::Value;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::VirtioPciDevice;
use super::byte_driver::set_up;
use super::test_support::{FakeDoorbells, spoil};
use crate::dma::{DeviceMemory, DmaTable, FaultRelay, TableMapper, fault_relay};
use crate::pci::PciDevice;
use crate::pci::regs::{COMMAND, COMMAND_BUS_MASTER, COMMAND_IO, COMMAND_MEMORY};
use crate::platform::DeviceEvent;
use crate::platform::test_support::EventRecorder;
use crate::ram::Ram;
use crate::state::DeviceState;

/// Offset from guest-physical addresses to IOVAs, for a device behind the IOMMU.
pub(super) const OFFSET: u64 = 0x1000_0000;
/// I/O port of the first doorbell.
pub(super) const NOTIFY_PORT: u64 = 0xc000;
/// Offset of the device configuration in the first BAR.
const CONFIG: u64 = 0x2000;
/// Maximum number of queues of a device.
const QUEUES: usize = 8;
/// `VIRTIO_F_ACCESS_PLATFORM`, a feature of the transport.
const ACCESS_PLATFORM: u64 = 1 << 33;

/// Flags of a descriptor.
pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;

/// Descriptor: address, length and flags.
pub(super) type Part = (u64, u32, u16);

/// Placement of a driver's queues.
#[derive(Clone, Copy)]
pub(super) struct Rings {
    /// Addresses of the first queue's descriptor table, available ring and used ring.
    pub(super) first: [u64; 3],
    /// Distance in bytes between the rings of two consecutive queues.
    pub(super) stride: u64,
    /// Number of elements of each queue.
    pub(super) size: u16,
}

impl Rings {
    /// Returns the addresses of a queue's descriptor table, available ring and used ring.
    pub(super) fn of(&self, queue: u16) -> [u64; 3] {
        self.first.map(|ring| ring + self.stride * u64::from(queue))
    }
}

/// Host interfaces and guest memory for a new device.
pub(super) struct TestPlatform {
    pub(super) ram: Arc<Ram>,
    /// Memory that the device can access.
    pub(super) memory: DeviceMemory,
    pub(super) recorder: Arc<EventRecorder>,
    pub(super) doorbells: Arc<FakeDoorbells>,
    mapper: Option<TableMapper>,
    relay: FaultRelay,
}

impl TestPlatform {
    /// Returns a platform with `bytes` bytes of guest RAM. If `translated` is true, the device is behind the IOMMU and can access only
    /// mapped memory.
    pub(super) fn new(bytes: usize, translated: bool) -> Self {
        let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), bytes)]).unwrap());
        let (sender, relay) = fault_relay();
        let table = translated.then(|| Arc::new(DmaTable::new("device", ram.clone(), Some((8, sender)))));
        let memory = table.clone().map_or_else(|| DeviceMemory::all_ram(ram.clone()), DeviceMemory::mapped);
        let mapper = table.map(TableMapper::new);
        Self { ram, memory, recorder: Arc::default(), doorbells: Arc::default(), mapper, relay }
    }

    /// Returns a driver for `device`. `rings` gives the positions of the queues. `more` is additional state for the tests of this device
    /// type.
    pub(super) fn drive<D, M>(
        self,
        (function, device): (Arc<VirtioPciDevice>, Arc<D>),
        rings: Rings,
        more: M,
    ) -> TestDriver<D, M> {
        let Self { ram, recorder, doorbells, mapper, relay, .. } = self;
        function.assign_bar(1, NOTIFY_PORT);
        function.write_config(COMMAND, &(COMMAND_BUS_MASTER | COMMAND_MEMORY | COMMAND_IO).to_le_bytes());
        function.bar_moved(1, NOTIFY_PORT).unwrap();
        let (added, descriptors) = ([0; QUEUES], [0; QUEUES]);
        TestDriver { function, device, more, ram, recorder, doorbells, mapper, relay, rings, added, descriptors }
    }
}

/// Device `D` with its driver. The value dereferences to `more`: additional state for the tests of this device type.
pub(super) struct TestDriver<D, M = ()> {
    pub(super) function: Arc<VirtioPciDevice>,
    pub(super) device: Arc<D>,
    pub(super) more: M,
    pub(super) ram: Arc<Ram>,
    pub(super) recorder: Arc<EventRecorder>,
    pub(super) doorbells: Arc<FakeDoorbells>,
    /// `None` if the device is not behind the IOMMU.
    pub(super) mapper: Option<TableMapper>,
    pub(super) relay: FaultRelay,
    rings: Rings,
    /// Number of elements that were added to each queue's available ring.
    pub(super) added: [u16; QUEUES],
    /// Next descriptor of each queue.
    pub(super) descriptors: [u16; QUEUES],
}

impl<D, M> Deref for TestDriver<D, M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.more
    }
}

impl<D, M> DerefMut for TestDriver<D, M> {
    fn deref_mut(&mut self) -> &mut M {
        &mut self.more
    }
}

impl<D, M> TestDriver<D, M> {
    /// Returns the offset from guest-physical addresses to the addresses that the device uses.
    pub(super) fn offset(&self) -> u64 {
        if self.mapper.is_some() { OFFSET } else { 0 }
    }

    /// Maps guest RAM for the device, if the device is behind the IOMMU.
    pub(super) fn map(&mut self, gpa: u64, len: u64, permissions: Permissions) {
        let slice = self.ram.get_slice(GuestAddress(gpa), usize::try_from(len).unwrap()).unwrap();
        if let Some(mapper) = &mut self.mapper {
            mapper.map(gpa + OFFSET, slice, permissions).unwrap();
        }
    }

    /// Maps these pages of guest RAM for reads and writes.
    pub(super) fn map_pages(&mut self, pages: impl IntoIterator<Item = u64>) {
        for page in pages {
            self.map(page, 0x1000, Permissions::READ | Permissions::WRITE);
        }
    }

    /// Reads the first BAR at `offset`. The BAR contains the transport's structures.
    pub(super) fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.function.read_bar(0, offset, &mut bytes);
        bytes
    }

    /// Writes the first BAR at `offset`.
    pub(super) fn write(&self, offset: u64, data: &[u8]) {
        self.function.write_bar(0, offset, data);
    }

    pub(super) fn status(&self) -> u8 {
        self.read::<1>(20)[0]
    }

    /// Returns the generation of the device configuration.
    pub(super) fn generation(&self) -> u8 {
        self.read::<1>(21)[0]
    }

    /// Reads the device configuration at `offset`.
    pub(super) fn config<const N: usize>(&self, offset: u64) -> [u8; N] {
        self.read(CONFIG + offset)
    }

    /// Checks the PCI vendor and device ID.
    pub(super) fn check_id(&self, device_type: u16) {
        let mut id = [0; 4];
        self.function.read_config(0, &mut id);
        assert_eq!(u32::from_le_bytes(id), (u32::from(device_type) + 0x1040) << 16 | 0x1af4);
    }

    /// Initializes the device as its driver would. The driver accepts `features` and the transport's features, and enables these queues.
    pub(super) fn set_up(&self, features: u64, queues: impl IntoIterator<Item = u16>) {
        self.set_up_at(self.rings, features, queues);
    }

    /// Initializes the device like [`set_up`](Self::set_up), with the queues at `rings`.
    pub(super) fn set_up_at(&self, rings: Rings, features: u64, queues: impl IntoIterator<Item = u16>) {
        let features = features | if self.mapper.is_some() { ACCESS_PLATFORM } else { 0 };
        let queues =
            queues.into_iter().map(|queue| (queue, rings.size, rings.of(queue).map(|ring| ring + self.offset())));
        assert!(set_up(&self.function, features, queues), "features are accepted");
    }

    /// Resets the device, and clears the rings of these queues.
    pub(super) fn reset(&mut self, queues: impl IntoIterator<Item = u16>) {
        self.write(20, &[0]);
        assert_eq!(self.status(), 0);
        for ring in queues.into_iter().flat_map(|queue| self.rings.of(queue)) {
            self.fill(ring, &[0; 0x1000]);
        }
        (self.added, self.descriptors) = ([0; QUEUES], [0; QUEUES]);
    }

    /// Adds a chain to a queue. The addresses in `parts` are written unchanged. Returns the head index.
    pub(super) fn chain(&mut self, queue: u16, parts: &[Part]) -> u16 {
        let next = &mut self.descriptors[usize::from(queue)];
        let head = *next;
        *next = (head + u16::try_from(parts.len()).unwrap()) % self.rings.size;
        self.chain_at(queue, head, parts);
        head
    }

    /// Adds a chain to a queue. The chain's first descriptor has index `head`, and the other descriptors follow directly.
    pub(super) fn chain_at(&mut self, queue: u16, head: u16, parts: &[Part]) {
        let [table, available, _] = self.rings.of(queue);
        let size = self.rings.size;
        for (index, (address, len, flags)) in (head..).zip(parts) {
            let place = table + 16 * u64::from(index % size);
            self.ram.write_obj(*address, GuestAddress(place)).unwrap();
            self.ram.write_obj(*len, GuestAddress(place + 8)).unwrap();
            self.ram.write_obj(*flags, GuestAddress(place + 12)).unwrap();
            self.ram.write_obj((index + 1) % size, GuestAddress(place + 14)).unwrap();
        }
        let added = &mut self.added[usize::from(queue)];
        let slot = u64::from(*added % size);
        *added = added.wrapping_add(1);
        self.ram.write_obj(head, GuestAddress(available + 4 + 2 * slot)).unwrap();
        self.ram.write_obj(*added, GuestAddress(available + 2)).unwrap();
    }

    /// Adds a chain with one buffer to a queue. If the flags of `part` contain `NEXT`, the chain continues at a descriptor outside the
    /// table.
    pub(super) fn chain_to_nowhere(&mut self, queue: u16, part: Part) {
        let head = self.chain(queue, &[part]);
        let next = self.rings.of(queue)[0] + 16 * u64::from(head) + 14;
        self.ram.write_obj(99u16, GuestAddress(next)).unwrap();
    }

    /// Notifies the device of buffers in a queue.
    pub(super) fn ring(&self, queue: u16) {
        self.function.write_bar(1, 4 * u64::from(queue), &queue.to_le_bytes());
    }

    /// Returns the number of elements that the device has added to the used ring.
    pub(super) fn used(&self, queue: u16) -> u16 {
        self.ram.read_obj(GuestAddress(self.rings.of(queue)[2] + 2)).unwrap()
    }

    /// Returns the head index and the number of written bytes of an element of the used ring.
    pub(super) fn used_element(&self, queue: u16, element: u16) -> (u32, u32) {
        let place = self.rings.of(queue)[2] + 4 + 8 * u64::from(element % self.rings.size);
        [place, place + 4].map(|place| self.ram.read_obj(GuestAddress(place)).unwrap()).into()
    }

    /// Returns the number of bytes that were written to the chain of the last used element.
    pub(super) fn last_len(&self, queue: u16) -> u32 {
        self.used_element(queue, self.used(queue).wrapping_sub(1)).1
    }

    /// Waits until the device has used all chains of a queue.
    #[track_caller]
    pub(super) fn served(&self, queue: u16) {
        wait_until(|| self.used(queue) == self.added[usize::from(queue)]);
    }

    /// Waits until the device needs a reset.
    #[track_caller]
    pub(super) fn broken(&self) {
        wait_until(|| self.status() & 64 != 0);
    }

    /// Checks that the device needs a reset, has used no chain of `queue`, and can be reset.
    #[track_caller]
    pub(super) fn fails_until_reset(&self, queue: u16) {
        self.broken();
        assert_eq!(self.used(queue), 0);
        self.write(20, &[0]);
        assert_eq!(self.status(), 0);
        assert_eq!(self.recorder.take(), [DeviceEvent::Activated, DeviceEvent::Failed, DeviceEvent::Reset]);
    }

    /// Writes to guest RAM.
    pub(super) fn fill(&self, address: u64, bytes: &[u8]) {
        self.ram.write_slice(bytes, GuestAddress(address)).unwrap();
    }

    /// Reads guest RAM.
    pub(super) fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    /// Copies the RAM of `old`, so that this driver continues where the driver of `old` stopped. Does not change the state of this device.
    pub(super) fn continue_from(&mut self, old: &Self) {
        self.fill(0, &old.bytes(0, usize::try_from(old.ram.last_addr().0 + 1).unwrap()));
        (self.added, self.descriptors) = (old.added, old.descriptors);
    }

    /// Copies the RAM and the device state of `old`, so that this driver continues where the driver of `old` stopped. The device of `old`
    /// must be paused. This device must have the same mappings.
    pub(super) fn restore_from(&mut self, old: &Self) {
        self.continue_from(old);
        let state = old.function.save().unwrap();
        let text = serde_json::to_string(&state).unwrap();
        self.function.restore(&serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(self.function.save().unwrap(), state);
    }

    /// Sets the field at the JSON pointer `pointer` of `state` to `value`. Checks that the device rejects the changed state, and can be
    /// reset afterwards.
    pub(super) fn refuses(&self, state: &DeviceState, pointer: &str, value: &Value) {
        let mut state = state.clone();
        // If the state does not contain the field yet, this line adds the field to its object.
        let (object, field) = pointer.rsplit_once('/').unwrap();
        state.payload.pointer_mut(object).expect(pointer)[field] = value.clone();
        assert!(self.function.restore(&state).is_err(), "{pointer} {value}");
        self.function.reset().unwrap();
        assert_eq!(self.status(), 0);
    }

    /// Applies `changes` to `state`. Checks that the device can be reset after it has restored or rejected the changed state.
    pub(super) fn survives(&self, state: &DeviceState, changes: Changes) {
        let mut value = serde_json::to_value(state).unwrap();
        for (place, with) in changes {
            spoil(&mut value, place, with);
        }
        self.function.pause();
        if let Ok(state) = serde_json::from_value(value)
            && self.function.restore(&state).is_ok()
        {
            self.function.save().unwrap();
            self.function.resume();
            self.function.pause();
        }
        self.function.reset().unwrap();
        assert_eq!(self.status(), 0);
    }
}

/// Changes to a saved state. Each change has the arguments `place` and `with` of [`spoil`].
pub(super) type Changes = Vec<(usize, u64)>;

/// Generates random changes to a saved state.
pub(super) fn changes() -> impl Strategy<Value = Changes> {
    prop::collection::vec((any::<usize>(), any::<u64>()), 1..4)
}

/// Waits until `is_so` returns true.
#[track_caller]
pub(super) fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "the condition is still false after 60 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}
