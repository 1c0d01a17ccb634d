// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A device behind its PCI transport, with a driver that a test plays.

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
use crate::platform::test_support::Witness;
use crate::ram::Ram;
use crate::state::DeviceState;

/// Distance from guest-physical addresses to IOVAs, for a device behind the IOMMU.
pub(super) const OFFSET: u64 = 0x1000_0000;
/// Port of the first doorbell.
pub(super) const NOTIFY_PORT: u64 = 0xc000;
/// Device configuration in the first BAR.
const CONFIG: u64 = 0x2000;
/// Maximum number of queues of a device.
const QUEUES: usize = 8;
/// A feature of the transport.
const ACCESS_PLATFORM: u64 = 1 << 33;

/// Flags of a descriptor.
pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;

/// A descriptor: address, length, flags.
pub(super) type Part = (u64, u32, u16);

/// Queues of a driver.
#[derive(Clone, Copy)]
pub(super) struct Rings {
    /// Descriptors, available ring and used ring of the first queue.
    pub(super) first: [u64; 3],
    /// Bytes from a queue's rings to the next one's.
    pub(super) stride: u64,
    /// Number of elements of each queue.
    pub(super) size: u16,
}

impl Rings {
    /// Descriptors, available ring and used ring of a queue.
    pub(super) fn of(&self, queue: u16) -> [u64; 3] {
        self.first.map(|ring| ring + self.stride * u64::from(queue))
    }
}

/// The host and the guest's memory, for a device that is to be made.
pub(super) struct TestPlatform {
    pub(super) ram: Arc<Ram>,
    /// Memory as the device sees it.
    pub(super) memory: DeviceMemory,
    pub(super) witness: Arc<Witness>,
    pub(super) doorbells: Arc<FakeDoorbells>,
    mapper: Option<TableMapper>,
    relay: FaultRelay,
}

impl TestPlatform {
    /// Guest RAM of `bytes` bytes. If `translated`, the device is behind the IOMMU and sees only what is mapped.
    pub(super) fn new(bytes: usize, translated: bool) -> Self {
        let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), bytes)]).unwrap());
        let (sender, relay) = fault_relay();
        let table = translated.then(|| Arc::new(DmaTable::new("device", ram.clone(), Some((8, sender)))));
        let memory = table.clone().map_or_else(|| DeviceMemory::all_ram(ram.clone()), DeviceMemory::mapped);
        let mapper = table.map(TableMapper::new);
        Self { ram, memory, witness: Arc::default(), doorbells: Arc::default(), mapper, relay }
    }

    /// Drives `device`, whose queues have these rings. `more` is what only the tests of this device need.
    pub(super) fn drive<D, M>(
        self,
        (function, device): (Arc<VirtioPciDevice>, Arc<D>),
        rings: Rings,
        more: M,
    ) -> TestDriver<D, M> {
        let Self { ram, witness, doorbells, mapper, relay, .. } = self;
        function.assign_bar(1, NOTIFY_PORT);
        function.write_config(COMMAND, &(COMMAND_BUS_MASTER | COMMAND_MEMORY | COMMAND_IO).to_le_bytes());
        function.bar_moved(1, NOTIFY_PORT).unwrap();
        let (added, descriptors) = ([0; QUEUES], [0; QUEUES]);
        TestDriver { function, device, more, ram, witness, doorbells, mapper, relay, rings, added, descriptors }
    }
}

/// A device `D` with its driver. It dereferences to what only the tests of this device need.
pub(super) struct TestDriver<D, M = ()> {
    pub(super) function: Arc<VirtioPciDevice>,
    pub(super) device: Arc<D>,
    pub(super) more: M,
    pub(super) ram: Arc<Ram>,
    pub(super) witness: Arc<Witness>,
    pub(super) doorbells: Arc<FakeDoorbells>,
    /// `None` if the device is not behind the IOMMU.
    pub(super) mapper: Option<TableMapper>,
    pub(super) relay: FaultRelay,
    rings: Rings,
    /// Elements that were put into the available rings, by queue.
    pub(super) added: [u16; QUEUES],
    /// The next descriptor, by queue.
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
    /// Distance from guest-physical addresses to those that the device uses.
    pub(super) fn offset(&self) -> u64 {
        if self.mapper.is_some() { OFFSET } else { 0 }
    }

    /// Maps guest RAM for the device, if it is behind the IOMMU.
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

    /// Reads from the structures of the transport.
    pub(super) fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.function.read_bar(0, offset, &mut bytes);
        bytes
    }

    /// Writes to the structures of the transport.
    pub(super) fn write(&self, offset: u64, data: &[u8]) {
        self.function.write_bar(0, offset, data);
    }

    pub(super) fn status(&self) -> u8 {
        self.read::<1>(20)[0]
    }

    /// Generation of the device configuration.
    pub(super) fn generation(&self) -> u8 {
        self.read::<1>(21)[0]
    }

    /// The device configuration at `offset`.
    pub(super) fn config<const N: usize>(&self, offset: u64) -> [u8; N] {
        self.read(CONFIG + offset)
    }

    /// Checks the PCI vendor and device ID.
    pub(super) fn check_id(&self, device_type: u16) {
        let mut id = [0; 4];
        self.function.read_config(0, &mut id);
        assert_eq!(u32::from_le_bytes(id), (u32::from(device_type) + 0x1040) << 16 | 0x1af4);
    }

    /// Sets the device up as a driver does that accepts `features` in addition to those of the transport, and uses these queues.
    pub(super) fn set_up(&self, features: u64, queues: impl IntoIterator<Item = u16>) {
        self.set_up_at(self.rings, features, queues);
    }

    /// As [`set_up`](Self::set_up), with other rings.
    pub(super) fn set_up_at(&self, rings: Rings, features: u64, queues: impl IntoIterator<Item = u16>) {
        let features = features | if self.mapper.is_some() { ACCESS_PLATFORM } else { 0 };
        let queues =
            queues.into_iter().map(|queue| (queue, rings.size, rings.of(queue).map(|ring| ring + self.offset())));
        assert!(set_up(&self.function, features, queues), "features are accepted");
    }

    /// Takes the device away from its driver, and clears its rings.
    pub(super) fn reset(&mut self, queues: impl IntoIterator<Item = u16>) {
        self.write(20, &[0]);
        assert_eq!(self.status(), 0);
        for ring in queues.into_iter().flat_map(|queue| self.rings.of(queue)) {
            self.fill(ring, &[0; 0x1000]);
        }
        (self.added, self.descriptors) = ([0; QUEUES], [0; QUEUES]);
    }

    /// Puts a chain into a queue, with addresses as the driver names them. Returns its head.
    pub(super) fn chain(&mut self, queue: u16, parts: &[Part]) -> u16 {
        let next = &mut self.descriptors[usize::from(queue)];
        let head = *next;
        *next = (head + u16::try_from(parts.len()).unwrap()) % self.rings.size;
        self.chain_at(queue, head, parts);
        head
    }

    /// The same with its first descriptor at `head`. The others follow.
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

    /// Puts a buffer into a queue. If its flags name a next descriptor, that is not in the table.
    pub(super) fn chain_to_nowhere(&mut self, queue: u16, part: Part) {
        let head = self.chain(queue, &[part]);
        let next = self.rings.of(queue)[0] + 16 * u64::from(head) + 14;
        self.ram.write_obj(99u16, GuestAddress(next)).unwrap();
    }

    /// Notifies the device of a queue.
    pub(super) fn ring(&self, queue: u16) {
        self.function.write_bar(1, 4 * u64::from(queue), &queue.to_le_bytes());
    }

    /// Number of elements that the device has put into the used ring.
    pub(super) fn used(&self, queue: u16) -> u16 {
        self.ram.read_obj(GuestAddress(self.rings.of(queue)[2] + 2)).unwrap()
    }

    /// Head and written bytes of an element of the used ring.
    pub(super) fn used_element(&self, queue: u16, element: u16) -> (u32, u32) {
        let place = self.rings.of(queue)[2] + 4 + 8 * u64::from(element % self.rings.size);
        [place, place + 4].map(|place| self.ram.read_obj(GuestAddress(place)).unwrap()).into()
    }

    /// Bytes that were written to the chain of the last used element.
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
        assert_eq!(self.witness.take(), [DeviceEvent::Activated, DeviceEvent::Failed, DeviceEvent::Reset]);
    }

    /// Writes to guest RAM.
    pub(super) fn fill(&self, address: u64, bytes: &[u8]) {
        self.ram.write_slice(bytes, GuestAddress(address)).unwrap();
    }

    /// Bytes of guest RAM.
    pub(super) fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    /// Continues as the driver of `old`, with its RAM. The device stays as it is.
    pub(super) fn continue_from(&mut self, old: &Self) {
        self.fill(0, &old.bytes(0, usize::try_from(old.ram.last_addr().0 + 1).unwrap()));
        (self.added, self.descriptors) = (old.added, old.descriptors);
    }

    /// The same with the state of the device of `old`, which is paused. The mappings of `old` must exist here.
    pub(super) fn restore_from(&mut self, old: &Self) {
        self.continue_from(old);
        let state = old.function.save().unwrap();
        let text = serde_json::to_string(&state).unwrap();
        self.function.restore(&serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(self.function.save().unwrap(), state);
    }

    /// Checks that the device refuses `state` with another value at `pointer`, and can be reset afterwards.
    pub(super) fn refuses(&self, state: &DeviceState, pointer: &str, value: &Value) {
        let mut state = state.clone();
        // The field may be missing.
        let (object, field) = pointer.rsplit_once('/').unwrap();
        state.payload.pointer_mut(object).expect(pointer)[field] = value.clone();
        assert!(self.function.restore(&state).is_err(), "{pointer} {value}");
        self.function.reset().unwrap();
        assert_eq!(self.status(), 0);
    }

    /// Checks that the device can be reset after `state` with some `changes` was restored or refused.
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

/// Changes to a saved state, each a place and a value for [`spoil`].
pub(super) type Changes = Vec<(usize, u64)>;

/// Some changes to a saved state.
pub(super) fn changes() -> impl Strategy<Value = Changes> {
    prop::collection::vec((any::<usize>(), any::<u64>()), 1..4)
}

/// Waits until `is_so`.
#[track_caller]
pub(super) fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "it takes too long");
        std::thread::sleep(Duration::from_millis(1));
    }
}
