// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A file of the host in the guest's view: a mapping of it, shown by a memory slot. All unsafe code of the device stands here.

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

/// A file that is mapped. No Rust reference to its bytes is ever made: the guest changes them at any time, and the host may.
struct Mapping {
    range: HostRange,
    /// Its name in messages. Absent once it is about to be unmapped.
    name: Option<Registration>,
}

impl Mapping {
    /// Maps the first `len` bytes of `file`, which messages call `name`. Writes to a `private` one stay in it.
    fn new(file: &Arc<File>, name: String, len: usize, private: bool) -> io::Result<Self> {
        let flags = if private { MapFlags::PRIVATE | MapFlags::NORESERVE } else { MapFlags::SHARED };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: No address is asked for, so the kernel picks one where nothing is.
        let start = unsafe { mmap(ptr::null_mut(), len, access, flags, file, 0) }?;
        let range = HostRange { address: start.expose_provenance(), len };
        let holes = (!private).then(|| file.clone());
        let origin = Origin { name, supply: Supply::File, file: holes, offset: 0, gpa: None };
        let mapping = Self { range, name: Some(register(range, origin)) };
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            // SAFETY: The range was just mapped; neither advice changes its bytes or its access.
            if let Err(error) = unsafe { madvise(start, len, advice) } {
                warn!("advice on a mapped file refused, which only costs memory in a fork or a core dump: {error}");
            }
        }
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        drop(self.name.take());
        let address = ptr::with_exposed_provenance_mut::<c_void>(self.range.address);
        // SAFETY: The range is this mapping's alone. No slot and no device has it any more: each keeps a clone of the `DeviceRange`
        // that owns this.
        if let Err(error) = unsafe { munmap(address, self.range.len) } {
            warn!("a file could not be unmapped: {error}");
        }
    }
}

/// Where the guest sees it.
#[derive(Clone, Copy, Debug)]
struct Shown {
    gpa: u64,
    slot: u32,
}

/// The memory.
pub(super) struct Memory {
    slots: Arc<dyn MemorySlots>,
    shown: Mutex<Option<Shown>>,
    /// `None` once it cannot be unmapped, as the guest may see it still.
    mapping: Option<DeviceRange>,
}

impl Memory {
    /// Maps the first `len` bytes of `file`, which messages call `name`.
    ///
    /// # Errors
    /// What the kernel refused.
    pub(super) fn map(
        file: &Arc<File>,
        name: String,
        len: u64,
        private: bool,
        slots: Arc<dyn MemorySlots>,
    ) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(io::Error::other)?;
        let mapping = Mapping::new(file, name, len, private)?;
        // No file holds what the guest writes to a private mapping.
        let file = (!private).then(|| FilePlace { file: file.clone(), offset: 0 });
        let content = DeviceContent::Pages { file };
        // SAFETY: The range is mapped, readable and writable, until the `Mapping` is dropped, which makes no references to its bytes.
        let mapping = unsafe { DeviceRange::new(mapping.range, false, content, Arc::new(mapping)) };
        Ok(Self { slots, shown: Mutex::default(), mapping: Some(mapping) })
    }

    /// Where the guest sees it, if it does.
    pub(super) fn address(&self) -> Option<u64> {
        lock(&self.shown).map(|shown| shown.gpa)
    }

    /// Shows it at `gpa`, and no longer where it was.
    ///
    /// # Errors
    /// The platform refuses; the guest does not see it then, or where it was.
    pub(super) fn show(&self, gpa: u64) -> io::Result<()> {
        let mut shown = lock(&self.shown);
        if shown.is_some_and(|shown| shown.gpa == gpa) {
            return Ok(());
        }
        self.remove(&mut shown)?;
        let Some(range) = &self.mapping else { return Ok(()) };
        // SAFETY: The range is kept until `self` is dropped, which removes the slot first, or keeps the range forever where it cannot.
        let slot = unsafe { self.slots.insert_device(gpa, range) }?;
        *shown = Some(Shown { gpa, slot });
        Ok(())
    }

    /// Takes it out of the guest's view.
    ///
    /// # Errors
    /// The platform refuses; the guest sees it still.
    pub(super) fn hide(&self) -> io::Result<()> {
        self.remove(&mut lock(&self.shown))
    }

    fn remove(&self, shown: &mut Option<Shown>) -> io::Result<()> {
        if let Some(Shown { slot, .. }) = *shown {
            self.slots.remove(slot)?;
            *shown = None;
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Err(error) = self.hide() {
            warn!("the memory slot of a mapped file could not be removed, so it stays mapped: {error}");
            std::mem::forget(self.mapping.take());
        }
    }
}
