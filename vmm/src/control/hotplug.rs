// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices that come and go, of a VM that is booted too.

use std::collections::BTreeMap;

use super::{Booted, Control, ControlError, Created, Reply};
use crate::api::types::PciDeviceInfo;
use crate::config::{ConfigError, DeviceConfig, UserDeviceConfig, one_line};
use crate::machine::Machine;

impl<M: Machine> Control<M> {
    /// Adds a device to the configuration, and to the VM if it is booted.
    pub(super) fn add_device(&mut self, device: DeviceConfig) -> Result<Reply, ControlError> {
        let created = self.created.as_mut().ok_or(ControlError::NotCreated)?;
        let leaving = created.booted.as_ref().map_or(&[][..], |booted| &booted.leaving);
        check_leaving(leaving, &device)?;
        // What the guest has still takes names and places, too.
        let mut config = created.config.clone();
        let kept = config.devices.len();
        config.devices.push(device);
        config.devices.extend_from_slice(leaving);
        config.complete();
        config.validate()?;
        config.devices.truncate(kept + 1);
        let added = match (&mut created.booted, config.devices.last()) {
            (Some(booted), Some(device)) => Some(booted.vm.add_device(device)?),
            _ => None,
        };
        created.config = config;
        if let Some(device) = &added {
            self.tell("device-added", device);
        }
        Ok(added.map_or(Reply::Done, Reply::Added))
    }

    /// Adds a device that another process emulates, for the next boot.
    pub(super) fn add_user_device(&mut self, device: UserDeviceConfig) -> Result<(), ControlError> {
        self.change_config("vm.add-user-device", |config| {
            config.user_devices.push(device);
            config.complete();
            Ok(())
        })
    }

    /// Takes a device out of the configuration, and asks the guest of a VM that is booted to let go of it: once more, if
    /// it was asked before.
    pub(super) fn remove_device(&mut self, id: &str) -> Result<(), ControlError> {
        let created = self.created.as_mut().ok_or(ControlError::NotCreated)?;
        let user = created.config.user_devices.iter().position(|device| device.id.as_deref() == Some(id));
        if let Some(place) = user {
            return self.change_config("vm.remove-device of a vfio-user device", |config| {
                config.user_devices.remove(place);
                Ok(())
            });
        }
        let Created { config, booted, .. } = created;
        let place = position(&config.devices, id);
        let unknown = || ControlError::NoSuchPart(one_line(&format!("there is no device '{id}'")));
        if let Some(Booted { vm, leaving, .. }) = booted {
            if place.is_none() && position(leaving, id).is_none() || !vm.remove_device(id) {
                return Err(unknown());
            }
            leaving.extend(place.map(|place| config.devices.remove(place)));
        } else {
            config.devices.remove(place.ok_or_else(unknown)?);
        }
        Ok(())
    }

    /// Gives the devices back that the guest has let go of, or that a reset took from it.
    pub(super) fn close_devices(&mut self) {
        let Some(Created { booted: Some(booted), .. }) = &mut self.created else { return };
        let closed = booted.vm.close_devices();
        booted.leaving.retain(|device| closed.iter().all(|closed| device.id.as_ref() != Some(&closed.id)));
        for device in &closed {
            booted.requested.remove(&device.id);
            booted.mailbox.forget_device(&device.id);
        }
        closed.iter().for_each(|device| self.tell("device-removed", device));
    }

    /// Cloud Hypervisor's event, and its counterpart.
    fn tell(&self, event: &str, device: &PciDeviceInfo) {
        let properties = BTreeMap::from([("id", &device.id), ("bdf", &device.bdf)]);
        self.monitor.event_with("vm", event, Some(properties));
    }
}

fn position(devices: &[DeviceConfig], id: &str) -> Option<usize> {
    devices.iter().position(|device| device.id.as_deref() == Some(id))
}

/// A device that is to come must not be one that the guest has still.
fn check_leaving(leaving: &[DeviceConfig], device: &DeviceConfig) -> Result<(), ConfigError> {
    let (field, what) = if leaving.iter().any(|other| other.path == device.path) {
        ("--device path", device.path.display().to_string())
    } else if leaving.iter().any(|other| other.id.is_some() && other.id == device.id) {
        ("--device id", format!("'{}'", device.id.as_deref().unwrap_or_default()))
    } else {
        return Ok(());
    };
    Err(ConfigError::new(field, format!("{what} is about to be removed, and the guest has not let go of it yet")))
}
