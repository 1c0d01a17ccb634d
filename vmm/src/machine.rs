// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interface between the control thread and a VM: [`Machine`], and the counters of its devices.

use std::path::Path;
use std::sync::Arc;

use carom_api::config::MemoryConfig;
use carom_api::types::{DeviceNode, IommuBounceChange, PciDeviceInfo};
use carom_api::{PartConfig, VmConfig};
use devices::counters::Counter;
use devices::virtio::iommu::IommuStatus;
use iommu_bounce::Report;

use crate::error::VmError;
use crate::mailbox::Mailbox;
use crate::process::event_monitor::EventMonitor;
use crate::vm_state::{StateSink, StateSource};

/// The counters of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartCounters {
    /// ID of the device.
    pub id: String,
    /// Name of its kind, such as `rng`. Devices of a kind have counters of the same names.
    pub kind: &'static str,
    /// The counters.
    pub counters: Vec<Counter>,
}

/// A VM, as the control thread uses it: the real one, or one without a guest in tests. The methods that have a body here do what a machine
/// without devices does. Its RAM and vCPUs do not change.
pub trait Machine: Sized + Send + 'static {
    /// Builds a VM with its vCPUs stopped. Its guest's wishes go to `mailbox`.
    /// What its guest does with devices goes to `monitor`.
    fn build(config: &VmConfig, mailbox: Arc<Mailbox>, monitor: &EventMonitor) -> Result<Self, VmError>;
    /// Restores the VM of `source`, with its vCPUs stopped. `prefault`: all of its RAM is read now.
    fn restore(
        source: &dyn StateSource,
        prefault: bool,
        mailbox: Arc<Mailbox>,
        monitor: &EventMonitor,
    ) -> Result<Self, VmError>;
    /// Writes the VM to `sink`. Its vCPUs are stopped, and `config` is its configuration. An error does not change the VM.
    fn save(&mut self, config: &VmConfig, sink: &mut dyn StateSink) -> Result<(), VmError>;
    /// Loads what the guest boots, points the boot processor at it, and lets the vCPUs run if `run` says so.
    fn start(&mut self, run: bool) -> Result<(), VmError>;
    /// Has the vCPUs stop and waits for nothing: a thread of the machine holds locks for ever. The program ends next.
    fn abandon(self)
    where
        Self: Sized,
    {
        std::mem::forget(self);
    }
    /// Stops all vCPUs and returns when they stand still.
    fn pause(&mut self) -> Result<(), VmError>;
    /// Lets them go on.
    fn resume(&mut self) -> Result<(), VmError>;
    /// With the vCPUs standing still: puts everything back to power-on.
    fn reset(&mut self) -> Result<(), VmError>;
    /// Adds `len` bytes of RAM as `config` says, and tells the guest. On error the guest has what it had.
    fn add_ram(&mut self, config: &MemoryConfig, len: u64) -> Result<(), VmError> {
        let _ = (config, len);
        Err(VmError::MoreRam("this machine takes none".into()))
    }
    /// Gives the disk or balloon of this ID another size, and notifies the guest. On error it has the one that it had.
    fn resize_device(&self, id: &str, bytes: u64) -> Result<(), VmError> {
        let _ = (id, bytes);
        Err(VmError::Guest("this machine's devices keep their sizes".into()))
    }
    /// Bytes of RAM that came so since the VM was booted.
    fn added_ram(&self) -> u64 {
        0
    }
    /// Bytes of RAM that the guest has handed to devices and does not use, such as those in its balloon.
    fn held_ram(&self) -> u64 {
        0
    }
    /// Has the guest have `count` vCPUs, no more than there can be: adds those that it lacks, which run if `run` says so, and asks it
    /// to let go of the others; again, if it was asked before. Once it did, or is reset, those are gone, and the mailbox has a note.
    /// On error all stays as it was.
    fn set_vcpus(&mut self, count: u32, run: bool) -> Result<(), VmError> {
        let _ = (count, run);
        Err(VmError::Guest("this machine's vCPUs stay".into()))
    }
    /// A vCPU for which the number of vCPUs cannot be `count` now: the guest may be about to let go of it.
    fn leaving_vcpu(&self, count: u32) -> Option<u32> {
        let _ = count;
        None
    }
    /// Gives up the vCPUs that the guest has let go of since the last call.
    fn close_vcpus(&mut self) {}
    /// Presses the guest's power button.
    fn press_power_button(&self) -> Result<(), VmError>;
    /// Raises an NMI on every vCPU, all of which stand still.
    fn raise_nmi(&self) -> Result<(), VmError>;
    /// The path of the pseudoterminal that its serial port is connected with, if there is one.
    fn serial_pty(&self) -> Option<&Path> {
        None
    }
    /// The same of its virtio-console.
    fn console_pty(&self) -> Option<&Path> {
        None
    }
    /// The guest's devices.
    fn devices(&self) -> Vec<DeviceNode> {
        Vec::new()
    }
    /// Adds a device, of a kind that can come, and tells the guest. On error nothing has changed.
    fn add_device(&mut self, device: &PartConfig) -> Result<PciDeviceInfo, VmError> {
        let _ = device;
        Err(VmError::Guest("this machine takes no devices".into()))
    }
    /// Asks the guest to let go of the device of this ID; `false` if there is none. Once the guest did, or is reset, the
    /// device is off the bus, and the mailbox has a note.
    fn remove_device(&mut self, id: &str) -> bool {
        let _ = id;
        false
    }
    /// Gives the devices back that have left the bus since the last call, and returns what they were.
    fn close_devices(&mut self) -> Vec<PciDeviceInfo> {
        Vec::new()
    }
    /// What its virtio-iommu is set to and holds, if it has one.
    fn iommu(&self) -> Option<IommuStatus> {
        None
    }
    /// The same for a thread that must not sleep: `None` if somebody keeps what it is read from. As here, where that is not known.
    fn iommu_soon(&self) -> Option<Option<IommuStatus>> {
        None
    }
    /// What devices count by themselves, those that do. What the virtio-iommu counts of them is in [`Self::engine_report`].
    fn part_counters(&self) -> Vec<PartCounters> {
        Vec::new()
    }
    /// The virtio-iommu's figures, with latencies.
    fn engine_report(&self) -> Option<Report> {
        None
    }
    /// Changes what its bounce windows may use, within the rules; the guest is told.
    fn tune_bounce(&self, change: &IommuBounceChange) -> Result<(), VmError> {
        let _ = change;
        Ok(())
    }
    /// Writes the counters to the event stream.
    fn report_counters(&self, monitor: &EventMonitor) {
        let _ = monitor;
    }
}
