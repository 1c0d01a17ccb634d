// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `vm.resize`.

use carom_api::VmConfig;
use carom_api::types::VmResize;

use super::{Control, ControlError};
use crate::machine::Machine;

impl<M: Machine> Control<M> {
    /// Changes the size of a VM. Where a rule breaks, all stays as it was.
    pub(super) fn resize(&mut self, size: &VmResize) -> Result<(), ControlError> {
        let created = self.created.as_mut().ok_or(ControlError::NotCreated)?;
        let mut wanted = VmConfig::clone(&created.config);
        size.apply(&mut wanted)?;
        let Some(booted) = created.booted.as_mut() else {
            created.config = created.config.with(|config| size.apply(config))?;
            return Ok(());
        };
        if wanted.cpus != created.config.cpus {
            let needed = "created or shut down";
            return Err(ControlError::WrongState { call: "vm.resize", state: created.state, needed });
        }
        let memory = &created.config.memory;
        let more = size.more_ram(memory, booted.vm.added_ram())?;
        let config = created.config.with(|config| size.apply(config))?;
        // As in Cloud Hypervisor, of a VM that is booted only.
        self.monitor.event("vm", "resizing");
        if more > 0 {
            booted.vm.add_ram(memory, more)?;
            created.config = config;
        }
        self.monitor.event("vm", "resized");
        Ok(())
    }
}
