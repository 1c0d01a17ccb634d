// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM for tests.

use std::sync::atomic::{AtomicBool, Ordering};

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileSlice};

use crate::{GuestRam, Permissions};

/// Guest RAM made of regions, each of them contiguous in host memory and none next to another there.
///
/// It can have one device beside it, whose memory is never RAM.
#[derive(Debug)]
pub struct TestRam {
    ram: GuestMemoryMmap<()>,
    /// Regions from this address on come later: an engine that is set up is not told of them.
    later: u64,
    device: Option<Device>,
}

#[derive(Debug)]
struct Device {
    memory: GuestMemoryMmap<()>,
    /// Whether the guest sees it.
    shown: AtomicBool,
    read_only: bool,
}

impl TestRam {
    /// RAM at these guest addresses: `(gpa, len)` each, in bytes.
    ///
    /// # Panics
    /// If the regions overlap, or the memory is not to be had.
    pub fn new(regions: &[(u64, usize)]) -> Self {
        let regions: Vec<_> = regions.iter().map(|&(gpa, len)| (GuestAddress(gpa), len)).collect();
        Self {
            ram: GuestMemoryMmap::from_ranges(&regions).expect("the regions are disjoint"),
            later: u64::MAX,
            device: None,
        }
    }

    /// The same, whose regions from `gpa` on come later: [`regions`](GuestRam::regions) does not have them.
    #[must_use]
    pub fn with_later(self, gpa: u64) -> Self {
        Self { later: gpa, ..self }
    }

    /// The same with a device, of which the guest sees `len` bytes at `gpa`.
    ///
    /// # Panics
    /// If the memory is not to be had.
    #[must_use]
    pub fn with_device(mut self, gpa: u64, len: usize, read_only: bool) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(gpa), len)]).expect("it is one region");
        self.device = Some(Device { memory, shown: AtomicBool::new(true), read_only });
        self
    }

    /// Whether the guest sees the device's memory from now on. Before it ceases to, the engine has to be told.
    pub fn show_device(&self, shown: bool) {
        if let Some(device) = &self.device {
            device.shown.store(shown, Ordering::Relaxed);
        }
    }

    /// Where the byte at `gpa` is in the host's address space.
    ///
    /// # Panics
    /// If there is no memory.
    pub fn host_address(&self, gpa: u64) -> usize {
        let device = || self.device.as_ref()?.memory.get_slice(GuestAddress(gpa), 1).ok();
        let slice = self.slice(gpa, 1).or_else(device).expect("there is memory");
        slice.ptr_guard().as_ptr().addr()
    }
}

impl GuestRam for TestRam {
    fn slice(&self, gpa: u64, len: u64) -> Option<VolatileSlice<'_>> {
        let len = usize::try_from(len).ok()?;
        self.ram.get_slice(GuestAddress(gpa), len).ok()
    }

    fn regions(&self) -> Vec<(u64, u64)> {
        let all = self.ram.iter().map(|region| (region.start_addr().0, region.len()));
        all.filter(|(gpa, _)| *gpa < self.later).collect()
    }

    fn prefix(&self, gpa: u64, len: u64) -> Option<VolatileSlice<'_>> {
        let len = usize::try_from(len).ok()?;
        self.ram.get_slices(GuestAddress(gpa), len).next()?.ok()
    }

    fn has_devices(&self) -> bool {
        self.device.is_some()
    }

    fn device(&self, gpa: u64, len: u64, permissions: Permissions, then: &mut dyn FnMut(VolatileSlice<'_>)) {
        let Some(device) = &self.device else { return };
        let allowed = !device.read_only || permissions == Permissions::READ;
        if allowed
            && device.shown.load(Ordering::Relaxed)
            && let Ok(len) = usize::try_from(len)
            && let Ok(slice) = device.memory.get_slice(GuestAddress(gpa), len)
        {
            then(slice);
        }
    }
}
