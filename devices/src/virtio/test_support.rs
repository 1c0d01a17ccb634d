// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Platform for the tests of virtio devices: interrupt vectors, doorbells and memory slots that record their use.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, VolatileSlice};
use vmm_sys_util::eventfd::EventFd;

use crate::pci::PciDevice;
use crate::pci::regs::{COMMAND, COMMAND_BUS_MASTER};
use crate::platform::{Doorbells, HostRange, MemorySlots, MsiAllocator, MsiMessage, MsiVectors, Space};
use crate::ram::Ram;
use crate::sync::lock;
use crate::virtio::byte_driver::queue_at;
use crate::virtio::{DeviceError, Interrupt, VirtioPciDevice};

/// Time after which a test assumes that a device action will not happen.
pub(super) const SOON: Duration = Duration::from_millis(20);

/// Turns bus mastering of a function on or off, as its driver would.
pub(super) fn set_bus_master(function: &VirtioPciDevice, on: bool) {
    let mut command = [0; 2];
    function.read_config(COMMAND, &mut command);
    let others = u16::from_le_bytes(command) & !COMMAND_BUS_MASTER;
    let command = others | if on { COMMAND_BUS_MASTER } else { 0 };
    function.write_config(COMMAND, &command.to_le_bytes());
}

/// Interrupt vectors that count how often each vector was raised.
pub(super) struct FakeVectors {
    raised: Vec<AtomicU32>,
}

impl FakeVectors {
    /// Returns how often `vector` was raised.
    pub(super) fn raised(&self, vector: u16) -> u32 {
        self.raised[usize::from(vector)].load(Ordering::SeqCst)
    }
}

impl MsiVectors for FakeVectors {
    fn count(&self) -> u16 {
        u16::try_from(self.raised.len()).unwrap()
    }
    fn event(&self, _: u16) -> Option<&EventFd> {
        None
    }
    fn route(&self, _: u16, _: Option<MsiMessage>) -> io::Result<()> {
        Ok(())
    }
    fn trigger(&self, vector: u16) -> io::Result<()> {
        self.raised[usize::from(vector)].fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// Allocator of [`FakeVectors`]. The allocator keeps a reference to the last allocated vectors.
#[derive(Default)]
pub(super) struct FakeMsi(Mutex<Option<Arc<FakeVectors>>>);

impl FakeMsi {
    /// Returns the last allocated vectors.
    pub(super) fn vectors(&self) -> Arc<FakeVectors> {
        lock(&self.0).clone().expect("a device was created")
    }
}

impl MsiAllocator for FakeMsi {
    fn allocate(&self, count: u16) -> io::Result<Arc<dyn MsiVectors>> {
        let vectors = Arc::new(FakeVectors { raised: (0..count).map(|_| AtomicU32::new(0)).collect() });
        *lock(&self.0) = Some(vectors.clone());
        Ok(vectors)
    }
}

/// Doorbells that a test rings as the kernel would.
#[derive(Default)]
pub(super) struct FakeDoorbells(Mutex<BTreeMap<u64, EventFd>>);

impl FakeDoorbells {
    /// Returns the number of connected doorbells.
    pub(super) fn count(&self) -> usize {
        lock(&self.0).len()
    }

    /// Writes the doorbell at `address`, as the kernel does for a write of the guest.
    pub(super) fn ring(&self, address: u64) {
        lock(&self.0)[&address].write(1).unwrap();
    }
}

impl Doorbells for FakeDoorbells {
    fn connect(&self, space: Space, address: u64, event: &EventFd) -> io::Result<()> {
        assert_eq!(space, Space::Port);
        assert!(lock(&self.0).insert(address, event.try_clone()?).is_none(), "connected twice");
        Ok(())
    }

    fn disconnect(&self, _: Space, address: u64, _: &EventFd) -> io::Result<()> {
        assert!(lock(&self.0).remove(&address).is_some(), "not connected");
        Ok(())
    }
}

/// Memory slots that a test accesses in place of the guest.
#[derive(Default)]
pub(crate) struct FakeSlots {
    slots: Mutex<BTreeMap<u32, (u64, HostRange)>>,
    next: AtomicU32,
    /// If true, the next insert fails.
    pub(crate) fail: AtomicBool,
    /// Number of removals that fail before a removal succeeds.
    pub(crate) kept: AtomicU32,
    removed: AtomicU32,
}

impl FakeSlots {
    /// Returns the number of slots.
    pub(crate) fn len(&self) -> usize {
        lock(&self.slots).len()
    }

    /// Returns the number of slots that were removed.
    pub(crate) fn removed(&self) -> u32 {
        self.removed.load(Ordering::SeqCst)
    }

    /// Returns the part of a slot's host memory that begins at `gpa`, or `None` if no slot contains `gpa`.
    pub(crate) fn at(&self, gpa: u64) -> Option<HostRange> {
        lock(&self.slots).values().find(|(base, host)| (*base..base + host.len as u64).contains(&gpa)).map(
            |(base, host)| {
                let offset = usize::try_from(gpa - base).unwrap();
                HostRange { address: host.address + offset, len: host.len - offset }
            },
        )
    }

    /// Reads a byte as the guest would.
    pub(crate) fn load(&self, gpa: u64) -> u8 {
        self.slice(gpa).load_byte()
    }

    /// Writes a byte as the guest would.
    pub(crate) fn store(&self, gpa: u64, value: u8) {
        self.slice(gpa).copy_from(&[value]);
    }

    fn slice(&self, gpa: u64) -> VolatileSlice<'_> {
        let host = self.at(gpa).expect("the guest has memory at this address");
        // SAFETY: The caller of `insert` promised that the range stays mapped until the slot is removed.
        unsafe { VolatileSlice::new(std::ptr::with_exposed_provenance_mut(host.address), host.len) }
    }
}

trait LoadByte {
    fn load_byte(&self) -> u8;
}

impl LoadByte for VolatileSlice<'_> {
    fn load_byte(&self) -> u8 {
        let mut byte = [0u8];
        self.copy_to(&mut byte);
        byte[0]
    }
}

impl MemorySlots for FakeSlots {
    unsafe fn insert(&self, gpa: u64, host: HostRange, read_only: bool) -> io::Result<u32> {
        assert!(!read_only);
        if self.fail.swap(false, Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let mut slots = lock(&self.slots);
        let end = gpa + host.len as u64;
        assert!(slots.values().all(|(base, other)| end <= *base || base + other.len as u64 <= gpa), "slots overlap");
        let slot = self.next.fetch_add(1, Ordering::SeqCst);
        slots.insert(slot, (gpa, host));
        Ok(slot)
    }

    fn remove(&self, slot: u32) -> io::Result<()> {
        let kept = self.kept.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if kept.is_ok() {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        assert!(lock(&self.slots).remove(&slot).is_some(), "no slot {slot}");
        self.removed.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// Changes one JSON value of a saved state. The value's index is `place` modulo the number of values. `with` selects the change:
/// * A number becomes another number.
/// * An array loses its last element, or a copy of its first element is appended.
/// * A boolean is inverted.
/// * `null` becomes a number.
/// * A string or object becomes `null`.
pub(crate) fn spoil(state: &mut Value, place: usize, with: u64) {
    fn count(value: &Value) -> usize {
        1 + match value {
            Value::Array(elements) => elements.iter().map(count).sum(),
            Value::Object(fields) => fields.values().map(count).sum(),
            _ => 0,
        }
    }
    fn change(value: &mut Value, mut place: usize, with: u64) {
        if place > 0 {
            place -= 1;
            let parts: Vec<&mut Value> = match value {
                Value::Array(elements) => elements.iter_mut().collect(),
                Value::Object(fields) => fields.values_mut().collect(),
                _ => Vec::new(),
            };
            for part in parts {
                let inside = count(part);
                if place < inside {
                    return change(part, place, with);
                }
                place -= inside;
            }
            return;
        }
        // Small numbers, and numbers near the old number, are the most likely to find a mistake.
        let small = with >> (with % 64);
        match value {
            Value::Array(elements) if with.is_multiple_of(2) => drop(elements.pop()),
            Value::Array(elements) => elements.extend(elements.first().cloned()),
            Value::Number(number) => {
                let old = number.as_u64().unwrap_or(0);
                let new = [small, old.wrapping_add(1), old.wrapping_sub(1), old << 1, old ^ small, old | 1 << 63];
                *value = new[usize::try_from(with % 6).unwrap_or(0)].into();
            }
            Value::Bool(old) => *value = (!*old).into(),
            Value::Null => *value = small.into(),
            _ => *value = Value::Null,
        }
    }
    change(state, place % count(state), with);
}

/// Driver with `EVENT_IDX` whose interrupt handler adds the chain at descriptor 0 again, until the chain was added `most` times. The driver
/// counts the interrupts that it receives and the notifications that it must send.
pub(super) struct BusyDriver {
    ram: Arc<Ram>,
    queue: Queue,
    most: u16,
    /// Number of chains that were added.
    added: Mutex<u16>,
    interrupts: AtomicU32,
    notifications: AtomicU32,
}

impl BusyDriver {
    /// Returns a queue with `EVENT_IDX`: the descriptor table is at 0x1000, the available ring at 0x2000 and the used ring at 0x3000.
    pub(super) fn queue(size: u16) -> Queue {
        let mut queue = queue_at(size, [0x1000, 0x2000, 0x3000]);
        queue.set_event_idx(true);
        queue
    }

    /// Returns a driver of `queue`, whose rings are in `ram`.
    pub(super) fn new(ram: Arc<Ram>, queue: &Queue, most: u16) -> Self {
        // `view` has no descriptor table: the driver uses only the addresses of the available ring and the used ring.
        let view = queue_at(queue.size(), [0, queue.avail_ring(), queue.used_ring()]);
        Self {
            ram,
            queue: view,
            most,
            added: Mutex::default(),
            interrupts: AtomicU32::default(),
            notifications: AtomicU32::default(),
        }
    }

    /// Adds the chain.
    pub(super) fn add(&self) {
        let mut added = lock(&self.added);
        let (size, old) = (self.queue.size(), *added);
        *added += 1;
        let available = GuestAddress(self.queue.avail_ring());
        let used = GuestAddress(self.queue.used_ring());
        self.ram.write_obj(0u16, available.unchecked_add(4 + 2 * u64::from(old % size))).unwrap();
        self.ram.store(*added, available.unchecked_add(2), Ordering::Release).unwrap();
        fence(Ordering::SeqCst);
        let event: u16 = self.ram.load(used.unchecked_add(4 + 8 * u64::from(size)), Ordering::Acquire).unwrap();
        if added.wrapping_sub(event).wrapping_sub(1) < added.wrapping_sub(old) {
            self.notifications.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Returns the number of chains that the device has used.
    pub(super) fn used(&self) -> u16 {
        self.ram.load(GuestAddress(self.queue.used_ring()).unchecked_add(2), Ordering::Acquire).unwrap()
    }

    /// Returns the number of interrupts, and the number of notifications that the driver had to send.
    pub(super) fn counts(&self) -> (u32, u32) {
        (self.interrupts.load(Ordering::SeqCst), self.notifications.load(Ordering::SeqCst))
    }
}

impl Interrupt for BusyDriver {
    fn queue_used(&self, _: u16) {
        self.interrupts.fetch_add(1, Ordering::SeqCst);
        // Ask for an interrupt for the next used chain too.
        let used_event = GuestAddress(self.queue.avail_ring()).unchecked_add(4 + 2 * u64::from(self.queue.size()));
        self.ram.store(self.used(), used_event, Ordering::Release).unwrap();
        if *lock(&self.added) < self.most {
            self.add();
        }
    }
    fn config_changed(&self, _: bool) {}
    fn failed(&self, error: &DeviceError) {
        panic!("{error}");
    }
}
