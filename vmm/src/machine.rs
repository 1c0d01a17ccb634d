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
    /// Name of the device's kind, such as `rng`. All devices of one kind have counters with the same names.
    pub kind: &'static str,
    /// The counters.
    pub counters: Vec<Counter>,
}

/// VM as the control thread uses it: the real VM, or a VM without a guest in tests. The default methods behave like a machine without
/// devices, whose number of vCPUs and size of RAM are fixed.
pub trait Machine: Sized + Send + 'static {
    /// Builds a VM with its vCPUs stopped. If the guest asks for a reset or a power-off, the VM leaves a note in `mailbox`. The VM
    /// writes the guest's actions on devices to `monitor`.
    fn build(config: &VmConfig, mailbox: Arc<Mailbox>, monitor: &EventMonitor) -> Result<Self, VmError>;
    /// Restores the saved VM from `source`, with its vCPUs stopped. If `prefault` is set, reads all RAM from `source` now.
    fn restore(
        source: &dyn StateSource,
        prefault: bool,
        mailbox: Arc<Mailbox>,
        monitor: &EventMonitor,
    ) -> Result<Self, VmError>;
    /// Saves the state of the VM to `sink`. The vCPUs are stopped, and `config` is the VM's configuration. An error does not change the VM.
    fn save(&mut self, config: &VmConfig, sink: &mut dyn StateSink) -> Result<(), VmError>;
    /// Loads the guest's kernel or firmware, sets the boot processor to the image's entry point, and runs the vCPUs if `run` is set.
    fn start(&mut self, run: bool) -> Result<(), VmError>;
    /// Leaks the VM instead of dropping it, because dropping the VM could wait for ever. Called if a thread of the machine holds locks for
    /// ever. After the call, the program ends. The real VM also orders its vCPUs to stop, and restores the terminal.
    fn abandon(self)
    where
        Self: Sized,
    {
        std::mem::forget(self);
    }
    /// Stops all vCPUs, and waits until they have stopped.
    fn pause(&mut self) -> Result<(), VmError>;
    /// Runs the vCPUs again.
    fn resume(&mut self) -> Result<(), VmError>;
    /// Resets the whole VM to its power-on state. The vCPUs are stopped.
    fn reset(&mut self) -> Result<(), VmError>;
    /// Adds `len` bytes of RAM with the settings of `config`, and notifies the guest. On error, the guest's RAM does not change.
    fn add_ram(&mut self, config: &MemoryConfig, len: u64) -> Result<(), VmError> {
        let _ = (config, len);
        Err(VmError::MoreRam("this machine cannot take more RAM".into()))
    }
    /// Changes the size of the disk or balloon with this ID, and notifies the guest. On error, the size does not change.
    fn resize_device(&self, id: &str, bytes: u64) -> Result<(), VmError> {
        let _ = (id, bytes);
        Err(VmError::Guest("this machine's devices cannot be resized".into()))
    }
    /// Returns the bytes of RAM that were added since the VM was booted.
    fn added_ram(&self) -> u64 {
        0
    }
    /// Returns the bytes of RAM that the guest has given to devices and does not use, such as pages in its balloon.
    fn held_ram(&self) -> u64 {
        0
    }
    /// Sets the number of vCPUs to `count`, which is at most the configured maximum. On error, nothing changes.
    ///
    /// Adds missing vCPUs, which run if `run` is set. Asks the guest to release surplus vCPUs, even if the guest was asked before. When the
    /// guest has released a surplus vCPU, the VM leaves a note in the mailbox, and [`Self::close_vcpus`] must be called. A reset also
    /// removes the surplus vCPUs.
    fn set_vcpus(&mut self, count: u32, run: bool) -> Result<(), VmError> {
        let _ = (count, run);
        Err(VmError::Guest("this machine's number of vCPUs cannot change".into()))
    }
    /// Returns a vCPU that prevents a change to `count` vCPUs now. The guest was asked to release this vCPU and has not done so.
    fn leaving_vcpu(&self, count: u32) -> Option<u32> {
        let _ = count;
        None
    }
    /// Closes the vCPUs that the guest has released since the last call.
    fn close_vcpus(&mut self) {}
    /// Presses the guest's power button.
    fn press_power_button(&self) -> Result<(), VmError>;
    /// Raises an NMI on every vCPU. All vCPUs are stopped.
    fn raise_nmi(&self) -> Result<(), VmError>;
    /// Returns the path of the pseudoterminal that the serial port is connected to, if any.
    fn serial_pty(&self) -> Option<&Path> {
        None
    }
    /// Returns the path of the pseudoterminal that the virtio-console is connected to, if any.
    fn console_pty(&self) -> Option<&Path> {
        None
    }
    /// Returns the guest's devices.
    fn devices(&self) -> Vec<DeviceNode> {
        Vec::new()
    }
    /// Adds a device of a kind that can be hot-plugged, and notifies the guest. On error, nothing changes.
    fn add_device(&mut self, device: &PartConfig) -> Result<PciDeviceInfo, VmError> {
        let _ = device;
        Err(VmError::Guest("this machine cannot take devices".into()))
    }
    /// Asks the guest to release the device with this ID. Returns `false` if no such device exists. When the guest has released the device,
    /// the VM removes the device from the bus and leaves a note in the mailbox. A reset also removes the device.
    fn remove_device(&mut self, id: &str) -> bool {
        let _ = id;
        false
    }
    /// Closes the devices that were removed from the bus since the last call, and returns these devices.
    fn close_devices(&mut self) -> Vec<PciDeviceInfo> {
        Vec::new()
    }
    /// Returns the settings and the memory use of the virtio-iommu, if the VM has one.
    fn iommu(&self) -> Option<IommuStatus> {
        None
    }
    /// Like [`Self::iommu`], but never waits. Returns `None` if another thread holds the lock of the virtio-iommu. The default always
    /// returns `None`.
    fn iommu_soon(&self) -> Option<Option<IommuStatus>> {
        None
    }
    /// Returns the counters that devices keep themselves. The counters that the virtio-iommu keeps for each device are in
    /// [`Self::engine_report`].
    fn part_counters(&self) -> Vec<PartCounters> {
        Vec::new()
    }
    /// Returns the counters and latencies of the virtio-iommu.
    fn engine_report(&self) -> Option<Report> {
        None
    }
    /// Changes the limits of the bounce windows, and notifies the guest. `change` was validated before.
    fn tune_bounce(&self, change: &IommuBounceChange) -> Result<(), VmError> {
        let _ = change;
        Ok(())
    }
    /// Writes the counters to the event stream.
    fn report_counters(&self, monitor: &EventMonitor) {
        let _ = monitor;
    }
}
