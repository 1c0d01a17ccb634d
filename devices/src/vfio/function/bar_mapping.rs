// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Pieces of a device's BARs in this process's address space, and shown to the guest.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;

use log::error;

use crate::platform::{HostRange, MemorySlots};

/// A piece of a device's memory, mapped into this process and never accessed by it: it is there for memory slots.
#[derive(Debug)]
pub(crate) struct BarMapping {
    range: HostRange,
    read_only: bool,
}

impl BarMapping {
    /// Maps `len` bytes at `offset` of `file`, shared, both multiples of the page size.
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
        // SAFETY: The range was mapped by `new`, and nothing uses it any more: slots made of it hold a reference.
        if unsafe { libc::munmap(self.range.address as *mut libc::c_void, self.range.len) } != 0 {
            error!("unmapping a piece of a BAR: {}", io::Error::last_os_error());
        }
    }
}

/// A mapping that the guest sees, until it is hidden or this is dropped.
pub(crate) struct BarSlot {
    slots: Arc<dyn MemorySlots>,
    slot: Option<u32>,
    mapping: Option<Arc<BarMapping>>,
}

impl BarSlot {
    /// Shows `mapping` to the guest at `gpa`.
    pub(crate) fn new(slots: &Arc<dyn MemorySlots>, mapping: &Arc<BarMapping>, gpa: u64) -> io::Result<Self> {
        // SAFETY: The reference kept below keeps the range mapped until the slot is gone, and `BarMapping` gives no
        // access to its bytes.
        let slot = unsafe { slots.insert(gpa, mapping.range, mapping.read_only) }?;
        Ok(Self { slots: slots.clone(), slot: Some(slot), mapping: Some(mapping.clone()) })
    }

    /// Nobody but the guest is to reach it for now.
    pub(crate) fn withhold(&self) -> io::Result<()> {
        self.slot.map_or(Ok(()), |slot| self.slots.withhold(slot))
    }

    /// Takes it out of the guest's view. On failure the guest sees it still.
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
            error!("taking a piece of a BAR out of the guest's memory: {error}");
            // The guest may see it still, so it must stay mapped for ever.
            std::mem::forget(self.mapping.take());
        }
    }
}
