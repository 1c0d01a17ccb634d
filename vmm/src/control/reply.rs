// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Replies to calls.

use carom_api::types::{DeviceNode, IommuBounceReport, PciDeviceInfo, VmCounters, VmInfo};
use devices::virtio::iommu::IommuStatus;
use iommu_bounce::Report;

use super::State;
use crate::machine::PartCounters;

/// Reply to a call.
#[derive(Debug)]
pub enum Reply {
    /// The call is complete.
    Done,
    /// Information about the VM.
    Info(Box<VmInfo>),
    /// A device was added to a booted VM.
    Added(PciDeviceInfo),
    /// Counters of the VM's devices.
    Counters(VmCounters),
    /// State of the bounce windows.
    Bounce(Box<IommuBounceReport>),
    /// Values of all metrics.
    Figures(Box<Figures>),
}

/// Values of all metrics at one time.
#[derive(Debug, Default)]
pub struct Figures {
    /// State of the VM, if a VM is created.
    pub state: Option<State>,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Bytes of RAM.
    pub memory_bytes: u64,
    /// Settings and memory use of the virtio-iommu, if the VM is booted and has one.
    pub iommu: Option<IommuStatus>,
    /// Report of the virtio-iommu's engine: its counters and latencies, in total and for each
    /// domain and endpoint.
    pub engine: Option<Report>,
    /// Devices of the VM, while it is booted.
    pub devices: Vec<DeviceNode>,
    /// Counters that the devices keep themselves.
    pub parts: Vec<PartCounters>,
    /// Number of device errors that the host reported since the program started.
    pub device_errors: u64,
    /// Number of devices that the host asked Carom to release since the program started.
    pub device_requests: u64,
    /// Number of dropped lines of the log and of standard error.
    pub lost_log_lines: u64,
    /// Number of lost events.
    pub lost_events: u64,
}

impl Figures {
    /// Returns the state as one word.
    pub fn state_name(&self) -> &'static str {
        match self.state {
            None => "none",
            Some(State::Created) => "created",
            Some(State::Running) => "running",
            Some(State::Paused) => "paused",
            Some(State::Shutdown) => "shutdown",
        }
    }
}
