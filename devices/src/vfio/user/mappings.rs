// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a server may reach: this side's own book, by which its DMA_READ and DMA_WRITE are judged.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use iommu_bounce::{EndpointId, Permissions};
use log::warn;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, VolatileSlice};

use super::connection::DmaTarget;
use super::faults::{FaultSender, Stopped};
use crate::ram::Ram;
use crate::sync::lock;
use crate::throttle::Throttle;
use crate::virtio::windows::WindowMemory;

/// What a mapping leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// Guest RAM at this guest-physical address.
    Ram(u64),
    /// The chunk of window memory of this index, from its start.
    Chunk(u32),
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    last: u64,
    memory: Memory,
    permissions: Permissions,
}

/// Part of an access, which lies in one mapping: where from its start, and how many bytes.
struct Part {
    memory: Memory,
    offset: u64,
    len: usize,
}

/// Where an access that is not allowed was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stop(u64);

/// The mappings of one device.
pub(super) struct Mappings {
    name: String,
    ram: Arc<Ram>,
    windows: OnceLock<Arc<WindowMemory>>,
    /// Whom to tell of accesses that were stopped; nobody where there is no virtual IOMMU.
    faults: Option<(EndpointId, FaultSender)>,
    table: Mutex<BTreeMap<u64, Mapping>>,
    throttle: Throttle,
}

impl Mappings {
    /// No mappings yet. `name` is the device's in logs.
    pub(super) fn new(name: &str, ram: Arc<Ram>, faults: Option<(EndpointId, FaultSender)>) -> Self {
        let name = name.to_string();
        let (windows, table, throttle) = (OnceLock::new(), Mutex::default(), Throttle::default());
        Self { name, ram, windows, faults, table, throttle }
    }

    /// From now on chunks of `windows` can be mapped. The first call counts.
    pub(super) fn set_windows(&self, windows: Arc<WindowMemory>) {
        // A second one would be of a second IOMMU, which no VM has.
        let _ = self.windows.set(windows);
    }

    /// The window memory, if there is any.
    pub(super) fn windows(&self) -> Option<&Arc<WindowMemory>> {
        self.windows.get()
    }

    /// What `slice` is of this VM's; `None` if neither all guest RAM nor a chunk.
    pub(super) fn find(&self, slice: &VolatileSlice<'_>) -> Option<Memory> {
        let (address, len) = (slice.ptr_guard().as_ptr().addr(), slice.len());
        let in_ram = self.ram.iter().find_map(|region| {
            let offset = address.checked_sub(region.as_ptr().addr())? as u64;
            let fits = offset.checked_add(len as u64)? <= region.len();
            fits.then(|| Memory::Ram(region.start_addr().raw_value() + offset))
        });
        in_ram.or_else(|| self.windows()?.find(address, len).map(Memory::Chunk))
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        lock(&self.table).len()
    }

    /// Lets the server at `len` bytes of `memory` from `iova` on; `false`, and nothing has changed, if something is there.
    pub(super) fn insert(&self, iova: u64, len: u64, memory: Memory, permissions: Permissions) -> bool {
        let Some(last) = len.checked_sub(1).and_then(|more| iova.checked_add(more)) else { return false };
        let mut table = lock(&self.table);
        let free = table.range(..=last).next_back().is_none_or(|(_, before)| before.last < iova);
        if free {
            table.insert(iova, Mapping { last, memory, permissions });
        }
        free
    }

    /// Takes `[iova, iova + len)` away, which must be one or several whole mappings: their addresses and lengths. `None`,
    /// and nothing has changed, if it is not. When it returns, no access to them is under way.
    pub(super) fn remove(&self, iova: u64, len: u64) -> Option<Vec<(u64, u64)>> {
        let last = len.checked_sub(1).and_then(|more| iova.checked_add(more))?;
        let mut table = lock(&self.table);
        let mut found = Vec::new();
        let mut next = Some(iova);
        for (start, mapping) in table.range(iova..=last) {
            if next != Some(*start) || mapping.last > last {
                return None;
            }
            found.push((*start, mapping.last - start + 1));
            next = mapping.last.checked_add(1);
        }
        if found.is_empty() || next != last.checked_add(1) {
            return None;
        }
        for (start, _) in &found {
            table.remove(start);
        }
        Some(found)
    }

    /// Takes all away.
    pub(super) fn clear(&self) {
        lock(&self.table).clear();
    }

    /// Calls `each` with the parts of an access and where each starts in it, if all of it is allowed. The mappings stay
    /// while it runs.
    fn access(
        &self,
        iova: u64,
        len: usize,
        access: Permissions,
        mut each: impl FnMut(&Part, usize) -> Option<()>,
    ) -> bool {
        let table = lock(&self.table);
        let outcome = parts(&table, iova, len, access).and_then(|parts| {
            let mut done = 0;
            for part in &parts {
                // RAM and chunks that are mapped are there.
                each(part, done).ok_or(Stop(iova + done as u64))?;
                done += part.len;
            }
            Ok(())
        });
        drop(table);
        if let Err(Stop(at)) = outcome {
            self.report(at, access);
        }
        outcome.is_ok()
    }

    fn report(&self, iova: u64, access: Permissions) {
        match &self.faults {
            Some((endpoint, faults)) => faults.send(Stopped { endpoint: *endpoint, iova, access }),
            None if self.throttle.pass() => warn!("{}: its server accesses {iova:#x}, where no RAM is", self.name),
            None => {}
        }
    }

    /// The bytes of a part.
    fn slice(&self, part: &Part) -> Option<VolatileSlice<'_>> {
        match part.memory {
            Memory::Ram(gpa) => self.ram.get_slice(GuestAddress(gpa.checked_add(part.offset)?), part.len).ok(),
            Memory::Chunk(index) => {
                let chunk = self.windows()?.chunk(index)?;
                chunk.subslice(usize::try_from(part.offset).ok()?, part.len).ok()
            }
        }
    }
}

/// The parts of an access; where it must stop, if not all of it is allowed.
fn parts(table: &BTreeMap<u64, Mapping>, iova: u64, len: usize, access: Permissions) -> Result<Vec<Part>, Stop> {
    let mut parts = Vec::new();
    let mut done = 0;
    while done < len {
        let at = iova.checked_add(done as u64).ok_or(Stop(u64::MAX))?;
        let found = table.range(..=at).next_back().filter(|(_, mapping)| mapping.last >= at);
        let (start, mapping) = found.filter(|(_, mapping)| mapping.permissions.contains(access)).ok_or(Stop(at))?;
        let left = usize::try_from(mapping.last - at).unwrap_or(usize::MAX).saturating_add(1);
        let part = Part { memory: mapping.memory, offset: at - start, len: left.min(len - done) };
        done += part.len;
        parts.push(part);
    }
    Ok(parts)
}

impl DmaTarget for Mappings {
    fn read(&self, iova: u64, data: &mut [u8]) -> bool {
        self.access(iova, data.len(), Permissions::READ, |part, at| {
            self.slice(part)?.read_slice(data.get_mut(at..at + part.len)?, 0).ok()
        })
    }

    fn write(&self, iova: u64, data: &[u8]) -> bool {
        self.access(iova, data.len(), Permissions::WRITE, |part, at| {
            self.slice(part)?.write_slice(data.get(at..at + part.len)?, 0).ok()
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::faults::{FaultRelay, fault_relay};
    use super::*;

    const RW: Permissions = Permissions::READ.union(Permissions::WRITE);
    const ENDPOINT: EndpointId = 0x18;

    fn rig() -> (Mappings, FaultRelay) {
        let ranges = [(GuestAddress(0), 0x8000), (GuestAddress(0x1_0000), 0x8000)];
        let ram = Arc::new(Ram::from_ranges(&ranges).unwrap());
        let (sender, relay) = fault_relay();
        (Mappings::new("user0", ram, Some((ENDPOINT, sender))), relay)
    }

    fn stopped(relay: &FaultRelay) -> Vec<(u64, Permissions)> {
        relay.take().0.into_iter().map(|fault| (fault.iova, fault.access)).collect()
    }

    #[test]
    fn server_reaches_what_is_mapped_as_it_is_mapped() {
        let (mappings, relay) = rig();
        assert!(mappings.insert(0x10_0000, 0x1000, Memory::Ram(0x2000), RW));
        assert!(mappings.insert(0x10_1000, 0x1000, Memory::Ram(0x1_0000), Permissions::READ));
        assert!(mappings.insert(0x10_2000, 0x1000, Memory::Ram(0x3000), Permissions::WRITE));
        assert!(mappings.write(0x10_0ffc, &[1, 2, 3, 4]));
        mappings.ram.write_slice(&[5, 6], GuestAddress(0x1_0000)).unwrap();
        let mut data = [0; 6];
        assert!(mappings.read(0x10_0ffc, &mut data));
        assert_eq!(data, [1, 2, 3, 4, 5, 6]);
        assert_eq!(mappings.ram.read_obj::<u32>(GuestAddress(0x2ffc)).unwrap(), 0x0403_0201);
        assert_eq!(stopped(&relay), []);
        // Over the end into what may only be read: nothing is written, the first byte that may not is reported.
        assert!(!mappings.write(0x10_0ffc, &[9; 8]));
        assert_eq!(mappings.ram.read_obj::<u32>(GuestAddress(0x2ffc)).unwrap(), 0x0403_0201);
        assert!(!mappings.read(0x10_2000, &mut data));
        assert!(!mappings.read(0xf_ffff, &mut data));
        let (read, write) = (Permissions::READ, Permissions::WRITE);
        assert_eq!(stopped(&relay), [(0x10_1000, write), (0x10_2000, read), (0xf_ffff, read)]);
        assert!(mappings.write(0x10_2000, &[7]));
        assert!(!mappings.read(u64::MAX - 1, &mut data));
        assert!(mappings.read(0, &mut []));
    }

    #[test]
    fn nothing_is_reached_after_it_was_taken_away() {
        let (mappings, relay) = rig();
        for page in 0..4u64 {
            assert!(mappings.insert(page << 12, 0x1000, Memory::Ram(page << 12), RW));
        }
        for (iova, len) in [(0x800, 0x1000), (0, 0x800), (0x3000, 0x2000), (0x8000, 0x1000), (0, 0), (u64::MAX, 2)] {
            assert_eq!(mappings.remove(iova, len), None, "{iova:#x} {len:#x}");
        }
        assert_eq!(mappings.count(), 4);
        assert_eq!(mappings.remove(0x1000, 0x2000), Some(vec![(0x1000, 0x1000), (0x2000, 0x1000)]));
        assert!(!mappings.read(0x1000, &mut [0]));
        assert_eq!(stopped(&relay), [(0x1000, Permissions::READ)]);
        assert_eq!(mappings.remove(0, 0x4000), None, "there is a hole");
        mappings.clear();
        assert!(!mappings.read(0, &mut [0]));
    }

    #[test]
    fn mapping_over_another_is_refused() {
        let (mappings, _relay) = rig();
        assert!(mappings.insert(0x2000, 0x2000, Memory::Ram(0), RW));
        for (iova, len) in [(0x2000, 0x2000), (0x1000, 0x1001), (0x3fff, 1), (0, 0x8000), (0, 0), (u64::MAX, 2)] {
            assert!(!mappings.insert(iova, len, Memory::Ram(0), RW), "{iova:#x} {len:#x}");
        }
        assert!(mappings.insert(0x1000, 0x1000, Memory::Ram(0), RW));
        assert!(mappings.insert(u64::MAX, 1, Memory::Ram(0), RW));
        assert!(mappings.read(u64::MAX, &mut [0]));
    }

    #[test]
    fn memory_is_found_by_its_address_and_nothing_else_is() {
        let (mappings, _relay) = rig();
        let slice = mappings.ram.get_slice(GuestAddress(0x1_1000), 0x2000).unwrap();
        assert_eq!(mappings.find(&slice), Some(Memory::Ram(0x1_1000)));
        let mut other = [0u8; 64];
        assert_eq!(mappings.find(&VolatileSlice::from(&mut other[..])), None);
    }

    proptest! {
        /// Whatever is mapped and taken away, an access is allowed exactly where a page by page model allows it, and
        /// reaches the right bytes.
        #[test]
        fn book_is_kept_as_a_model_keeps_it(
            steps in prop::collection::vec((0u64..8, 1u64..4, 0u64..8, 1u32..4, any::<bool>()), 1..30),
            (iova, len, write) in (0u64..0x8000, 0usize..0x3000, any::<bool>()),
        ) {
            let (mappings, _relay) = rig();
            for page in 0..8u8 {
                mappings.ram.write_slice(&[page + 1; 0x1000], GuestAddress(u64::from(page) << 12)).unwrap();
            }
            let mut model: [Option<(u64, u64, Permissions)>; 16] = [None; 16];
            for (page, pages, at, bits, remove) in steps {
                let all = usize::try_from(page).unwrap()..usize::try_from(page + pages).unwrap();
                if remove {
                    let starts = model[all.start].is_some_and(|(start, ..)| start == page);
                    let ends = model[all.end - 1].is_some() && model[all.end].is_none_or(|(start, ..)| start == page + pages);
                    let whole = starts && ends && model[all.clone()].iter().all(Option::is_some);
                    prop_assert_eq!(mappings.remove(page << 12, pages << 12).is_some(), whole);
                    if whole {
                        model[all].fill(None);
                    }
                } else if at + pages <= 8 {
                    let permissions = Permissions::from_bits_truncate(bits);
                    let free = model[all.clone()].iter().all(Option::is_none);
                    prop_assert_eq!(mappings.insert(page << 12, pages << 12, Memory::Ram(at << 12), permissions), free);
                    if free {
                        for (step, place) in model[all].iter_mut().enumerate() {
                            *place = Some((page, at + step as u64, permissions));
                        }
                    }
                }
            }
            let access = if write { Permissions::WRITE } else { Permissions::READ };
            let page = |at: u64| model[usize::try_from(at >> 12).unwrap()];
            let allowed = (iova..iova + len as u64).all(|at| page(at).is_some_and(|(.., has)| has.contains(access)));
            let mut data = vec![0; len];
            if write {
                prop_assert_eq!(mappings.write(iova, &data), allowed);
            } else {
                prop_assert_eq!(mappings.read(iova, &mut data), allowed);
                if allowed {
                    let right = |(byte, at): (&u8, u64)| u64::from(*byte) == page(at).unwrap().1 + 1;
                    prop_assert!(data.iter().zip(iova..).all(right));
                }
            }
        }
    }
}
