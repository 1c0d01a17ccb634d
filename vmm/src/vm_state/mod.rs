// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! State of a VM, independent of its storage: a snapshot directory, or memory of this process.
//!
//! A VM is saved to a [`StateSink`] and restored from a [`StateSource`]. A saved VM has three parts: the configuration, [`VmState`], and
//! the contents of the VM's memory. Ranges in [`VmState`] contain offsets into these contents. Code that depends on files, streams or the
//! API does not belong here.

mod error;
pub mod in_memory;
pub mod ram;
mod sink;
mod source;

use std::ops::RangeInclusive;

use carom_api::config::MemoryConfig;
use devices::acpi::memory_devices::MAX_MEMORY_DEVICES;
use devices::pci::FunctionState;
use devices::state::{DeviceState, StateError};
use serde::{Deserialize, Serialize};

pub use self::error::VmStateError;
pub use self::sink::StateSink;
pub use self::source::{MemoryFile, StateSource};
use crate::arch::layout::{MEMORY_DEVICE_GRANULE, PAGE_SIZE, boot_ram, ram_end};
use crate::arch::saved::ProcessorsState;

/// The version of [`VmState`] that this program writes, and the only version that it reads.
pub const VERSION: u32 = 1;

/// Range of RAM, and the offset of its bytes in the saved memory contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RamRange {
    /// Guest-physical address.
    pub gpa: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset of the first byte in the saved memory contents.
    pub offset: u64,
}

/// Chunk of bounce windows, and the offset of its bytes in the saved memory contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkRange {
    /// Number of the chunk in the shared memory region. Chunk 0 is at the start of the region.
    pub index: u32,
    /// Length in bytes.
    pub len: u64,
    /// Offset of the first byte in the saved memory contents.
    pub offset: u64,
}

/// State of a VM, without its configuration and its memory contents.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmState {
    /// Version of the state, which must be [`VERSION`].
    pub version: u32,
    /// vCPUs, interrupt controllers, clock.
    pub processors: ProcessorsState,
    /// Devices that are not on a bus.
    pub platform: Vec<DeviceState>,
    /// Functions on the root bus.
    pub functions: Vec<FunctionState>,
    /// RAM at boot.
    pub ram: Vec<RamRange>,
    /// RAM that was added after boot, in order of address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub added_ram: Vec<RamRange>,
    /// Bounce windows.
    pub windows: Vec<ChunkRange>,
    /// First and last IOVA of the aperture of bounce windows, if the VM has an aperture. The value is not validated here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_aperture: Option<(u64, u64)>,
    /// Guest-physical address of the VM Generation ID, if the guest has one. The ID itself is not saved: each restore generates a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation_id: Option<u64>,
}

impl VmState {
    /// Checks the state as a whole: its version, the number of vCPUs, and its RAM. `vcpus` is the range from the number of vCPUs at boot to
    /// their maximum number. `memory_len` is the length of the saved memory contents in bytes.
    ///
    /// # Errors
    /// The state is invalid.
    pub fn check(&self, vcpus: &RangeInclusive<u32>, wanted: &MemoryConfig, memory_len: u64) -> Result<(), StateError> {
        if self.version != VERSION {
            return Err(StateError::Version { kind: "snapshot", wanted: VERSION, found: self.version });
        }
        self.processors.check(vcpus)?;
        let booted_with = self.check_added_ram(wanted)?;
        let ram: Vec<(u64, u64)> = self.ram.iter().map(|range| (range.gpa, range.len)).collect();
        if ram != boot_ram(&wanted.booted_with(booted_with)) {
            let rule = format!(
                "the saved RAM ranges do not match the configuration's {} bytes of RAM: restore with the configuration that was saved",
                wanted.total()
            );
            return Err(StateError::rule("ram", rule));
        }
        let all_ram = self.ram.iter().chain(&self.added_ram);
        let mut places: Vec<(u64, u64)> = all_ram.map(|range| (range.offset, range.len)).collect();
        places.extend(self.windows.iter().map(|range| (range.offset, range.len)));
        places.sort_unstable();
        let mut free = 0;
        for (offset, len) in places {
            if !offset.is_multiple_of(PAGE_SIZE) || !len.is_multiple_of(PAGE_SIZE) || len == 0 {
                let rule = format!(
                    "the saved range of {len:#x} bytes at offset {offset:#x} must have a positive length, and its length and offset must be multiples of {PAGE_SIZE:#x}: restore from an unmodified snapshot"
                );
                return Err(StateError::rule("memory-ranges", rule));
            }
            if offset < free {
                let rule = format!(
                    "the saved range at offset {offset:#x} overlaps the range before it: restore from an unmodified snapshot"
                );
                return Err(StateError::rule("memory-ranges", rule));
            }
            free = offset.checked_add(len).filter(|end| *end <= memory_len).ok_or_else(|| {
                let rule =
                    format!("the saved range of {len:#x} bytes at offset {offset:#x} ends beyond the file's {memory_len:#x} bytes: restore from a complete, unmodified snapshot");
                StateError::rule("memory-ranges", rule)
            })?;
        }
        let mut chunks: Vec<u32> = self.windows.iter().map(|range| range.index).collect();
        chunks.sort_unstable();
        if let Some(twice) = chunks.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(StateError::rule(
                "windows",
                format!("window chunk {} is saved twice: restore from an unmodified snapshot", twice[0]),
            ));
        }
        Ok(())
    }

    /// Checks the RAM that was added since boot, against the total RAM in `wanted`. Returns the bytes of RAM at boot.
    fn check_added_ram(&self, wanted: &MemoryConfig) -> Result<u64, StateError> {
        let refuse = |rule: String| Err(StateError::rule("added_ram", rule));
        let ram_size = wanted.total();
        if !wanted.zones.is_empty() && !self.added_ram.is_empty() {
            return refuse(
                "a VM with memory zones cannot have added RAM: restore with the configuration that was saved".into(),
            );
        }
        let mut booted_with = ram_size;
        for range in &self.added_ram {
            if range.len == 0
                || !range.gpa.is_multiple_of(MEMORY_DEVICE_GRANULE)
                || !range.len.is_multiple_of(MEMORY_DEVICE_GRANULE)
            {
                return refuse(format!(
                    "the saved range of {:#x} bytes at {:#x} must have a positive length, and its length and address must be multiples of {MEMORY_DEVICE_GRANULE:#x}: restore from an unmodified snapshot",
                    range.len, range.gpa
                ));
            }
            match booted_with.checked_sub(range.len) {
                Some(left) if left > 0 => booted_with = left,
                _ => {
                    return refuse(format!(
                        "the saved ranges of added RAM together must have fewer bytes than the configuration's RAM of {ram_size} bytes: restore with the configuration that was saved"
                    ));
                }
            }
        }
        if self.added_ram.len() > MAX_MEMORY_DEVICES {
            return refuse(format!(
                "the saved state has {} ranges of added RAM, more than the maximum of {MAX_MEMORY_DEVICES}: restore from an unmodified snapshot",
                self.added_ram.len()
            ));
        }
        let mut free = ram_end(booted_with);
        for range in &self.added_ram {
            if range.gpa < free {
                return refuse(format!(
                    "the saved range of added RAM at {:#x} overlaps earlier RAM: restore from an unmodified snapshot",
                    range.gpa
                ));
            }
            free = range.gpa.saturating_add(range.len);
        }
        Ok(booted_with)
    }
}
