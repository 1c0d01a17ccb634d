// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a client can ask for, once it is read and checked.

use crate::kinds::PartConfig;
use crate::snapshot::{RestoreConfig, VmSnapshotConfig};
use crate::types::{IommuBounceChange, VmResize, VmResizeDisk};
use crate::vm_config::CheckedConfig;

/// What can be asked of the VMM.
#[derive(Debug)]
pub enum Call {
    /// Keep this configuration for a VM to be booted.
    Create(Box<CheckedConfig>),
    /// Shut the VM down, if it runs, and forget its configuration.
    Delete,
    /// Build the VM and start the guest.
    Boot,
    /// Stop the guest and give all devices back; the configuration stays.
    Shutdown,
    /// Reset the guest.
    Reboot,
    /// Stop the vCPUs where they are.
    Pause,
    /// Let them go on.
    Resume,
    /// What the VM is.
    Info,
    /// The counters of its devices.
    Counters,
    /// Save it, which is paused.
    Snapshot(VmSnapshotConfig),
    /// Make one of what was saved.
    Restore(RestoreConfig),
    /// Press its power button.
    PowerButton,
    /// Raise an NMI on every vCPU.
    Nmi,
    /// Change its size.
    Resize(VmResize),
    /// Change the size of a disk.
    ResizeDisk(VmResizeDisk),
    /// Add a device.
    AddDevice(PartConfig),
    /// Remove the device with this ID.
    RemoveDevice(String),
    /// What the bounce windows are.
    Bounce,
    /// Change what they may use.
    TuneBounce(IommuBounceChange),
    /// All figures, for metrics.
    Figures,
    /// End the VMM.
    ShutdownVmm,
}
