// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a device behind the virtio-iommu may reach: IOVAs, what each leads to, and what the device may do there.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, OnceLock, RwLock, RwLockReadGuard};
use std::time::Duration;

use iommu_bounce::{DeviceMemoryKind, EndpointId, MapError, Permissions, UnmapError};
use log::warn;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, VolatileSlice};

use super::faults::{FaultSender, Stopped};
use super::host_io::{HostIo, HostRanges, IO_DEADLINE, IoOwner, Operations, Parts};
use super::near_memory::RamSlice;
use crate::host_range::{DeviceRange, HostRange};
use crate::ram::Ram;
use crate::shown::ShownMemory;
use crate::sync::{read_lock, write_lock};
use crate::throttle::Throttle;
use crate::windows::WindowMemory;

/// What a mapping leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Guest RAM at this guest-physical address.
    Ram(u64),
    /// The chunk of window memory of this index, from its start.
    Chunk(u32),
    /// Memory of a device that the guest sees.
    Device {
        /// Address in this process of the device's range. No other range has it.
        range: usize,
        /// Bytes from its start.
        offset: usize,
    },
}

/// A mapping, whose first IOVA is its key.
#[derive(Clone, Copy, Debug)]
struct Entry {
    last: u64,
    backing: Backing,
    permissions: Permissions,
}

/// A mapping as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// Its first IOVA.
    pub(crate) iova: u64,
    /// Its bytes.
    pub(crate) len: u64,
    /// What it leads to, from the start.
    pub(crate) backing: Backing,
    /// What the device may do there.
    pub(crate) permissions: Permissions,
}

/// What an access finds: from the IOVA on, to the end of the mapping.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    /// First IOVA of the mapping.
    start: u64,
    backing: Backing,
    /// Bytes from the start of what the mapping leads to.
    offset: u64,
    /// Bytes from here to the mapping's end, 1 at least.
    pub(super) len: usize,
}

/// Where an access that is not allowed is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stop(pub(super) u64);

/// Why mappings were not taken away. Nothing has changed for others than the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemoveError {
    /// The range is not exactly one or several mappings.
    NotWhole,
    /// The host's kernel still reads or writes there, for longer than is waited for. The mappings are still there, but
    /// nothing can be accessed by them anew.
    Busy,
}

impl From<RemoveError> for UnmapError {
    fn from(error: RemoveError) -> Self {
        match error {
            RemoveError::NotWhole => Self::NotMapped,
            RemoveError::Busy => Self::Host(io::ErrorKind::TimedOut.into()),
        }
    }
}

/// The mappings.
#[derive(Default)]
pub(super) struct Entries {
    map: BTreeMap<u64, Entry>,
    /// Memory behind mappings of devices, by first IOVA. It stays mapped in this process as long as the mapping exists.
    devices: BTreeMap<u64, DeviceRange>,
}

impl Entries {
    /// What is at `iova`, if `access` is allowed there. One look-up in the tree.
    pub(super) fn find(&self, iova: u64, access: Permissions) -> Result<Found, Stop> {
        let (start, entry) = self.map.range(..=iova).next_back().ok_or(Stop(iova))?;
        if entry.last < iova || access.is_empty() || !entry.permissions.contains(access) {
            return Err(Stop(iova));
        }
        let len = usize::try_from(entry.last - iova).unwrap_or(usize::MAX).saturating_add(1);
        Ok(Found { start: *start, backing: entry.backing, offset: iova - start, len })
    }

    /// Memory of a device behind a mapping; `None` for other mappings.
    pub(super) fn device(&self, found: &Found) -> Option<&DeviceRange> {
        matches!(found.backing, Backing::Device { .. }).then(|| self.devices.get(&found.start)).flatten()
    }

    /// The memory of what an access found in a device's memory, `len` bytes at most.
    pub(super) fn device_slice(&self, found: &Found, len: usize) -> Option<RamSlice<'_>> {
        let Backing::Device { offset, .. } = found.backing else { return None };
        let offset = offset.checked_add(usize::try_from(found.offset).ok()?)?;
        self.devices.get(&found.start)?.pages(offset, len.min(found.len))
    }

    /// Whether `access` is allowed at all of `len` bytes from `iova` on; where not, if it is not.
    pub(super) fn check(&self, iova: u64, len: usize, access: Permissions) -> Result<(), Stop> {
        let mut done = 0;
        while done < len {
            let at = iova.checked_add(done as u64).ok_or(Stop(u64::MAX))?;
            done = done.saturating_add(self.find(at, access)?.len);
        }
        Ok(())
    }

    /// Whether `[first, last]` is made of whole mappings.
    fn is_whole(&self, first: u64, last: u64) -> bool {
        let mut next = Some(first);
        for (start, entry) in self.map.range(first..=last) {
            if next != Some(*start) || entry.last > last {
                return false;
            }
            next = entry.last.checked_add(1);
        }
        next != Some(first) && next == last.checked_add(1)
    }

    /// Calls `each` with the first IOVA and length of every mapping in `[first, last]`, and takes it away.
    fn drain(&mut self, first: u64, last: u64, mut each: impl FnMut(u64, u64)) {
        while let Some((&start, &entry)) = self.map.range(first..=last).next() {
            self.map.remove(&start);
            if !self.devices.is_empty() {
                self.devices.remove(&start);
            }
            each(start, entry.last - start + 1);
        }
    }
}

/// Adds a mapping; `false`, and nothing has changed, if something is there or the range wraps around.
fn insert_entry(entries: &mut Entries, iova: u64, len: u64, backing: Backing, permissions: Permissions) -> bool {
    let Some((iova, last)) = bounds(iova, len) else { return false };
    let free = entries.map.range(..=last).next_back().is_none_or(|(_, before)| before.last < iova);
    if free {
        entries.map.insert(iova, Entry { last, backing, permissions });
    }
    free
}

/// First and last address of a range; `None` if it is empty or wraps around.
fn bounds(iova: u64, len: u64) -> Option<(u64, u64)> {
    Some((iova, iova.checked_add(len.checked_sub(1)?)?))
}

/// The mappings of one device. They change under the engine's lock only, one after the other.
pub struct DmaTable {
    name: String,
    ram: Arc<Ram>,
    windows: OnceLock<Arc<WindowMemory>>,
    devices: OnceLock<Arc<ShownMemory>>,
    /// Whom to tell of accesses that were stopped; the log where there is no virtual IOMMU.
    faults: Option<(EndpointId, FaultSender)>,
    entries: RwLock<Entries>,
    operations: Arc<Operations>,
    throttle: Throttle,
}

impl DmaTable {
    /// No mappings yet. `name` is the device's in logs. Accesses that are stopped go to `faults`, as those of the
    /// endpoint; to the log if there is none.
    pub fn new(name: &str, ram: Arc<Ram>, faults: Option<(EndpointId, FaultSender)>) -> Self {
        Self {
            name: name.to_string(),
            ram,
            windows: OnceLock::new(),
            devices: OnceLock::new(),
            faults,
            entries: RwLock::default(),
            operations: Arc::default(),
            throttle: Throttle::default(),
        }
    }

    /// The same, that has `waiter` wait for I/O of the host's kernel.
    #[cfg(test)]
    pub(super) fn with_waiter(name: &str, ram: Arc<Ram>, waiter: Box<dyn super::host_io::Waiter>) -> Self {
        Self { operations: Arc::new(Operations::with_waiter(waiter)), ..Self::new(name, ram, None) }
    }

    /// From now on chunks of `windows`, and what the guest sees of `devices`, can be mapped. The first call counts: no VM has a second
    /// virtio-iommu.
    pub fn connect(&self, windows: Option<&Arc<WindowMemory>>, devices: Option<&Arc<ShownMemory>>) {
        if let Some(windows) = windows {
            let _ = self.windows.set(windows.clone());
        }
        if let Some(devices) = devices {
            let _ = self.devices.set(devices.clone());
        }
    }

    /// The device's name in logs.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The window memory, if there is any.
    pub(crate) fn windows(&self) -> Option<&Arc<WindowMemory>> {
        self.windows.get()
    }

    /// Guest RAM, which mappings lead to.
    pub(crate) fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }

    /// What `slice` is of this VM's; `None` if neither all guest RAM nor a chunk.
    fn backing_of(&self, slice: &VolatileSlice<'_>) -> Option<Backing> {
        let (address, len) = (slice.ptr_guard().as_ptr().addr(), slice.len());
        let in_ram = self.ram.iter().find_map(|region| {
            let offset = address.checked_sub(region.as_ptr().addr())? as u64;
            let fits = offset.checked_add(len as u64)? <= region.len();
            fits.then(|| Backing::Ram(region.start_addr().raw_value() + offset))
        });
        in_ram.or_else(|| self.windows()?.find(address, len).map(Backing::Chunk))
    }

    /// Maps `memory` at `iova`: guest RAM, a chunk, or memory of a device. Returns what it is.
    ///
    /// Registers of devices are mapped without permissions: an access to them is reported like one to memory that is not mapped, and
    /// fails in the device. The MAP itself succeeds, since the mapping may be meant for other devices of the domain.
    ///
    /// # Errors
    /// It is no such memory, or something is mapped there.
    pub(crate) fn insert_slice(
        &self,
        iova: u64,
        memory: &VolatileSlice<'_>,
        permissions: Permissions,
    ) -> Result<Backing, MapError> {
        let len = memory.len() as u64;
        if let Some(backing) = self.backing_of(memory) {
            return if self.insert(iova, len, backing, permissions) { Ok(backing) } else { Err(MapError::Exists) };
        }
        let at = |devices: &Arc<ShownMemory>| devices.at_host(memory.ptr_guard().as_ptr().addr(), memory.len());
        let unknown = || io::Error::from(io::ErrorKind::Unsupported);
        let (device, offset) = self.devices.get().and_then(at).ok_or_else(unknown)?;
        let permissions = match device.kind() {
            DeviceMemoryKind::Pages => permissions,
            DeviceMemoryKind::Registers => Permissions::empty(),
        };
        let backing = Backing::Device { range: device.host().address, offset };
        let mut entries = write_lock(&self.entries);
        if !insert_entry(&mut entries, iova, len, backing, permissions) {
            return Err(MapError::Exists);
        }
        entries.devices.insert(iova, device);
        Ok(backing)
    }

    /// Memory of a device behind the mapping that begins at `iova`.
    pub(crate) fn device_at(&self, iova: u64) -> Option<DeviceRange> {
        read_lock(&self.entries).devices.get(&iova).cloned()
    }

    /// How many mappings there are.
    pub fn count(&self) -> usize {
        read_lock(&self.entries).map.len()
    }

    /// Lets the device at `len` bytes of `backing` from `iova` on; `false`, and nothing has changed, if something is there
    /// or the range wraps around.
    pub fn insert(&self, iova: u64, len: u64, backing: Backing, permissions: Permissions) -> bool {
        insert_entry(&mut write_lock(&self.entries), iova, len, backing, permissions)
    }

    /// Takes `[iova, iova + len)` away, which must be one or several whole mappings, and calls `each` with the address and
    /// length of each. When it returns, no copy and no I/O of the host's kernel to them is under way, and none can begin.
    pub(crate) fn remove(&self, iova: u64, len: u64, each: impl FnMut(u64, u64)) -> Result<(), RemoveError> {
        self.remove_within(iova, len, IO_DEADLINE, each)
    }

    /// Allows nothing from here on in `[iova, iova + len)`, which must be one or several whole mappings, and calls `each` with
    /// every chunk that is among them. They are there until they are removed.
    pub(crate) fn block(&self, iova: u64, len: u64, mut each: impl FnMut(u32)) -> Result<(), RemoveError> {
        let (first, last) = bounds(iova, len).ok_or(RemoveError::NotWhole)?;
        let mut entries = write_lock(&self.entries);
        if !entries.is_whole(first, last) {
            return Err(RemoveError::NotWhole);
        }
        for (_, entry) in entries.map.range_mut(first..=last) {
            entry.permissions = Permissions::empty();
            if let Backing::Chunk(index) = entry.backing {
                each(index);
            }
        }
        Ok(())
    }

    /// The mapping by which `access` to `iova` is allowed, for somebody who is told of mappings.
    pub(crate) fn mapping(&self, iova: u64, access: Permissions) -> Option<Mapping> {
        let entries = read_lock(&self.entries);
        entries.find(iova, access).ok()?;
        let (start, entry) = entries.map.range(..=iova).next_back()?;
        let Entry { last, backing, permissions } = *entry;
        Some(Mapping { iova: *start, len: last - start + 1, backing, permissions })
    }

    /// Tells of an access that somebody else has stopped. It never waits.
    pub(crate) fn report_stopped(&self, iova: u64, access: Permissions) {
        self.report(Stop(iova), access);
    }

    fn remove_within(
        &self,
        iova: u64,
        len: u64,
        limit: Duration,
        each: impl FnMut(u64, u64),
    ) -> Result<(), RemoveError> {
        let (first, last) = bounds(iova, len).ok_or(RemoveError::NotWhole)?;
        let mut entries = write_lock(&self.entries);
        if !entries.is_whole(first, last) {
            return Err(RemoveError::NotWhole);
        }
        if self.operations.touch(first, last) {
            // Nothing new begins from here on, while what is under way ends without the lock.
            for (_, entry) in entries.map.range_mut(first..=last) {
                entry.permissions = Permissions::empty();
            }
            drop(entries);
            if !self.operations.end_all(first, last, limit) {
                return Err(RemoveError::Busy);
            }
            entries = write_lock(&self.entries);
        }
        entries.drain(first, last, each);
        Ok(())
    }

    /// Takes all away, whatever the host's kernel does. For devices that are gone.
    pub(crate) fn clear(&self) {
        *write_lock(&self.entries) = Entries::default();
        if !self.operations.end_all(0, u64::MAX, IO_DEADLINE) {
            warn!("{}: I/O of the host's kernel goes on after the device was given back", self.name);
        }
    }

    /// The mappings, which stay as they are as long as somebody holds them.
    pub(super) fn entries(&self) -> RwLockReadGuard<'_, Entries> {
        read_lock(&self.entries)
    }

    /// The memory of what an access found, `len` bytes at most; `None` for memory of a device, see
    /// [`Entries::device_slice`]. RAM and chunks that are mapped are there.
    pub(super) fn slice(&self, found: &Found, len: usize) -> Option<RamSlice<'_>> {
        let len = len.min(found.len);
        match found.backing {
            Backing::Ram(gpa) => self.ram.get_slice(GuestAddress(gpa.checked_add(found.offset)?), len).ok(),
            Backing::Chunk(index) => {
                let chunk = self.windows()?.chunk(index)?;
                chunk.subslice(usize::try_from(found.offset).ok()?, len).ok()
            }
            Backing::Device { .. } => None,
        }
    }

    /// The same, of memory of a device, too.
    pub(super) fn any_slice<'s>(&'s self, entries: &'s Entries, found: &Found, len: usize) -> Option<RamSlice<'s>> {
        self.slice(found, len).or_else(|| entries.device_slice(found, len))
    }

    /// Tells of an access that was stopped. It never waits.
    pub(super) fn report(&self, Stop(iova): Stop, access: Permissions) {
        match &self.faults {
            Some((endpoint, faults)) => faults.send(Stopped { endpoint: *endpoint, iova, access }),
            None if self.throttle.pass() => warn!("{}: access to {iova:#x}, where no RAM is", self.name),
            None => {}
        }
    }

    /// Calls `each` with the memory of an access and where it begins in it, part by part, if all of it is allowed.
    fn access(
        &self,
        iova: u64,
        len: usize,
        access: Permissions,
        mut each: impl FnMut(RamSlice<'_>, usize) -> Option<()>,
    ) -> bool {
        let entries = self.entries();
        let outcome = entries.check(iova, len, access).and_then(|()| {
            let mut done = 0;
            while done < len {
                let at = iova + done as u64;
                let slice = entries.find(at, access).map(|found| self.any_slice(&entries, &found, len - done))?;
                let slice = slice.ok_or(Stop(at))?;
                let part = slice.len();
                each(slice, done).ok_or(Stop(at))?;
                done += part;
            }
            Ok(())
        });
        drop(entries);
        if let Err(stop) = outcome {
            self.report(stop, access);
        }
        outcome.is_ok()
    }

    /// Fills `data` from `iova` on; `false` if not all of it may be read.
    pub fn read(&self, iova: u64, data: &mut [u8]) -> bool {
        self.access(iova, data.len(), Permissions::READ, |memory, at| {
            memory.read_slice(data.get_mut(at..at + memory.len())?, 0).ok()
        })
    }

    /// Writes `data` from `iova` on; `false`, and nothing is written, if not all of it may be written.
    pub fn write(&self, iova: u64, data: &[u8]) -> bool {
        self.access(iova, data.len(), Permissions::WRITE, |memory, at| {
            memory.write_slice(data.get(at..at + memory.len())?, 0).ok()
        })
    }

    /// Notes that the host's kernel is to access these IOVAs and lengths, and where that is; `None` if it is not allowed,
    /// which is reported.
    pub(super) fn begin_io(
        &self,
        parts: &[(u64, usize)],
        access: Permissions,
        owner: &Arc<impl IoOwner + 'static>,
    ) -> Option<HostIo> {
        let entries = self.entries();
        let mut ranges = HostRanges::with_capacity(parts.len());
        let mut noted = Parts::with_capacity(parts.len());
        let mut devices = Vec::new();
        let mut collect = || -> Result<(), Stop> {
            for (iova, len) in parts.iter().filter(|(_, len)| *len != 0) {
                let mut done = 0;
                while done < *len {
                    let at = iova.checked_add(done as u64).ok_or(Stop(u64::MAX))?;
                    let found = entries.find(at, access)?;
                    let slice = self.any_slice(&entries, &found, len - done).ok_or(Stop(at))?;
                    devices.extend(entries.device(&found).cloned());
                    ranges
                        .push(HostRange { address: slice.ptr_guard().as_ptr().expose_provenance(), len: slice.len() });
                    done += slice.len();
                }
                // It ends where its last byte was just found.
                noted.push((*iova, iova + (*len as u64 - 1)));
            }
            Ok(())
        };
        match collect() {
            Ok(()) => {
                // Before the mappings can go.
                let number = self.operations.begin(noted, owner.clone(), devices);
                Some(HostIo::new(ranges, Some((self.operations.clone(), number))))
            }
            Err(stop) => {
                self.report(stop, access);
                None
            }
        }
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
