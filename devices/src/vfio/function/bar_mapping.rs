// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Areas of a BAR that are mapped into this process and visible to the guest through memory slots.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;

use log::error;

use crate::host_range::{DeviceContent, DeviceRange};
use crate::platform::{HostRange, MemorySlots};

/// Area of a BAR, mapped into this process. Memory slots refer to the mapping, but this process never accesses the area.
#[derive(Debug)]
pub(crate) struct BarMapping {
    range: HostRange,
    read_only: bool,
}

impl BarMapping {
    /// Maps `len` bytes at `offset` of `file` as shared memory. `len` and `offset` must be multiples of the page size.
    pub(crate) fn new(file: &impl AsRawFd, offset: u64, len: usize, read_only: bool) -> io::Result<Self> {
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        let protection = if read_only { libc::PROT_READ } else { libc::PROT_READ | libc::PROT_WRITE };
        // SAFETY: A new mapping at an address that the kernel chooses touches no memory in use.
        let address =
            unsafe { libc::mmap(ptr::null_mut(), len, protection, libc::MAP_SHARED, file.as_raw_fd(), offset) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { range: HostRange { address: address as usize, len }, read_only })
    }
}

impl Drop for BarMapping {
    fn drop(&mut self) {
        // SAFETY: The range was mapped by `new`. Nothing uses the range any more, because every memory slot holds a reference to its
        // mapping.
        if unsafe { libc::munmap(self.range.address as *mut libc::c_void, self.range.len) } != 0 {
            error!("VFIO: cannot unmap part of a host device's BAR from this process: {}", io::Error::last_os_error());
        }
    }
}

/// Memory slot that makes a mapping visible to the guest. Dropping this value removes the slot.
pub(crate) struct BarSlot {
    slots: Arc<dyn MemorySlots>,
    slot: Option<u32>,
    mapping: Option<Arc<BarMapping>>,
}

impl BarSlot {
    /// Makes `mapping` visible to the guest at `gpa`.
    pub(crate) fn new(slots: &Arc<dyn MemorySlots>, mapping: &Arc<BarMapping>, gpa: u64) -> io::Result<Self> {
        // SAFETY: The range stays mapped until `mapping` is dropped. `BarMapping` gives no access to the bytes of the range.
        let range =
            unsafe { DeviceRange::new(mapping.range, mapping.read_only, DeviceContent::Registers, mapping.clone()) };
        // SAFETY: The reference kept below keeps the range mapped until the slot is removed.
        let slot = unsafe { slots.insert_device(gpa, &range) }?;
        Ok(Self { slots: slots.clone(), slot: Some(slot), mapping: Some(mapping.clone()) })
    }

    /// Blocks DMA of other devices to the area. Such a device gets access again when the guest maps the area for the device again.
    pub(crate) fn withhold(&self) -> io::Result<()> {
        self.slot.map_or(Ok(()), |slot| self.slots.withhold(slot))
    }

    /// Removes the slot. On failure the guest still sees the mapping.
    pub(crate) fn hide(&mut self) -> io::Result<()> {
        if let Some(slot) = self.slot {
            self.slots.remove(slot)?;
            self.slot = None;
        }
        Ok(())
    }
}

impl Drop for BarSlot {
    fn drop(&mut self) {
        if let Err(error) = self.hide() {
            error!(
                "VFIO: cannot remove the memory slot of part of a host device's BAR, so this part stays mapped until this process ends: {error}"
            );
            // The guest may still see the mapping, so it must never be unmapped.
            std::mem::forget(self.mapping.take());
        }
    }
}
