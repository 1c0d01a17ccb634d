// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A VM on disk: a directory of three files, as Cloud Hypervisor has them.
//!
//! | file | what |
//! | --- | --- |
//! | `config.json` | the configuration, as `vm.create` takes it |
//! | `memory-ranges` | the bytes of RAM and of bounce windows, with holes where all is zero |
//! | `state.json` | the rest ([`SnapshotState`]), and where in `memory-ranges` what stands |
//!
//! `state.json` comes last, under its name only once all else is on the disk: a directory without it is no snapshot. One that was
//! answered outlives a loss of power; where the client made the directory, the client sees to the name of that. What is read is checked
//! as a request is: it may come from anybody.

mod directory;
pub mod ram;
mod ram_file;
#[cfg(test)]
pub(crate) mod tests;

use std::ops::RangeInclusive;

use carom_api::config::MemoryConfig;
use carom_api::{ConfigError, IommuBounceConfig};
use devices::legacy::memory_devices::MAX_MEMORY_DEVICES;
use devices::pci::FunctionState;
use devices::state::{DeviceState, StateError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use directory::parse;
pub use directory::{NewSnapshot, Snapshot};
pub use ram_file::{RamFile, RamFileWriter};

use crate::arch::layout::MEMORY_DEVICE_GRANULE;
use crate::arch::saved::ProcessorsState;
use crate::kvm::KvmError;
use crate::memory;

/// The version of [`SnapshotState`] that this program writes, and the only one that it reads.
pub const VERSION: u32 = 1;

/// RAM in `memory-ranges`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RamRange {
    /// Guest-physical address.
    pub gpa: u64,
    /// Bytes.
    pub len: u64,
    /// Where it begins in the file, in bytes.
    pub offset: u64,
}

/// A chunk of bounce windows in `memory-ranges`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunkRange {
    /// Its place in the shared memory region, in chunks.
    pub index: u32,
    /// Bytes.
    pub len: u64,
    /// Where it begins in the file, in bytes.
    pub offset: u64,
}

/// What a VM is, but for its configuration and the bytes of its memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotState {
    /// [`VERSION`].
    pub version: u32,
    /// vCPUs, interrupt controllers, clock.
    pub processors: ProcessorsState,
    /// Devices that sit on no bus.
    pub platform: Vec<DeviceState>,
    /// The functions on the root bus.
    pub functions: Vec<FunctionState>,
    /// RAM in `memory-ranges` that the guest was booted with.
    pub ram: Vec<RamRange>,
    /// RAM in `memory-ranges` that came since, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub added_ram: Vec<RamRange>,
    /// Bounce windows in `memory-ranges`.
    pub windows: Vec<ChunkRange>,
    /// Guest-physical address of the VM Generation ID, if the guest has one. The ID itself is not saved: each restore draws another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation_id: Option<u64>,
}

/// Why a VM could not be saved or restored.
#[derive(Debug, Error)]
pub enum SnapshotError {
    /// The destination has a file of a snapshot in it.
    #[error("{0}: is there already: a snapshot goes to a directory that has none, or does not exist")]
    Exists(String),
    /// A file or directory.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: String,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// A file is not of its form.
    #[error("{path}: {rule}")]
    Form {
        /// Which.
        path: String,
        /// What is wrong.
        rule: String,
    },
    /// RAM could not be made.
    #[error(transparent)]
    Memory(#[from] memory::MemoryError),
    /// It cannot be what the client wants.
    #[error(transparent)]
    Config(Box<ConfigError>),
    /// The part of the kernel.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A state cannot be saved, or is refused.
    #[error(transparent)]
    State(#[from] StateError),
}

/// What places and lengths in the file are multiples of.
const PAGE: u64 = crate::arch::layout::PAGE_SIZE;

impl From<ConfigError> for SnapshotError {
    fn from(error: ConfigError) -> Self {
        Self::Config(Box::new(error))
    }
}

impl SnapshotError {
    /// Whether the user can mend it.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Exists(_) | Self::File { .. } | Self::Form { .. } | Self::State(_) | Self::Config(_) => true,
            Self::Memory(error) => error.is_user_error(),
            // KVM does not take a value that a file has.
            Self::Kvm(KvmError::Call { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => true,
            Self::Kvm(error) => error.is_user_error(),
        }
    }
}

impl SnapshotState {
    /// IOVAs of the bounce windows' aperture, where the virtio-iommu's state has it. It is not checked.
    pub fn window_aperture(&self) -> Option<RangeInclusive<u64>> {
        let iommu = self.functions.iter().find(|function| function.id == IommuBounceConfig::ID)?;
        // Of the device in the transport. The device reads all of it later; this is wanted before there is one.
        let aperture = iommu.state.payload.pointer("/device/payload/window/aperture")?;
        let (start, end) = <(u64, u64)>::deserialize(aperture).ok()?;
        Some(start..=end)
    }

    /// Checks what concerns the whole: that the state is of this program's form, of a VM with so many vCPUs, from what it is to have to
    /// what it may, and with this RAM, and within a file of `file_len` bytes.
    ///
    /// # Errors
    /// A rule does not hold.
    pub fn check(&self, vcpus: &RangeInclusive<u32>, wanted: &MemoryConfig, file_len: u64) -> Result<(), StateError> {
        if self.version != VERSION {
            return Err(StateError::Version { kind: "snapshot", wanted: VERSION, found: self.version });
        }
        self.processors.check(vcpus)?;
        let booted_with = self.check_added_ram(wanted)?;
        let ram: Vec<(u64, u64)> = self.ram.iter().map(|range| (range.gpa, range.len)).collect();
        if ram != memory::layout(&wanted.booted_with(booted_with)) {
            let rule = format!("is not that of {} bytes, which the configuration has", wanted.total());
            return Err(StateError::rule("ram", rule));
        }
        let all_ram = self.ram.iter().chain(&self.added_ram);
        let mut places: Vec<(u64, u64)> = all_ram.map(|range| (range.offset, range.len)).collect();
        places.extend(self.windows.iter().map(|range| (range.offset, range.len)));
        places.sort_unstable();
        let mut free = 0;
        for (offset, len) in places {
            if !offset.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) || len == 0 {
                let rule = format!("a range of {len:#x} bytes at {offset:#x} is not made of whole pages");
                return Err(StateError::rule("memory-ranges", rule));
            }
            if offset < free {
                let rule = format!("the range at {offset:#x} overlaps the one before it");
                return Err(StateError::rule("memory-ranges", rule));
            }
            free = offset.checked_add(len).filter(|end| *end <= file_len).ok_or_else(|| {
                let rule =
                    format!("a range of {len:#x} bytes at {offset:#x} ends behind the file's {file_len:#x} bytes");
                StateError::rule("memory-ranges", rule)
            })?;
        }
        let mut chunks: Vec<u32> = self.windows.iter().map(|range| range.index).collect();
        chunks.sort_unstable();
        if let Some(twice) = chunks.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(StateError::rule("windows", format!("chunk {} is there twice", twice[0])));
        }
        Ok(())
    }

    /// Checks the RAM that came since the guest was booted, of all that is wanted. Returns with how many bytes it was booted.
    fn check_added_ram(&self, wanted: &MemoryConfig) -> Result<u64, StateError> {
        let refuse = |rule: String| Err(StateError::rule("added_ram", rule));
        let ram_size = wanted.total();
        if !wanted.zones.is_empty() && !self.added_ram.is_empty() {
            return refuse("is there, but none comes to a VM whose RAM is made of zones".into());
        }
        let mut booted_with = ram_size;
        for range in &self.added_ram {
            if range.len == 0
                || !range.gpa.is_multiple_of(MEMORY_DEVICE_GRANULE)
                || !range.len.is_multiple_of(MEMORY_DEVICE_GRANULE)
            {
                return refuse(format!(
                    "{:#x} bytes at {:#x} are not in steps of {MEMORY_DEVICE_GRANULE:#x}",
                    range.len, range.gpa
                ));
            }
            match booted_with.checked_sub(range.len) {
                Some(left) if left > 0 => booted_with = left,
                _ => return refuse(format!("is not less than the {ram_size} bytes that the configuration has")),
            }
        }
        if self.added_ram.len() > MAX_MEMORY_DEVICES {
            return refuse(format!("has {} pieces, more than {MAX_MEMORY_DEVICES}", self.added_ram.len()));
        }
        let mut free = memory::end(booted_with);
        for range in &self.added_ram {
            if range.gpa < free {
                return refuse(format!("begins at {:#x}, before the RAM below it ends", range.gpa));
            }
            free = range.gpa.saturating_add(range.len);
        }
        Ok(booted_with)
    }
}
