// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saves and restores a VM.
//!
//! The order matters. Devices are saved before vCPUs, so that the devices' last interrupts are already in a local APIC. Devices are
//! restored after vCPUs and interrupt controllers. Otherwise restoring the interrupt controllers would overwrite interrupts that the
//! devices have raised.

use carom_api::{IommuBounceConfig, VmConfig};
use devices::state::StateError;
use devices::virtio::iommu::IommuHandle;

use super::Vm;
use crate::arch::clock::ClockState;
use crate::arch::generation_id;
use crate::arch::layout::boot_ram;
use crate::arch::saved::ProcessorsState;
use crate::vm_state::{ChunkRange, StateSink, StateSource, VERSION, VmState, VmStateError, ram};

/// Guest clock while the VM is paused.
#[derive(Clone, Copy, Debug)]
pub(super) enum StoppedClock {
    /// The clock continues from this value.
    Paused(ClockState),
    /// The clock catches up, because real time continued while the guest was saved.
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
    /// Writes the paused VM to `sink`.
    pub(super) fn save_to(&mut self, config: &VmConfig, sink: &mut dyn StateSink) -> Result<(), VmStateError> {
        self.close_gone();
        self.park_gone();
        if self.parts.iommu().is_some() && !config.has_iommu() {
            let rule = "the VM cannot be saved: all devices behind the virtio-iommu were removed, so a restored VM would have no virtio-iommu; \
                        add a device with iommu on first";
            return Err(StateError::rule(IommuBounceConfig::ID, rule).into());
        }
        // If the VM cannot be saved, one of these steps fails before anything large is written.
        let functions = self.pci.save()?;
        let platform = self.board.save()?;
        let clock = self.clock.map_or_else(|| ClockState::save(&self.kvm.fd), |clock| Ok(clock.state()))?;
        let processors = ProcessorsState::save(&self.kvm, &self.processors, clock)?;
        let at_boot = boot_ram(&config.memory.booted_with(self.ram_size));
        let ram = ram::write(&self.memory, &at_boot, sink)?;
        let added_ram = ram::write(&self.memory, &self.added_ranges(), sink)?;
        let iommu = self.parts.iommu();
        let state = VmState {
            version: VERSION,
            processors,
            platform,
            functions,
            ram,
            added_ram,
            windows: iommu.map_or_else(|| Ok(Vec::new()), |iommu| write_windows(iommu, sink))?,
            window_aperture: iommu.and_then(|iommu| iommu.window_aperture()),
            generation_id: self.knows_generation_id.then_some(generation_id::ADDRESS),
        };
        sink.finish(config, &state)
    }

    /// Restores the state of `source` into a newly built VM. The VM stays paused.
    pub(super) fn restore_state(&mut self, source: &dyn StateSource) -> Result<(), VmStateError> {
        let state = source.state();
        let counter = state.processors.restore(&self.kvm, &self.processors)?;
        self.processors.follow(counter);
        self.pci.restore(&state.functions)?;
        if let Some(iommu) = self.parts.iommu() {
            // Restore the mappings of device memory only now, when all device memory is mapped into the guest again.
            let restored = iommu.restore_device_memory();
            restored.map_err(|error| StateError::rule(IommuBounceConfig::ID, error.to_string()))?;
        }
        self.board.restore(&state.platform)?;
        self.restore_windows(source)?;
        self.renew_generation_id(state.generation_id)?;
        self.clock = Some(StoppedClock::Restored(state.processors.clock()));
        Ok(())
    }

    /// Gives the guest a new VM Generation ID and notifies the guest. `address` is the address of the ID, if the guest's ACPI tables have
    /// the ID.
    fn renew_generation_id(&mut self, address: Option<u64>) -> Result<(), VmStateError> {
        self.knows_generation_id = address.is_some();
        let Some(address) = address else { return Ok(()) };
        let (Some(id), Some(notice)) = (self.contents.generation_id, &self.board.generation_notice) else {
            return Err(StateError::rule(
                "generation_id",
                "the saved VM has a VM Generation ID, but platform.vmgenid is off: turn vmgenid on",
            )
            .into());
        };
        if address != generation_id::ADDRESS {
            let rule = format!(
                "the saved address is {address:#x}, but this version supports only {:#x}: restore the VM with the release that saved it",
                generation_id::ADDRESS
            );
            return Err(StateError::rule("generation_id", rule).into());
        }
        id.write(&self.memory).map_err(|error| StateError::rule("generation_id", error.to_string()))?;
        notice.notify();
        Ok(())
    }

    fn restore_windows(&self, source: &dyn StateSource) -> Result<(), VmStateError> {
        let saved = &source.state().windows;
        let mut indices: Vec<u32> = saved.iter().map(|chunk| chunk.index).collect();
        indices.sort_unstable();
        let iommu = self.parts.iommu();
        if indices != iommu.map_or_else(Vec::new, |iommu| iommu.window_chunks()) {
            return Err(StateError::rule(
                "windows",
                "the saved window chunks do not match the saved state of the virtio-iommu: restore from an unmodified snapshot",
            )
            .into());
        }
        let Some(iommu) = iommu else { return Ok(()) };
        for ChunkRange { index, len, offset } in saved {
            let read = iommu
                .with_window_chunk(*index, |chunk| (chunk.len() as u64 == *len).then(|| source.read(*offset, &chunk)));
            match read.flatten() {
                Some(read) => read?,
                None => {
                    return Err(StateError::rule(
                        "windows",
                        format!("saved window chunk {index} has {len} bytes, unlike the chunks of this VM: restore from an unmodified snapshot"),
                    )
                    .into());
                }
            }
        }
        Ok(())
    }
}

/// Writes the contents of all bounce windows to `sink`. Returns the chunks with their offsets in the saved memory contents.
fn write_windows(iommu: &IommuHandle, sink: &mut dyn StateSink) -> Result<Vec<ChunkRange>, VmStateError> {
    let mut written = Vec::new();
    for index in iommu.window_chunks() {
        let chunk = iommu.with_window_chunk(index, |chunk| (chunk.len() as u64, sink.append(&chunk)));
        if let Some((len, offset)) = chunk {
            written.push(ChunkRange { index, len, offset: offset? });
        }
    }
    Ok(written)
}
