// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests of clients, parsed and validated.

use crate::kinds::PartConfig;
use crate::snapshot::{RestoreConfig, VmSnapshotConfig};
use crate::types::{IommuBounceChange, VmResize, VmResizeDisk};
use crate::vm_config::CheckedConfig;

/// Request to the VMM.
#[derive(Debug)]
pub enum Call {
    /// Keep this configuration for a VM that is booted later.
    Create(Box<CheckedConfig>),
    /// Shut the VM down if it runs, and drop its configuration.
    Delete,
    /// Build the VM and start the guest.
    Boot,
    /// Stop the guest and release all devices. The configuration stays.
    Shutdown,
    /// Reset the guest.
    Reboot,
    /// Stop the vCPUs.
    Pause,
    /// Resume the vCPUs.
    Resume,
    /// Return the state and configuration of the VM.
    Info,
    /// Return the counters of the VM's devices.
    Counters,
    /// Save a paused VM.
    Snapshot(VmSnapshotConfig),
    /// Create the VM from a snapshot.
    Restore(RestoreConfig),
    /// Press the guest's power button.
    PowerButton,
    /// Raise an NMI on every vCPU.
    Nmi,
    /// Change the number of vCPUs, or the size of the RAM or balloon.
    Resize(VmResize),
    /// Change the size of a disk.
    ResizeDisk(VmResizeDisk),
    /// Add a device.
    AddDevice(PartConfig),
    /// Remove the device with this ID.
    RemoveDevice(String),
    /// Return the state of the bounce windows.
    Bounce,
    /// Change the budget and threshold of the bounce windows, or the mapping limit.
    TuneBounce(IommuBounceChange),
    /// Return the values that `/metrics` reports.
    Figures,
    /// End the VMM.
    ShutdownVmm,
}
