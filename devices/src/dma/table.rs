// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Table of mappings of a device behind the virtio-iommu: IOVAs, the mapped memory, and permissions.

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
use crate::guest_visible::GuestVisibleMemory;
use crate::host_range::{DeviceRange, HostRange};
use crate::ram::Ram;
use crate::sync::{read_lock, write_lock};
use crate::throttle::Throttle;
use crate::windows::WindowMemory;

/// Mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Guest RAM at this guest-physical address.
    Ram(u64),
    /// Window chunk with this index. The mapping begins at the start of the chunk.
    Chunk(u32),
    /// Guest-visible memory of a device.
    Device {
        /// Address of the device's range in this process. The address identifies the range.
        range: usize,
        /// Offset in the range in bytes.
        offset: usize,
    },
}

/// Mapping. Its first IOVA is its key in [`Entries::map`].
#[derive(Clone, Copy, Debug)]
struct Entry {
    last: u64,
    backing: Backing,
    permissions: Permissions,
}

/// Mapping with its first IOVA, for a caller that sends the mapping to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// First IOVA.
    pub(crate) iova: u64,
    /// Size in bytes.
    pub(crate) len: u64,
    /// Memory at the first IOVA.
    pub(crate) backing: Backing,
    /// Accesses that the mapping allows.
    pub(crate) permissions: Permissions,
}

/// Result of a look-up: the rest of a mapping from an IOVA on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    /// First IOVA of the mapping.
    start: u64,
    backing: Backing,
    /// Offset from the start of the mapping in bytes.
    offset: u64,
    /// Number of bytes up to the end of the mapping, at least 1.
    pub(super) len: usize,
}

/// First IOVA at which an access is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stop(pub(super) u64);

/// Reason why mappings cannot be removed. After an error, the mappings still exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemoveError {
    /// The range does not consist of one or several whole mappings.
    NotWhole,
    /// The host kernel still does I/O in the range after the deadline. The mappings deny all new accesses from now on.
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

/// Mappings of a table.
#[derive(Default)]
pub(super) struct Entries {
    map: BTreeMap<u64, Entry>,
    /// Device memory of mappings, by first IOVA. The memory stays mapped in this process as long as the mapping exists.
    devices: BTreeMap<u64, DeviceRange>,
}

impl Entries {
    /// Returns the rest of the mapping from `iova` on, if the mapping allows `access`. Needs one look-up in the tree.
    pub(super) fn find(&self, iova: u64, access: Permissions) -> Result<Found, Stop> {
        let (start, entry) = self.map.range(..=iova).next_back().ok_or(Stop(iova))?;
        if entry.last < iova || access.is_empty() || !entry.permissions.contains(access) {
            return Err(Stop(iova));
        }
        let len = usize::try_from(entry.last - iova).unwrap_or(usize::MAX).saturating_add(1);
        Ok(Found { start: *start, backing: entry.backing, offset: iova - start, len })
    }

    /// Returns the device memory of a mapping, or `None` for a mapping of other memory.
    pub(super) fn device(&self, found: &Found) -> Option<&DeviceRange> {
        matches!(found.backing, Backing::Device { .. }).then(|| self.devices.get(&found.start)).flatten()
    }

    /// Returns the bytes of `found`, at most `len`, if they are device memory.
    pub(super) fn device_slice(&self, found: &Found, len: usize) -> Option<RamSlice<'_>> {
        let Backing::Device { offset, .. } = found.backing else { return None };
        let offset = offset.checked_add(usize::try_from(found.offset).ok()?)?;
        self.devices.get(&found.start)?.pages(offset, len.min(found.len))
    }

    /// Checks that `access` is allowed to all `len` bytes from `iova` on. The error has the first IOVA at which the access is denied.
    pub(super) fn check(&self, iova: u64, len: usize, access: Permissions) -> Result<(), Stop> {
        let mut done = 0;
        while done < len {
            let at = iova.checked_add(done as u64).ok_or(Stop(u64::MAX))?;
            done = done.saturating_add(self.find(at, access)?.len);
        }
        Ok(())
    }

    /// True if `[first, last]` consists of whole mappings without gaps.
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

    /// Removes all mappings in `[first, last]`. Calls `each` with the first IOVA and the length of each mapping.
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

/// Adds a mapping. Returns false and changes nothing if the range is empty, overlaps a mapping, or wraps around.
fn insert_entry(entries: &mut Entries, iova: u64, len: u64, backing: Backing, permissions: Permissions) -> bool {
    let Some((iova, last)) = bounds(iova, len) else { return false };
    let free = entries.map.range(..=last).next_back().is_none_or(|(_, before)| before.last < iova);
    if free {
        entries.map.insert(iova, Entry { last, backing, permissions });
    }
    free
}

/// Returns the first and last address of a range, or `None` if the range is empty or wraps around.
fn bounds(iova: u64, len: u64) -> Option<(u64, u64)> {
    Some((iova, iova.checked_add(len.checked_sub(1)?)?))
}

/// Table of mappings of one device. The caller of each change holds the engine's lock, so only one thread at a time changes the table.
pub struct DmaTable {
    name: String,
    ram: Arc<Ram>,
    windows: OnceLock<Arc<WindowMemory>>,
    devices: OnceLock<Arc<GuestVisibleMemory>>,
    /// Destination for reports of denied accesses. `None` if the device has no virtual IOMMU. Denied accesses are then logged.
    faults: Option<(EndpointId, FaultSender)>,
    entries: RwLock<Entries>,
    operations: Arc<Operations>,
    throttle: Throttle,
}

impl DmaTable {
    /// Returns an empty table. `name` is the device's name in logs. Denied accesses are reported through the sender in `faults`, as faults
    /// of the endpoint in `faults`. If `faults` is `None`, denied accesses are logged.
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

    /// Returns an empty table whose UNMAPs wait for I/O of the host kernel with `waiter`.
    #[cfg(test)]
    pub(super) fn with_waiter(name: &str, ram: Arc<Ram>, waiter: Box<dyn super::host_io::Waiter>) -> Self {
        Self { operations: Arc::new(Operations::with_waiter(waiter)), ..Self::new(name, ram, None) }
    }

    /// Allows mappings of chunks of `windows`, and of guest-visible memory of `devices`. Only the first call has an effect, because a VM
    /// has at most one virtio-iommu.
    pub fn connect(&self, windows: Option<&Arc<WindowMemory>>, devices: Option<&Arc<GuestVisibleMemory>>) {
        if let Some(windows) = windows {
            let _ = self.windows.set(windows.clone());
        }
        if let Some(devices) = devices {
            let _ = self.devices.set(devices.clone());
        }
    }

    /// Returns the device's name in logs.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the window memory, if any is connected.
    pub(crate) fn windows(&self) -> Option<&Arc<WindowMemory>> {
        self.windows.get()
    }

    /// Returns guest RAM.
    pub(crate) fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }

    /// Returns the RAM or chunk of `slice`, or `None` if `slice` is neither guest RAM nor a chunk.
    fn backing_of(&self, slice: &VolatileSlice<'_>) -> Option<Backing> {
        let (address, len) = (slice.ptr_guard().as_ptr().addr(), slice.len());
        let in_ram = self.ram.iter().find_map(|region| {
            let offset = address.checked_sub(region.as_ptr().addr())? as u64;
            let fits = offset.checked_add(len as u64)? <= region.len();
            fits.then(|| Backing::Ram(region.start_addr().raw_value() + offset))
        });
        in_ram.or_else(|| self.windows()?.find(address, len).map(Backing::Chunk))
    }

    /// Maps `memory` at `iova`. `memory` is guest RAM, a chunk, or device memory. Returns its backing.
    ///
    /// Device registers are mapped without permissions. A DMA access to these registers is denied and reported, like an access to unmapped
    /// memory. The MAP itself succeeds, because the mapping may be meant for other devices of the domain.
    ///
    /// # Errors
    /// `memory` is of another kind, or the range overlaps a mapping.
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
        let at = |devices: &Arc<GuestVisibleMemory>| devices.at_host(memory.ptr_guard().as_ptr().addr(), memory.len());
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

    /// Returns the device memory of the mapping that begins at `iova`.
    pub(crate) fn device_at(&self, iova: u64) -> Option<DeviceRange> {
        read_lock(&self.entries).devices.get(&iova).cloned()
    }

    /// Returns the number of mappings.
    pub fn count(&self) -> usize {
        read_lock(&self.entries).map.len()
    }

    /// Maps `len` bytes of `backing` at `iova`. Returns false and changes nothing if the range is empty, overlaps a mapping, or wraps
    /// around.
    pub fn insert(&self, iova: u64, len: u64, backing: Backing, permissions: Permissions) -> bool {
        insert_entry(&mut write_lock(&self.entries), iova, len, backing, permissions)
    }

    /// Removes the mappings in `[iova, iova + len)`, and calls `each` with the address and length of each mapping. The range must consist
    /// of one or several whole mappings. When this function succeeds, no copy and no I/O of the host kernel in the range is in progress,
    /// and none can begin.
    pub(crate) fn remove(&self, iova: u64, len: u64, each: impl FnMut(u64, u64)) -> Result<(), RemoveError> {
        self.remove_within(iova, len, IO_DEADLINE, each)
    }

    /// Denies all new accesses in `[iova, iova + len)`, and calls `each` with the index of every chunk in the range. The range must consist
    /// of one or several whole mappings. The mappings stay in the table until [`Self::remove`] removes them.
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

    /// Returns the whole mapping that contains `iova`, if the mapping allows `access`. The caller sends the mapping to a server.
    pub(crate) fn mapping(&self, iova: u64, access: Permissions) -> Option<Mapping> {
        let entries = read_lock(&self.entries);
        entries.find(iova, access).ok()?;
        let (start, entry) = entries.map.range(..=iova).next_back()?;
        let Entry { last, backing, permissions } = *entry;
        Some(Mapping { iova: *start, len: last - start + 1, backing, permissions })
    }

    /// Reports an access that a server has denied. Never waits.
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
            // Deny all accesses to the range, so that no new operation can begin there. Then wait for the running operations without the
            // lock.
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

    /// Removes all mappings of a removed device, even if I/O of the host kernel does not end in time.
    pub(crate) fn clear(&self) {
        *write_lock(&self.entries) = Entries::default();
        if !self.operations.end_all(0, u64::MAX, IO_DEADLINE) {
            warn!("{}: the host kernel still does I/O in guest memory after the device was removed", self.name);
        }
    }

    /// Locks the mappings for reading. The mappings cannot change while the guard exists.
    pub(super) fn entries(&self) -> RwLockReadGuard<'_, Entries> {
        read_lock(&self.entries)
    }

    /// Returns the bytes of `found`, at most `len`, if they are RAM or a chunk. Returns `None` for device memory: see
    /// [`Entries::device_slice`].
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

    /// Returns the bytes of `found`, at most `len`, for memory of any kind.
    pub(super) fn any_slice<'s>(&'s self, entries: &'s Entries, found: &Found, len: usize) -> Option<RamSlice<'s>> {
        self.slice(found, len).or_else(|| entries.device_slice(found, len))
    }

    /// Reports a denied access. Never waits.
    pub(super) fn report(&self, Stop(iova): Stop, access: Permissions) {
        match &self.faults {
            Some((endpoint, faults)) => faults.send(Stopped { endpoint: *endpoint, iova, access }),
            None if self.throttle.pass() => warn!("{}: denied DMA to {iova:#x}, which is not RAM", self.name),
            None => {}
        }
    }

    /// Calls `each` for each part of an access, with the part's memory and the part's offset in the access. If the access is not completely
    /// allowed, calls `each` for no part, reports the access, and returns false.
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

    /// Copies the bytes at `iova` to `data`. Returns false if the device may not read the whole range.
    pub fn read(&self, iova: u64, data: &mut [u8]) -> bool {
        self.access(iova, data.len(), Permissions::READ, |memory, at| {
            memory.read_slice(data.get_mut(at..at + memory.len())?, 0).ok()
        })
    }

    /// Copies `data` to the memory at `iova`. Returns false and writes nothing if the device may not write the whole range.
    pub fn write(&self, iova: u64, data: &[u8]) -> bool {
        self.access(iova, data.len(), Permissions::WRITE, |memory, at| {
            memory.write_slice(data.get(at..at + memory.len())?, 0).ok()
        })
    }

    /// Records I/O of the host kernel in these ranges (IOVA and length), and returns the memory of the ranges. If the access is not
    /// completely allowed, reports the access and returns `None`.
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
                // The sum cannot overflow, because the loop above has found memory for the last byte.
                noted.push((*iova, iova + (*len as u64 - 1)));
            }
            Ok(())
        };
        match collect() {
            Ok(()) => {
                // Record the operation while `entries` is locked, before any mapping can be removed.
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
