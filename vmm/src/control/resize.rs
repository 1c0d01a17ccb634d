// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `vm.resize` and `vm.resize-disk`.

use carom_api::types::{VmResize, VmResizeDisk};
use carom_api::{BalloonConfig, ConfigError, one_line};

use super::{Control, ControlError, Created, State};
use crate::error::VmError;
use crate::machine::Machine;

impl<M: Machine> Control<M> {
    /// Changes the size of a VM. If the request breaks a rule, nothing changes.
    pub(super) fn resize(&mut self, size: &VmResize) -> Result<(), ControlError> {
        let created = self.created.as_mut().ok_or(ControlError::NotCreated)?;
        let wanted = |config: &mut _| size.apply(config);
        let Some(booted) = created.booted.as_mut() else {
            created.config = created.config.with(wanted)?;
            return Ok(());
        };
        let more = size.more_ram(&created.config.memory, booted.vm.added_ram())?;
        let config = created.config.with(wanted)?;
        if let Some(number) = size.desired_vcpus.and_then(|count| booted.vm.leaving_vcpu(count)) {
            return Err(VmError::VcpuLeaving(number).into());
        }
        // As in Cloud Hypervisor, the event is written only for a booted VM.
        self.monitor.event("vm", "resizing");
        if more > 0 {
            booted.vm.add_ram(&created.config.memory, more)?;
            // Record the added RAM in the configuration now, because the RAM stays even if a later step of this call fails.
            created.config = created.config.with(|changed| {
                changed.memory.size = config.memory.size;
                Ok::<_, ConfigError>(())
            })?;
        }
        if let Some(bytes) = size.desired_balloon {
            if let Some(balloon) = &config.balloon {
                booted.vm.resize_device(balloon.id.as_deref().unwrap_or(BalloonConfig::KIND.id), bytes)?;
            }
            created.config = created.config.with(|changed| {
                changed.balloon.iter_mut().for_each(|balloon| balloon.size = bytes);
                Ok::<_, ConfigError>(())
            })?;
        }
        if let Some(count) = size.desired_vcpus {
            booted.vm.set_vcpus(count, created.state == State::Running)?;
            created.config = config;
        }
        self.monitor.event("vm", "resized");
        Ok(())
    }

    /// Changes the size of a disk of a booted VM.
    pub(super) fn resize_disk(&mut self, wanted: &VmResizeDisk) -> Result<(), ControlError> {
        let VmResizeDisk { id, desired_size } = wanted;
        self.booted("vm.resize-disk")?;
        let unknown =
            || ControlError::NoSuchPart(one_line(&format!("there is no disk '{id}': vm.info lists the disks")));
        let Some(Created { config, booted: Some(booted), .. }) = &self.created else { return Err(unknown()) };
        // A disk that the guest was asked to release is no longer in the configuration.
        if !config.disks.iter().any(|disk| disk.id.as_ref() == Some(id)) {
            return Err(unknown());
        }
        Ok(booted.vm.resize_device(id, *desired_size)?)
    }
}
