// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Map from the addresses of the guest's port I/O and memory-mapped I/O (MMIO) to devices.

use std::io;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, Weak};

use devices::host_memory::{Cause, Loss};
use devices::platform::{AddressSpace, BusDevice, Space};
use vm_device::bus::{Bus, BusRange, MmioAddress, PioAddress};

/// Memory access of a guest.
pub enum Access<'d> {
    /// Read. The result is stored in these bytes.
    Read(&'d mut [u8]),
    /// Write of these bytes.
    Write(&'d [u8]),
}

/// Guest memory in KVM's memory slots. If KVM has to emulate an access to such memory, and the host does not supply the page, KVM reports
/// the access as MMIO.
pub trait SlotMemory: Send + Sync {
    /// Performs an access in place of KVM. Returns false if no slot contains the accessed memory, or if the slot does not allow the access.
    /// In these cases, the access is real MMIO.
    ///
    /// # Errors
    /// The page is lost.
    fn access(&self, address: u64, access: Access<'_>) -> Result<bool, Loss>;
    /// Returns the loss to report if KVM cannot access the page at `address`.
    fn loss(&self, address: u64) -> Loss;
}

/// Device in the memory space.
struct MemoryClaim {
    device: Arc<dyn BusDevice>,
    /// Result of [`BusDevice::is_memory`], cached so that an access need not call this method.
    is_memory: bool,
}

/// Ranges of the port space and the memory space, with their devices. A look-up takes O(log n) time and holds a shared lock. The lock is
/// released before the device is called, so that a device may change the map during an access.
#[derive(Default)]
pub struct IoMap {
    ports: RwLock<Bus<PioAddress, Arc<dyn BusDevice>>>,
    memory: RwLock<Bus<MmioAddress, MemoryClaim>>,
    slots: OnceLock<Weak<dyn SlotMemory>>,
}

impl IoMap {
    /// Sets the guest memory that [`Self::read_memory`] and [`Self::write_memory`] access at addresses where no device has registers. Only
    /// the first call has an effect.
    pub fn set_slots<S: SlotMemory + 'static>(&self, slots: &Arc<S>) {
        let slots: Weak<S> = Arc::downgrade(slots);
        self.slots.get_or_init(|| slots);
    }

    /// Reads from the memory space. Tries, in this order: a device that has registers at `address`, guest memory, and a device whose range
    /// is memory.
    ///
    /// # Errors
    /// A page of guest memory is lost.
    pub fn read_memory(&self, address: u64, data: &mut [u8]) -> Result<(), Loss> {
        match self.find_memory(address, data.len()) {
            Some((offset, device, false)) => {
                data.fill(0xff);
                device.read(offset, data);
            }
            _ if self.access_slot(address, Access::Read(data))? => {}
            _ => self.read(Space::Memory, address, data),
        }
        Ok(())
    }

    /// Writes to the memory space. Tries, in this order: a device that has registers at `address`, guest memory, and a device whose range
    /// is memory.
    ///
    /// # Errors
    /// A page of guest memory is lost.
    pub fn write_memory(&self, address: u64, data: &[u8]) -> Result<(), Loss> {
        match self.find_memory(address, data.len()) {
            Some((offset, device, false)) => device.write(offset, data),
            _ if self.access_slot(address, Access::Write(data))? => {}
            _ => self.write(Space::Memory, address, data),
        }
        Ok(())
    }

    /// Returns the loss to report if KVM cannot access the page of guest memory at `address`.
    pub fn loss(&self, address: u64) -> Loss {
        let unknown = || Loss { address: None, gpa: Some(address), cause: Cause::Missing };
        self.slots.get().and_then(Weak::upgrade).map_or_else(unknown, |slots| slots.loss(address))
    }

    fn access_slot(&self, address: u64, access: Access<'_>) -> Result<bool, Loss> {
        self.slots.get().and_then(Weak::upgrade).map_or(Ok(false), |slots| slots.access(address, access))
    }

    /// Reads from `address`. If no device is at `address`, the bytes are all ones.
    pub fn read(&self, space: Space, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        match self.find(space, address, data.len()) {
            Some((offset, device)) => device.read(offset, data),
            None => log::trace!(
                "the guest reads {} bytes at {space:?} {address:#x}, but no device has this address",
                data.len()
            ),
        }
    }

    /// Writes to `address`. If no device is at `address`, the write is ignored.
    pub fn write(&self, space: Space, address: u64, data: &[u8]) {
        match self.find(space, address, data.len()) {
            Some((offset, device)) => device.write(offset, data),
            None => log::trace!(
                "the guest writes {} bytes at {space:?} {address:#x}, but no device has this address",
                data.len()
            ),
        }
    }

    /// Removes all ranges. This breaks the reference cycle between the map and devices that hold the map.
    fn clear(&self) {
        let ports = std::mem::take(&mut *self.ports.write().unwrap_or_else(PoisonError::into_inner));
        let memory = std::mem::take(&mut *self.memory.write().unwrap_or_else(PoisonError::into_inner));
        // Devices are dropped here, with no lock held.
        drop((ports, memory));
    }

    fn find(&self, space: Space, address: u64, len: usize) -> Option<(u64, Arc<dyn BusDevice>)> {
        match space {
            Space::Port => {
                let port = u16::try_from(address).ok()?;
                let bus = self.ports.read().unwrap_or_else(PoisonError::into_inner);
                let (range, device) = bus.check_access(PioAddress(port), len).ok()?;
                Some((u64::from(port - range.base().0), device.clone()))
            }
            Space::Memory => self.find_memory(address, len).map(|(offset, device, _)| (offset, device)),
        }
    }

    /// Finds the device whose range contains an access. Returns the offset in the range, the device, and true if the range is memory.
    fn find_memory(&self, address: u64, len: usize) -> Option<(u64, Arc<dyn BusDevice>, bool)> {
        let bus = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        let (range, claim) = bus.check_access(MmioAddress(address), len).ok()?;
        Some((address - range.base().0, claim.device.clone(), claim.is_memory))
    }
}

/// Owner of a map. Dropping the owner clears the map, even if other references to the map exist.
pub struct IoMapOwner(Arc<IoMap>);

impl IoMapOwner {
    /// Creates an empty map.
    pub fn new() -> Self {
        Self(Arc::new(IoMap::default()))
    }
}

impl Default for IoMapOwner {
    fn default() -> Self {
        Self::new()
    }
}

impl std::ops::Deref for IoMapOwner {
    type Target = Arc<IoMap>;

    fn deref(&self) -> &Arc<IoMap> {
        &self.0
    }
}

impl Drop for IoMapOwner {
    fn drop(&mut self) {
        self.0.clear();
    }
}

fn refused(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("the address range cannot be used: {what}"))
}

impl AddressSpace for IoMap {
    fn insert(&self, space: Space, base: u64, len: u64, device: Arc<dyn BusDevice>) -> io::Result<()> {
        match space {
            Space::Port => {
                let base = u16::try_from(base).map_err(refused)?;
                let range = BusRange::new(PioAddress(base), u16::try_from(len).map_err(refused)?).map_err(refused)?;
                self.ports.write().unwrap_or_else(PoisonError::into_inner).register(range, device).map_err(refused)
            }
            Space::Memory => {
                let range = BusRange::new(MmioAddress(base), len).map_err(refused)?;
                let device = MemoryClaim { is_memory: device.is_memory(), device };
                self.memory.write().unwrap_or_else(PoisonError::into_inner).register(range, device).map_err(refused)
            }
        }
    }

    fn remove(&self, space: Space, base: u64) {
        match space {
            Space::Port => {
                let Ok(port) = u16::try_from(base) else { return };
                let mut bus = self.ports.write().unwrap_or_else(PoisonError::into_inner);
                if bus.device(PioAddress(port)).is_some_and(|(range, _)| range.base().0 == port) {
                    bus.deregister(PioAddress(port));
                }
            }
            Space::Memory => {
                let mut bus = self.memory.write().unwrap_or_else(PoisonError::into_inner);
                if bus.device(MmioAddress(base)).is_some_and(|(range, _)| range.base().0 == base) {
                    bus.deregister(MmioAddress(base));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Constant(u8);

    impl BusDevice for Constant {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(self.0 + u8::try_from(offset).unwrap());
        }
        fn write(&self, _: u64, _: &[u8]) {}
    }

    fn map() -> IoMap {
        let map = IoMap::default();
        map.insert(Space::Memory, 0x1000, 0x10, Arc::new(Constant(7))).unwrap();
        map
    }

    #[test]
    fn access_reaches_the_device_with_its_offset() {
        let mut data = [0; 2];
        map().read(Space::Memory, 0x1004, &mut data);
        assert_eq!(data, [11, 11]);
    }

    #[test]
    fn access_without_a_device_reads_all_ones() {
        let mut data = [0; 4];
        map().read(Space::Memory, 0x1010, &mut data);
        assert_eq!(data, [0xff; 4]);
        map().read(Space::Memory, 0x100e, &mut data);
        assert_eq!(data, [0xff; 4], "an access across the end reaches no device");
        map().read(Space::Port, u64::MAX, &mut data);
        map().write(Space::Port, 0x1004, &data);
    }

    /// Slots with a lost page at 0x5000 and an intact page at 0x6000.
    struct Slots;

    impl SlotMemory for Slots {
        fn access(&self, address: u64, access: Access<'_>) -> Result<bool, Loss> {
            if let (0x6000, Access::Read(data)) = (address, access) {
                data.fill(0x66);
            }
            match address {
                0x5000 => Err(Loss { address: None, gpa: Some(address), cause: Cause::Missing }),
                address => Ok(address == 0x6000),
            }
        }
        fn loss(&self, address: u64) -> Loss {
            Loss { address: None, gpa: Some(address), cause: Cause::Missing }
        }
    }

    /// Device whose range is memory.
    struct Shown;

    impl BusDevice for Shown {
        fn read(&self, _: u64, data: &mut [u8]) {
            data.fill(0);
        }
        fn write(&self, _: u64, _: &[u8]) {}
        fn is_memory(&self) -> bool {
            true
        }
    }

    #[test]
    fn access_to_lost_memory_is_an_error_and_not_mmio() {
        let slots = Arc::new(Slots);
        let lost = |map: &IoMap, address| {
            (map.read_memory(address, &mut [0]).is_err(), map.write_memory(address, &[0]).is_err())
        };
        for map in [map(), IoMap::default()] {
            assert_eq!(lost(&map, 0x5000), (false, false), "the map has no slots yet");
            map.set_slots(&slots);
            map.insert(Space::Memory, 0x8000, 0x10, Arc::new(Constant(1))).unwrap();
            assert_eq!(
                (lost(&map, 0x5000), lost(&map, 0x6000), lost(&map, 0x8000)),
                ((true, true), (false, false), (false, false))
            );
            let mut data = [0];
            map.read_memory(0x6000, &mut data).unwrap();
            assert_eq!(data, [0x66]);
            map.read_memory(0x7000, &mut data).unwrap();
            assert_eq!(data, [0xff]);
            // A device whose range is memory does not answer in place of the lost page.
            map.insert(Space::Memory, 0x5000, 0x1000, Arc::new(Shown)).unwrap();
            assert_eq!(lost(&map, 0x5000), (true, true));
            map.read_memory(0x5800, &mut data).unwrap();
            assert_eq!(data, [0], "the address has no slot");
        }
    }

    #[test]
    fn overlapping_and_impossible_ranges_are_refused() {
        let map = map();
        for (space, base, len) in [
            (Space::Memory, 0x100f, 1),
            (Space::Memory, 0x2000, 0),
            (Space::Memory, u64::MAX, 2),
            (Space::Port, 0xffff, 2),
            (Space::Port, 0x1_0000, 1),
        ] {
            assert!(map.insert(space, base, len, Arc::new(Constant(1))).is_err(), "{space:?} {base:#x} {len}");
        }
    }

    #[test]
    fn dropped_owner_releases_the_devices() {
        let map = IoMapOwner::new();
        let shared = Arc::clone(&map);
        let device = Arc::new(Constant(1));
        map.insert(Space::Memory, 0x1000, 8, device.clone()).unwrap();
        drop(map);
        assert_eq!(Arc::strong_count(&device), 1);
        drop(shared);
    }

    #[test]
    fn removed_range_can_be_claimed_again() {
        let map = map();
        map.remove(Space::Memory, 0x1008);
        assert!(map.insert(Space::Memory, 0x1008, 8, Arc::new(Constant(1))).is_err(), "still claimed");
        map.remove(Space::Memory, 0x1000);
        map.insert(Space::Memory, 0x1008, 8, Arc::new(Constant(1))).unwrap();
    }
}
