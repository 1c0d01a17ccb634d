// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Adds devices to a VM and removes devices, also while the VM is booted.

use std::collections::BTreeMap;

use carom_api::types::PciDeviceInfo;
use carom_api::{ConfigError, PartConfig, one_line};

use super::{Booted, Control, ControlError, Created, Machine, Reply};
use crate::limits::file_limits;

impl<M: Machine> Control<M> {
    /// Adds a device to the configuration, and to the VM if it is booted.
    pub(super) fn add_device(&mut self, device: PartConfig) -> Result<Reply, ControlError> {
        let created = self.created.as_mut().ok_or(ControlError::NotCreated)?;
        let leaving = created.booted.as_ref().map_or(&[][..], |booted| &booted.leaving);
        check_leaving(leaving, &device)?;
        // The check of the new configuration includes devices that the guest has not released yet, because these devices still occupy their
        // names and paths.
        let mut added = None;
        let mut config = created.config.with(|config| {
            leaving.iter().try_for_each(|device| config.push(device.clone()))?;
            added = Some(config.add(device)?);
            Ok::<_, ConfigError>(())
        })?;
        leaving.iter().filter_map(|device| device.id()).for_each(|id| drop(config.remove(id)));
        if let Some(device) = added.as_ref().filter(|_| created.limited) {
            file_limits::check_added(device, config.platform.iommufd, &self.options.bounds)?;
        }
        let added = match (&mut created.booted, added) {
            (Some(booted), Some(device)) => Some(booted.vm.add_device(&device)?),
            _ => None,
        };
        created.config = config;
        if let Some(device) = &added {
            self.tell("device-added", device);
        }
        Ok(added.map_or(Reply::Done, Reply::Added))
    }

    /// Removes a device from the configuration. If the VM is booted, asks the guest to release the device. A guest that
    /// was already asked is asked again.
    pub(super) fn remove_device(&mut self, id: &str) -> Result<(), ControlError> {
        let Created { config, booted, state, .. } = self.created.as_mut().ok_or(ControlError::NotCreated)?;
        let unknown =
            || ControlError::NoSuchPart(one_line(&format!("there is no device '{id}': vm.info lists the devices")));
        let is_it = |part: &dyn carom_api::kinds::KindConfig| part.id() == Some(id);
        let Some(Booted { vm, leaving, .. }) = booted else {
            return config.remove(id).map(drop).ok_or_else(unknown);
        };
        let kind = config.parts().find(|part| is_it(*part)).map(|part| part.kind());
        if kind.is_some_and(|kind| kind.add.is_none()) {
            let (call, needed) = ("vm.remove-device of a device that cannot be hot-plugged", "created or shut down");
            return Err(ControlError::WrongState { call, state: *state, needed });
        }
        if kind.is_none() && !leaving.iter().any(|part| is_it(&**part)) || !vm.remove_device(id) {
            return Err(unknown());
        }
        leaving.extend(config.remove(id));
        Ok(())
    }

    /// Closes the devices that the guest has released or that a reset removed.
    pub(super) fn close_devices(&mut self) {
        let Some(Created { booted: Some(booted), .. }) = &mut self.created else { return };
        let closed = booted.vm.close_devices();
        booted.leaving.retain(|device| closed.iter().all(|closed| device.id() != Some(&closed.id)));
        for device in &closed {
            booted.requested.remove(&device.id);
            booted.mailbox.forget_device(&device.id);
        }
        closed.iter().for_each(|device| self.tell("device-removed", device));
    }

    /// Writes the event `vm:device-removed`, which Cloud Hypervisor writes too, or the event `vm:device-added`.
    fn tell(&self, event: &str, device: &PciDeviceInfo) {
        let properties = BTreeMap::from([("id", &device.id), ("bdf", &device.bdf)]);
        self.monitor.event_with("vm", event, Some(properties));
    }
}

/// Rejects a device whose ID or path belongs to a device that the guest was asked to release and still has.
fn check_leaving(leaving: &[PartConfig], device: &PartConfig) -> Result<(), ConfigError> {
    let Some((field, value)) = leaving.iter().find_map(|other| device.same_as(&**other)) else { return Ok(()) };
    Err(ConfigError::conflict(
        field,
        format!("{value} belongs to a device that the guest has not released yet: try again later"),
    ))
}
