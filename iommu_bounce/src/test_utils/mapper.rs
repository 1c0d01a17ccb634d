// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Mapper that records its mappings.

use std::collections::BTreeMap;
use std::io;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use vm_memory::VolatileSlice;

use crate::{DmaMapper, EndpointId, MapError, MapperGroup, MapperLimits, Permissions, UnmapError};

/// Mapping made by one `map` call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMapping {
    /// Length in bytes.
    pub len: u64,
    /// Address in the host's address space.
    pub host_address: usize,
    /// Accesses that the device may make.
    pub permissions: Permissions,
}

#[derive(Debug, Default)]
struct State {
    mappings: BTreeMap<u64, HostMapping>,
    limits: Option<MapperLimits>,
    /// Number of calls that succeed before one call fails, and the kind of this failure. `None` if no call fails.
    fail_map: Option<(u32, Failure)>,
    fail_unmap: Option<u32>,
    refuse_unmaps: bool,
    /// Minimum duration of a `map` call.
    delay: Duration,
    reaches_seen_chunks_only: bool,
    keeps_page_tables: bool,
    failures: u64,
    /// The group owns its mappers, so this reference is weak.
    group: Option<Weak<Mutex<Group>>>,
}

/// Mapper of each endpoint of a group.
type GroupState = Arc<Mutex<Group>>;

#[derive(Debug, Default)]
struct Group {
    mappers: BTreeMap<EndpointId, MapperProbe>,
    fail_adopt: Option<u32>,
    failures: u64,
}

/// Set of [`RecordingMapper`]s between which endpoints can move while this value exists. Use only one set at a time, because the
/// [`MapperGroup`] of every set is 7.
#[derive(Clone, Debug, Default)]
pub struct TestGroup(GroupState);

impl TestGroup {
    /// Creates the mapper of a new endpoint of the group, with these limits.
    pub fn mapper(&self, endpoint: EndpointId, limits: MapperLimits) -> RecordingMapper {
        let mapper = RecordingMapper::with_limits(limits);
        mapper.0.state().group = Some(Arc::downgrade(&self.0));
        self.state().mappers.insert(endpoint, mapper.probe());
        mapper
    }

    fn state(&self) -> MutexGuard<'_, Group> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the mapper that translates for the endpoint.
    ///
    /// # Panics
    /// Panics if the endpoint is not in the group.
    pub fn mapper_of(&self, endpoint: EndpointId) -> MapperProbe {
        self.state().mappers[&endpoint].clone()
    }

    /// Makes `adopt` fail once, after `after` successful calls.
    pub fn fail_adopt(&self, after: u32) {
        self.state().fail_adopt = Some(after);
    }

    /// Cancels requested failures.
    pub fn heal(&self) {
        self.state().fail_adopt = None;
    }

    /// Returns the number of calls that failed on request.
    pub fn failures(&self) -> u64 {
        self.state().failures
    }
}

#[derive(Clone, Copy, Debug)]
enum Failure {
    NoResources,
    Host,
}

/// [`DmaMapper`] that records its mappings in a tree.
///
/// # Panics
/// The methods panic if the engine breaks the rules of [`DmaMapper`]. Examples are an overlap, an unaligned or unusable range, no
/// permission, or an unmap that splits a mapping.
#[derive(Debug)]
pub struct RecordingMapper(MapperProbe);

/// Handle that controls a [`RecordingMapper`] while the engine owns the mapper.
#[derive(Clone, Debug)]
pub struct MapperProbe(Arc<Mutex<State>>);

impl RecordingMapper {
    /// Creates a mapper with limits like those of VFIO: 4 KiB pages, and all 48-bit IOVAs except the MSI window of x86.
    pub fn new() -> Self {
        Self::with_ranges(vec![0..=0xfedf_ffff, 0xfef0_0000..=(1 << 48) - 1])
    }

    /// Creates a mapper of 4 KiB pages for these IOVAs.
    pub fn with_ranges(iova_ranges: Vec<RangeInclusive<u64>>) -> Self {
        Self::with_limits(MapperLimits { page_size_mask: !0xfff, iova_ranges, max_mappings: None })
    }

    /// Creates a mapper that enforces these limits.
    pub fn with_limits(limits: MapperLimits) -> Self {
        let state = State { limits: Some(limits), ..State::default() };
        Self(MapperProbe(Arc::new(Mutex::new(state))))
    }

    /// Makes the mapper behave like the mapper of a device that accesses chunks by their guest-physical addresses.
    #[must_use]
    pub fn without_hidden_chunks(self) -> Self {
        self.0.state().reaches_seen_chunks_only = true;
        self
    }

    /// Makes the mapper behave like a mapper for which the host kernel builds page tables.
    #[must_use]
    pub fn with_page_tables(self) -> Self {
        self.0.state().keeps_page_tables = true;
        self
    }

    /// Returns a handle of this mapper that stays valid when the engine takes the mapper.
    pub fn probe(&self) -> MapperProbe {
        self.0.clone()
    }
}

/// Removes all mappings, because the address space of a real mapper ends when the mapper is dropped.
impl Drop for RecordingMapper {
    fn drop(&mut self) {
        self.0.state().mappings.clear();
    }
}

impl Default for RecordingMapper {
    fn default() -> Self {
        Self::new()
    }
}

impl MapperProbe {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if both handles belong to the same mapper.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns the mappings by IOVA.
    pub fn mappings(&self) -> BTreeMap<u64, HostMapping> {
        self.state().mappings.clone()
    }

    /// Returns the number of mapped bytes.
    pub fn mapped_bytes(&self) -> u64 {
        self.state().mappings.values().map(|m| m.len).sum()
    }

    /// True if nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.state().mappings.is_empty()
    }

    /// Returns the host address that a device accesses at `iova`, and the allowed accesses.
    pub fn translate(&self, iova: u64) -> Option<(usize, Permissions)> {
        let state = self.state();
        let (start, mapping) = state.mappings.range(..=iova).next_back()?;
        let offset = iova - start;
        let inside = offset < mapping.len;
        let offset = usize::try_from(offset).ok()?;
        inside.then_some((mapping.host_address + offset, mapping.permissions))
    }

    /// Makes `map` fail once with [`MapError::Host`], after `after` successful calls.
    pub fn fail_map(&self, after: u32) {
        self.state().fail_map = Some((after, Failure::Host));
    }

    /// Makes `map` fail once with [`MapError::NoResources`], after `after` successful calls.
    pub fn exhaust_map(&self, after: u32) {
        self.state().fail_map = Some((after, Failure::NoResources));
    }

    /// Makes `unmap` fail once, after `after` successful calls.
    pub fn fail_unmap(&self, after: u32) {
        self.state().fail_unmap = Some(after);
    }

    /// Makes every `unmap` fail, or none.
    pub fn refuse_unmaps(&self, refuse: bool) {
        self.state().refuse_unmaps = refuse;
    }

    /// Makes every `map` take at least this long.
    pub fn delay(&self, time: Duration) {
        self.state().delay = time;
    }

    /// Cancels all requested failures.
    pub fn heal(&self) {
        let mut state = self.state();
        state.fail_map = None;
        state.fail_unmap = None;
        state.refuse_unmaps = false;
    }

    /// Returns the number of calls that failed on request.
    pub fn failures(&self) -> u64 {
        self.state().failures
    }
}

/// Decrements `count`, the number of calls that still succeed. Returns true if `count` is already 0, so that this call must fail.
fn is_due(count: &mut u32) -> bool {
    match count.checked_sub(1) {
        Some(less) => {
            *count = less;
            false
        }
        None => true,
    }
}

impl State {
    fn map_failure(&mut self) -> Option<Failure> {
        let (count, failure) = self.fail_map.as_mut()?;
        if !is_due(count) {
            return None;
        }
        let failure = *failure;
        self.fail_map = None;
        self.failures += 1;
        Some(failure)
    }

    fn unmap_fails(&mut self) -> bool {
        if self.refuse_unmaps || self.fail_unmap.as_mut().is_some_and(is_due) {
            self.fail_unmap = None;
            self.failures += 1;
            return true;
        }
        false
    }

    fn check_map(&self, limits: &MapperLimits, iova: u64, last: u64) {
        let granule = 1 << limits.page_size_mask.trailing_zeros();
        assert_eq!(
            (iova % granule, last.wrapping_add(1) % granule),
            (0, 0),
            "map of {iova:#x} to {last:#x} is not aligned"
        );
        let within = |r: &RangeInclusive<u64>| r.contains(&iova) && r.contains(&last);
        assert!(limits.iova_ranges.iter().any(within), "map of {iova:#x} to {last:#x} is outside what can be mapped");
        let below = self.mappings.range(..=last).next_back();
        assert!(
            below.is_none_or(|(start, mapping)| start + (mapping.len - 1) < iova),
            "map of {iova:#x} to {last:#x} overlaps {below:x?}"
        );
    }
}

impl DmaMapper for RecordingMapper {
    fn map(&mut self, iova: u64, memory: VolatileSlice<'_>, permissions: Permissions) -> Result<(), MapError> {
        let delay = self.0.state().delay;
        if !delay.is_zero() {
            thread::sleep(delay);
        }
        let mut state = self.0.state();
        let len = memory.len() as u64;
        assert!(len > 0, "map of nothing at {iova:#x}");
        assert!(!permissions.is_empty(), "map without permission");
        let limits = state.limits.clone().expect("every mapper has limits");
        state.check_map(&limits, iova, iova + (len - 1));
        match state.map_failure() {
            Some(Failure::Host) => return Err(io::Error::from_raw_os_error(5).into()),
            Some(Failure::NoResources) => return Err(MapError::NoResources),
            None => {}
        }
        let max = limits.max_mappings.map(|max| max as usize);
        if max.is_some_and(|max| state.mappings.len() >= max) {
            return Err(MapError::NoResources);
        }
        let mapping = HostMapping { len, host_address: memory.ptr_guard().as_ptr().addr(), permissions };
        state.mappings.insert(iova, mapping);
        Ok(())
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError> {
        let mut state = self.0.state();
        let last = iova + (len - 1);
        let inside = state.mappings.range(iova..=last);
        let covered = inside.fold(0, |covered, (start, mapping)| {
            let offset = start - iova;
            assert_eq!(offset, covered, "unmap of {iova:#x} to {last:#x} has a gap");
            covered + mapping.len
        });
        assert_eq!(covered, len, "unmap of {iova:#x} to {last:#x} is not of whole mappings");
        if state.unmap_fails() {
            return Err(io::Error::from_raw_os_error(5).into());
        }
        state.mappings.extract_if(iova..=last, |_, _| true).for_each(drop);
        Ok(())
    }

    fn limits(&self) -> MapperLimits {
        let limits = self.0.state().limits.clone();
        limits.expect("every mapper has limits")
    }

    fn maps_hidden_chunks(&self) -> bool {
        !self.0.state().reaches_seen_chunks_only
    }

    fn keeps_page_tables(&self) -> bool {
        self.0.state().keeps_page_tables
    }

    fn group(&self) -> Option<MapperGroup> {
        self.0.state().group.as_ref().map(|_| MapperGroup(7))
    }

    fn adopt(&mut self, endpoint: EndpointId) -> io::Result<()> {
        let group = self.0.state().group.clone().expect("only a mapper of a group adopts an endpoint");
        let group = group.upgrade().expect("the group exists as long as its mappers");
        let mut group = group.lock().unwrap_or_else(PoisonError::into_inner);
        if group.fail_adopt.as_mut().is_some_and(is_due) {
            group.fail_adopt = None;
            group.failures += 1;
            return Err(io::Error::from_raw_os_error(16));
        }
        let place = group.mappers.get_mut(&endpoint).expect("only an endpoint of the group is adopted");
        assert!(!place.is(&self.0), "endpoint {endpoint} is adopted by the mapper that it is in");
        *place = self.0.clone();
        Ok(())
    }
}
