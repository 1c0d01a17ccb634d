// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM for tests.

use std::sync::atomic::{AtomicBool, Ordering};

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileSlice};

use crate::{DeviceMemoryKind, GuestRam, Permissions, ThenDevice};

/// Guest RAM of several regions. Each region is contiguous in host memory, and no two regions are adjacent in host memory.
///
/// A `TestRam` can also have devices. Their memory is never RAM.
#[derive(Debug)]
pub struct TestRam {
    ram: GuestMemoryMmap<()>,
    /// Regions from this address on are added later: a new engine does not see them.
    later: u64,
    devices: Vec<Device>,
}

#[derive(Debug)]
struct Device {
    memory: GuestMemoryMmap<()>,
    /// True if the guest sees the device.
    shown: AtomicBool,
    read_only: bool,
    kind: DeviceMemoryKind,
}

impl TestRam {
    /// Creates RAM with these regions: `(gpa, len)` each, in bytes.
    ///
    /// # Panics
    /// Panics if the regions overlap, or if the memory cannot be allocated.
    pub fn new(regions: &[(u64, usize)]) -> Self {
        let regions: Vec<_> = regions.iter().map(|&(gpa, len)| (GuestAddress(gpa), len)).collect();
        Self {
            ram: GuestMemoryMmap::from_ranges(&regions).expect("the regions are disjoint"),
            later: u64::MAX,
            devices: Vec::new(),
        }
    }

    /// Makes the regions from `gpa` on appear later: [`regions`](GuestRam::regions) omits them.
    #[must_use]
    pub fn with_later(self, gpa: u64) -> Self {
        Self { later: gpa, ..self }
    }

    /// Adds a device. The guest sees `len` bytes of the device's registers at `gpa`.
    ///
    /// # Panics
    /// Panics if the memory cannot be allocated.
    #[must_use]
    pub fn with_device(self, gpa: u64, len: usize, read_only: bool) -> Self {
        self.with(gpa, len, read_only, DeviceMemoryKind::Registers)
    }

    /// Adds a file of the host. The guest sees `len` bytes of the file at `gpa`.
    ///
    /// # Panics
    /// Panics if the memory cannot be allocated.
    #[must_use]
    pub fn with_file(self, gpa: u64, len: usize) -> Self {
        self.with(gpa, len, false, DeviceMemoryKind::Pages)
    }

    fn with(mut self, gpa: u64, len: usize, read_only: bool, kind: DeviceMemoryKind) -> Self {
        let memory =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(gpa), len)]).expect("a single region overlaps no other");
        self.devices.push(Device { memory, shown: AtomicBool::new(true), read_only, kind });
        self
    }

    /// Makes the devices' memory visible to the guest, or hides it. Before hiding the memory, revoke it from the engine.
    pub fn show_device(&self, shown: bool) {
        for device in &self.devices {
            device.shown.store(shown, Ordering::Relaxed);
        }
    }

    /// Returns the address of the byte at `gpa` in the host's address space.
    ///
    /// # Panics
    /// Panics if there is no memory at `gpa`.
    pub fn host_address(&self, gpa: u64) -> usize {
        let device = || self.devices.iter().find_map(|device| device.memory.get_slice(GuestAddress(gpa), 1).ok());
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

    fn offers_mmio(&self) -> bool {
        !self.devices.is_empty()
    }

    fn device(&self, gpa: u64, len: u64, permissions: Permissions, then: ThenDevice<'_>) {
        let Ok(len) = usize::try_from(len) else { return };
        let allowed = |device: &&Device| {
            device.shown.load(Ordering::Relaxed) && (!device.read_only || permissions == Permissions::READ)
        };
        for device in self.devices.iter().filter(allowed) {
            if let Ok(slice) = device.memory.get_slice(GuestAddress(gpa), len) {
                then(slice, device.kind);
                return;
            }
        }
    }
}
