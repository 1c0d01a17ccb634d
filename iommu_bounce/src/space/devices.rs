// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Device memory in a host address space.

use super::Space;
use crate::Permissions;
use crate::backend::{DeviceMemoryKind, GuestRam};
use crate::counters::Counters;
use crate::mapping::{DeviceMapping, MappedMemory};
use crate::spec::Status;

/// Returns the kind of the device memory at `[gpa, gpa + len)`, or `None` if the range is not device memory, or does not allow
/// `permissions`.
pub(crate) fn device_kind(
    ram: &dyn GuestRam,
    gpa: u64,
    len: u64,
    permissions: Permissions,
) -> Option<DeviceMemoryKind> {
    let mut found = None;
    ram.device(gpa, len, permissions, &mut |slice, kind| found = (slice.len() as u64 == len).then_some(kind));
    found
}

impl Space {
    /// True if device memory is stuck in this address space.
    pub(crate) fn holds_device_memory(&self) -> bool {
        self.stuck.iter().any(|stuck| matches!(stuck.memory, MappedMemory::Device(_)))
    }

    /// Maps device memory, with one call for each [step](Steps) of a long range. Returns `INVAL` if the range is not device memory. After
    /// an error, nothing of the range is mapped except stuck ranges.
    pub(crate) fn map_device(
        &mut self,
        iova: u64,
        mapping: &DeviceMapping,
        ram: &dyn GuestRam,
        counters: &mut Counters,
    ) -> Result<(), Status> {
        let len = mapping.last - iova + 1;
        if !self.steps.are_for(len) {
            return self.map_device_step((iova, len), mapping.gpa, mapping, ram, counters);
        }
        if device_kind(ram, mapping.gpa, len, mapping.permissions) != Some(mapping.kind) {
            return Err(Status::Inval);
        }
        let mut done = 0;
        while done < len {
            let at = iova + done;
            let step = self.steps.len_at(at, len - done);
            let outcome = if self.steps.end_here() {
                Err(Status::DevErr)
            } else {
                self.map_device_step((at, step), mapping.gpa + done, mapping, ram, counters)
            };
            if let Err(status) = outcome {
                if done > 0 {
                    self.discard(iova, done, MappedMemory::Device(mapping.kind), counters);
                }
                return Err(status);
            }
            done += step;
        }
        Ok(())
    }

    fn map_device_step(
        &mut self,
        (iova, len): (u64, u64),
        gpa: u64,
        mapping: &DeviceMapping,
        ram: &dyn GuestRam,
        counters: &mut Counters,
    ) -> Result<(), Status> {
        let mut outcome = Err(Status::Inval);
        ram.device(gpa, len, mapping.permissions, &mut |slice, kind| {
            if slice.len() as u64 == len && kind == mapping.kind {
                outcome = self.map(iova, slice, mapping.permissions, MappedMemory::Device(kind), counters);
            }
        });
        outcome
    }
}
