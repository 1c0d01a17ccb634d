// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A VM saved and restored.
//!
//! The order matters. Devices are saved before vCPUs, since what they have raised last is in a local APIC by then. They are
//! restored after vCPUs and interrupt controllers, so that what they raise is not overwritten.

use std::collections::BTreeMap;

use carom_api::{IommuBounceConfig, VmConfig};
use devices::legacy::memory_devices::MemoryDevice;
use devices::pci::PciAddress;
use devices::state::StateError;
use devices::virtio::iommu::IommuHandle;

use super::Vm;
use crate::arch::clock::ClockState;
use crate::arch::generation_id;
use crate::arch::saved::ProcessorsState;
use crate::memory;
use crate::snapshot::{ChunkRange, NewSnapshot, RamFileWriter, Snapshot, SnapshotError, SnapshotState, VERSION, ram};

/// What a VM is restored from.
pub(super) struct Source<'s> {
    pub(super) snapshot: &'s Snapshot,
    /// All of the RAM is read when the VM is built.
    pub(super) prefault: bool,
}

impl Source<'_> {
    /// Where the functions were, by name.
    pub(super) fn places(&self) -> BTreeMap<String, PciAddress> {
        let functions = self.snapshot.state.functions.iter();
        functions.map(|function| (function.id.clone(), function.address())).collect()
    }
}

impl Source<'_> {
    /// The RAM that came since the guest was booted.
    pub(super) fn added_ram(&self) -> Vec<MemoryDevice> {
        let ranges = self.snapshot.state.added_ram.iter();
        ranges.map(|range| MemoryDevice { gpa: range.gpa, len: range.len }).collect()
    }
}

/// The guest's clock while the VM is paused.
#[derive(Clone, Copy, Debug)]
pub(super) enum StoppedClock {
    /// It goes on where it stood.
    Paused(ClockState),
    /// It goes on where it would stand had it never stopped: the guest was saved, and the world went on.
    Restored(ClockState),
}

impl StoppedClock {
    fn state(self) -> ClockState {
        match self {
            Self::Paused(clock) | Self::Restored(clock) => clock,
        }
    }
}

impl Vm {
    /// Writes all that the VM is, which is paused.
    pub(super) fn save_to(&mut self, config: &VmConfig, mut snapshot: NewSnapshot) -> Result<(), SnapshotError> {
        self.close_gone();
        self.park_gone();
        if self.parts.iommu().is_some() && !config.has_iommu() {
            let rule = "is there for devices that have left; the configuration has nothing behind it, and it would not be restored";
            return Err(StateError::rule(IommuBounceConfig::ID, rule).into());
        }
        // What cannot be saved is known before anything large is written.
        let functions = self.pci.save()?;
        let platform = self.platform.save()?;
        let clock = self.clock.map_or_else(|| ClockState::save(&self.kvm.fd), |clock| Ok(clock.state()))?;
        let processors = ProcessorsState::save(&self.kvm, &self.processors, clock)?;
        let mut file = snapshot.memory()?;
        let mut write = || {
            let at_boot = memory::layout(&config.memory.booted_with(self.ram_size));
            let ram = ram::write(&self.memory, &at_boot, &mut file)?;
            let added_ram = ram::write(&self.memory, &self.added_ranges(), &mut file)?;
            let windows = self.parts.iommu().map_or_else(|| Ok(Vec::new()), |iommu| write_windows(iommu, &mut file))?;
            Ok((ram, added_ram, windows))
        };
        let written = write().and_then(|written| file.finish().map(|_| written));
        let (ram, added_ram, windows) = written.map_err(|error| snapshot.memory_error(error))?;
        let generation_id = self.knows_generation_id.then_some(generation_id::ADDRESS);
        let state =
            SnapshotState { version: VERSION, processors, platform, functions, ram, added_ram, windows, generation_id };
        snapshot.finish(config, &state)
    }

    /// Makes a VM that was just built what the snapshot says. It is paused.
    pub(super) fn restore_state(&mut self, snapshot: &Snapshot) -> Result<(), SnapshotError> {
        let state = &snapshot.state;
        let counter = state.processors.restore(&self.kvm, &self.processors)?;
        self.processors.follow(counter);
        self.pci.restore(&state.functions)?;
        if let Some(iommu) = self.parts.iommu() {
            // The guest sees all devices' memory by now.
            let restored = iommu.restore_device_memory();
            restored.map_err(|error| StateError::rule(IommuBounceConfig::ID, error.to_string()))?;
        }
        self.platform.restore(&state.platform)?;
        self.restore_windows(snapshot)?;
        self.renew_generation_id(state.generation_id)?;
        self.clock = Some(StoppedClock::Restored(state.processors.clock()));
        Ok(())
    }

    /// Gives the guest the new VM Generation ID and notifies it. Its tables say where the ID is, if they know of one.
    fn renew_generation_id(&mut self, address: Option<u64>) -> Result<(), SnapshotError> {
        self.knows_generation_id = address.is_some();
        let Some(address) = address else { return Ok(()) };
        let (Some(id), Some(notice)) = (self.contents.generation_id, &self.platform.generation_notice) else {
            return Err(StateError::rule("generation_id", "is there, but platform.vmgenid is off: turn it on").into());
        };
        if address != generation_id::ADDRESS {
            let rule = format!("is {address:#x}: this version supports {:#x} only", generation_id::ADDRESS);
            return Err(StateError::rule("generation_id", rule).into());
        }
        id.write(&self.memory).map_err(|error| StateError::rule("generation_id", error.to_string()))?;
        notice.notify();
        Ok(())
    }

    fn restore_windows(&self, snapshot: &Snapshot) -> Result<(), SnapshotError> {
        let saved = &snapshot.state.windows;
        let mut indices: Vec<u32> = saved.iter().map(|chunk| chunk.index).collect();
        indices.sort_unstable();
        let iommu = self.parts.iommu();
        if indices != iommu.map_or_else(Vec::new, |iommu| iommu.window_chunks()) {
            return Err(StateError::rule("windows", "are not those of the virtio-iommu's state").into());
        }
        let Some(iommu) = iommu else { return Ok(()) };
        for ChunkRange { index, len, offset } in saved {
            let read = iommu.with_window_chunk(*index, |chunk| {
                (chunk.len() as u64 == *len).then(|| snapshot.memory.read(*offset, &chunk))
            });
            match read.flatten() {
                Some(read) => read.map_err(|error| snapshot.memory_error(error))?,
                None => return Err(StateError::rule("windows", format!("chunk {index} has another length")).into()),
            }
        }
        Ok(())
    }
}

/// Writes the bytes of all bounce windows; says where in the file they stand.
fn write_windows(iommu: &IommuHandle, file: &mut RamFileWriter) -> std::io::Result<Vec<ChunkRange>> {
    let mut written = Vec::new();
    for index in iommu.window_chunks() {
        let chunk = iommu.with_window_chunk(index, |chunk| (chunk.len() as u64, file.append(&chunk)));
        if let Some((len, offset)) = chunk {
            written.push(ChunkRange { index, len, offset: offset? });
        }
    }
    Ok(written)
}
