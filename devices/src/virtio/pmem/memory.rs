// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host file in the guest's address space: a mapping of the file, registered as a memory slot. This module contains all unsafe code of the
//! device.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ptr;
use std::sync::{Arc, Mutex};

use log::warn;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::host_memory::{Origin, Registration, Supply, register};
use crate::host_range::{DeviceContent, DeviceRange, FilePlace};
use crate::platform::{HostRange, MemorySlots};
use crate::sync::lock;

/// Mapping of a file. Rust code never creates references to its bytes, because the guest and the host may change them at any time.
struct Mapping {
    range: HostRange,
    /// Registration of the range as guest memory, with the mapping's name. `drop` ends the registration first, and then unmaps the range.
    name: Option<Registration>,
}

impl Mapping {
    /// Maps the first `len` bytes of `file`. `name` is the mapping's name in messages. Writes to a `private` mapping do not reach the file.
    fn new(file: &Arc<File>, name: String, len: usize, private: bool) -> io::Result<Self> {
        let flags = if private { MapFlags::PRIVATE | MapFlags::NORESERVE } else { MapFlags::SHARED };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: No address is requested, so the kernel picks an unused range.
        let start = unsafe { mmap(ptr::null_mut(), len, access, flags, file, 0) }?;
        let range = HostRange { address: start.expose_provenance(), len };
        let holes = (!private).then(|| file.clone());
        let origin = Origin { name, supply: Supply::File, file: holes, offset: 0, gpa: None };
        let mapping = Self { range, name: Some(register(range, origin)) };
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            // SAFETY: The range was just mapped, and neither advice changes its bytes or its access.
            if let Err(error) = unsafe { madvise(start, len, advice) } {
                warn!(
                    "cannot exclude the file of persistent memory from forks and core dumps, so forks may be slower and core dumps larger: {error}"
                );
            }
        }
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        drop(self.name.take());
        let address = ptr::with_exposed_provenance_mut::<c_void>(self.range.address);
        // SAFETY: Only this mapping owns the range. No slot and no device uses the range any more, because each keeps a clone of the
        // `DeviceRange` that owns this mapping.
        if let Err(error) = unsafe { munmap(address, self.range.len) } {
            warn!("virtio-pmem: cannot unmap the file: {error}");
        }
    }
}

/// Memory slot, and its position in the guest's address space.
#[derive(Clone, Copy, Debug)]
struct MappedSlot {
    gpa: u64,
    slot: u32,
}

/// Memory of the device: the mapped file, and its memory slot.
pub(super) struct Memory {
    slots: Arc<dyn MemorySlots>,
    mapped: Mutex<Option<MappedSlot>>,
    /// `None` after `drop` has failed to remove the memory slot. The file then stays mapped, because the guest may still access it.
    mapping: Option<DeviceRange>,
}

impl Memory {
    /// Maps the first `len` bytes of `file`. `name` is the mapping's name in messages.
    ///
    /// # Errors
    /// The kernel cannot map the file.
    pub(super) fn map(
        file: &Arc<File>,
        name: String,
        len: u64,
        private: bool,
        slots: Arc<dyn MemorySlots>,
    ) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(io::Error::other)?;
        let mapping = Mapping::new(file, name, len, private)?;
        // No file contains the guest's writes to a private mapping.
        let file = (!private).then(|| FilePlace { file: file.clone(), offset: 0 });
        let content = DeviceContent::Pages { file };
        // SAFETY: The range is mapped, readable and writable until the `Mapping` is dropped, and the `Mapping` creates no references to its
        // bytes.
        let mapping = unsafe { DeviceRange::new(mapping.range, false, content, Arc::new(mapping)) };
        Ok(Self { slots, mapped: Mutex::default(), mapping: Some(mapping) })
    }

    /// Returns the guest-physical address of the memory, if it is registered.
    pub(super) fn address(&self) -> Option<u64> {
        lock(&self.mapped).map(|mapped| mapped.gpa)
    }

    /// Registers the memory at `gpa`. If the memory is registered at another address, this function first removes that registration.
    ///
    /// # Errors
    /// The platform rejects the change. Then the memory is not registered, or is still registered at its previous address.
    pub(super) fn show(&self, gpa: u64) -> io::Result<()> {
        let mut mapped = lock(&self.mapped);
        if mapped.is_some_and(|mapped| mapped.gpa == gpa) {
            return Ok(());
        }
        self.remove(&mut mapped)?;
        let Some(range) = &self.mapping else { return Ok(()) };
        // SAFETY: The range is kept until `self` is dropped. `drop` removes the slot first. If the removal fails, the range is kept forever.
        let slot = unsafe { self.slots.insert_device(gpa, range) }?;
        *mapped = Some(MappedSlot { gpa, slot });
        Ok(())
    }

    /// Removes the memory from the guest's address space.
    ///
    /// # Errors
    /// The platform rejects the change. Then the guest can still access the memory.
    pub(super) fn hide(&self) -> io::Result<()> {
        self.remove(&mut lock(&self.mapped))
    }

    fn remove(&self, mapped: &mut Option<MappedSlot>) -> io::Result<()> {
        if let Some(MappedSlot { slot, .. }) = *mapped {
            self.slots.remove(slot)?;
            *mapped = None;
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Err(error) = self.hide() {
            warn!("virtio-pmem: cannot remove the memory slot of the file, so the file stays mapped: {error}");
            std::mem::forget(self.mapping.take());
        }
    }
}
