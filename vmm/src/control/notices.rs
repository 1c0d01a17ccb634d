// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What becomes of devices that the host reports an error of, or wants back.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use super::{Booted, Control, Created, State};
use crate::error::VmError;
use crate::machine::Machine;
use crate::mailbox::HostNotes;

impl<M: Machine> Control<M> {
    /// Acts on what the host told. An error may be the end of the guest.
    pub(super) fn serve_host(&mut self, notes: &HostNotes) -> ControlFlow<Result<(), VmError>> {
        notes.requested.iter().for_each(|(id, host)| self.give_back(id, host));
        notes.failed.iter().try_for_each(|(id, host)| self.device_failed(id, host))
    }

    /// Starts to remove a device that the host wants back: the guest is asked to let go of it. The host says that it waits every
    /// ten seconds; each time the guest is asked anew, as it may not have listened before, and nobody else is told.
    fn give_back(&mut self, id: &str, host: &str) {
        let Some(bdf) = self.guest_address(id) else { return };
        let Some(Created { booted: Some(Booted { requested, .. }), .. }) = &mut self.created else { return };
        if requested.insert(id.to_string()) {
            self.device_requests += 1;
            log::warn!("device '{id}': the host wants {host} back; the guest is asked to let go of it");
            self.monitor.event_with("vm", "device-requested", Some(properties(id, &bdf, host)));
        }
        if let Err(error) = self.remove_device(id) {
            log::error!("device '{id}', which the host wants back: {error}");
        }
    }

    /// Stops the guest of a device that had an uncorrectable error: what it reads from it may be wrong, and it must not pass it
    /// on. Whether to go on is for whoever has the API; where nobody does, it is the end of the guest.
    fn device_failed(&mut self, id: &str, host: &str) -> ControlFlow<Result<(), VmError>> {
        let Some(bdf) = self.guest_address(id) else { return ControlFlow::Continue(()) };
        self.device_errors += 1;
        let running = self.created.as_ref().is_some_and(|created| created.state == State::Running);
        let what = Some(properties(id, &bdf, host));
        if running {
            // It ends the guest or pauses it: no more of them come unless somebody has it go on.
            self.monitor.event_with("vm", "device-error", what);
        } else {
            // A guest may have a way to have its device err.
            self.monitor.event_of_guest("vm", "device-error", what);
        }
        if !self.options.has_api {
            let reason = format!(
                "the host reports an uncorrectable error of device '{id}' at {host}, and without --api-socket nobody can \
                 decide how to go on"
            );
            return self.end_of_guest(Err(VmError::Guest(reason)));
        }
        if running {
            log::error!("device '{id}': the host reports an uncorrectable error of {host}; the VM is paused");
            if let Err(error) = self.pause() {
                log::error!("pausing the VM: {error}");
            }
        } else {
            // The vCPUs stand still, so that it is no news: not at the level of what is written without being asked for.
            log::info!("device '{id}': the host reports an uncorrectable error of {host}; the VM stays paused");
        }
        ControlFlow::Continue(())
    }

    /// Where the guest sees a device, unless it is gone.
    fn guest_address(&self, id: &str) -> Option<String> {
        let booted = self.created.as_ref()?.booted.as_ref()?;
        booted.vm.devices().into_iter().find(|device| device.id == id).map(|device| device.pci_bdf)
    }
}

fn properties<'a>(id: &'a str, bdf: &'a str, host: &'a str) -> BTreeMap<&'static str, &'a str> {
    BTreeMap::from([("id", id), ("bdf", bdf), ("host", host)])
}
