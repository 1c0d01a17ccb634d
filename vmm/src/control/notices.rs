// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Handles the host's notices about devices: an error of a device, or a request to release a device.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use super::{Booted, Control, Created, State};
use crate::error::VmError;
use crate::machine::Machine;
use crate::mailbox::HostNotes;

impl<M: Machine> Control<M> {
    /// Acts on the host's notes. An error may end the guest.
    pub(super) fn serve_host(&mut self, notes: &HostNotes) -> ControlFlow<Result<(), VmError>> {
        notes.requested.iter().for_each(|(id, host)| self.give_back(id, host));
        notes.failed.iter().try_for_each(|(id, host)| self.device_failed(id, host))
    }

    /// Starts to remove a device that the host asks Carom to release: asks the guest to release the device. The host repeats its request
    /// every ten seconds. Each time Carom asks the guest again, because the guest may have missed the earlier request. The log and the
    /// events report only the first request.
    fn give_back(&mut self, id: &str, host: &str) {
        let Some(bdf) = self.guest_address(id) else { return };
        let Some(Created { booted: Some(Booted { requested, .. }), .. }) = &mut self.created else { return };
        if requested.insert(id.to_string()) {
            self.device_requests += 1;
            log::warn!("device '{id}': the host wants {host} back; Carom asks the guest to release the device");
            self.monitor.event_with("vm", "device-requested", Some(properties(id, &bdf, host)));
        }
        if let Err(error) = self.remove_device(id) {
            log::error!(
                "the host wants device '{id}' back, but Carom cannot remove the device: {error}; shut the VM down to release the device"
            );
        }
    }

    /// Stops the guest after an uncorrectable error of a device. Data that the guest reads from this device may be wrong and must not
    /// spread. The API client decides whether the guest continues. Without an API, the guest ends.
    fn device_failed(&mut self, id: &str, host: &str) -> ControlFlow<Result<(), VmError>> {
        let Some(bdf) = self.guest_address(id) else { return ControlFlow::Continue(()) };
        self.device_errors += 1;
        let running = self.created.as_ref().is_some_and(|created| created.state == State::Running);
        let what = Some(properties(id, &bdf, host));
        if running {
            // No rate limit is needed: the error ends or pauses the guest, so the error can recur only after a client resumes the guest.
            self.monitor.event_with("vm", "device-error", what);
        } else {
            // A guest may be able to cause device errors, so the rate limit for guest events applies.
            self.monitor.event_of_guest("vm", "device-error", what);
        }
        if !self.options.has_api {
            let reason = format!(
                "the host reports an uncorrectable error of device '{id}' at {host}; the guest ends, because only an API client (--api-socket) \
                 can let the guest continue"
            );
            return self.end_of_guest(Err(VmError::Guest(reason)));
        }
        if running {
            log::error!(
                "device '{id}': the host reports an uncorrectable error of {host}; Carom pauses the VM until a client resumes it"
            );
            if let Err(error) = self.pause() {
                log::error!("the VM is shut down, because it cannot be paused: {error}");
            }
        } else {
            // The VM was already paused, so nothing changes. With the default log level, this message is not logged.
            log::info!("device '{id}': the host reports an uncorrectable error of {host}; the VM stays paused");
        }
        ControlFlow::Continue(())
    }

    /// Returns the guest's address of a device, or `None` if the VM no longer has the device.
    fn guest_address(&self, id: &str) -> Option<String> {
        let booted = self.created.as_ref()?.booted.as_ref()?;
        booted.vm.devices().into_iter().find(|device| device.id == id).map(|device| device.pci_bdf)
    }
}

fn properties<'a>(id: &'a str, bdf: &'a str, host: &'a str) -> BTreeMap<&'static str, &'a str> {
    BTreeMap::from([("id", id), ("bdf", bdf), ("host", host)])
}
