// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What calls are answered with.

use carom_api::types::{DeviceNode, IommuBounceReport, PciDeviceInfo, VmCounters, VmInfo};
use devices::virtio::iommu::IommuStatus;
use iommu_bounce::Report;

use super::State;
use crate::machine::PartCounters;

/// What a call is answered with.
#[derive(Debug)]
pub enum Reply {
    /// It is done.
    Done,
    /// What the VM is.
    Info(Box<VmInfo>),
    /// It is done, to a VM that is booted: this device came.
    Added(PciDeviceInfo),
    /// The counters of its devices.
    Counters(VmCounters),
    /// What the bounce windows are.
    Bounce(Box<IommuBounceReport>),
    /// All figures.
    Figures(Box<Figures>),
}

/// All figures of one moment.
#[derive(Debug, Default)]
pub struct Figures {
    /// State of the VM, if one is created.
    pub state: Option<State>,
    /// Its vCPUs.
    pub vcpus: u32,
    /// Bytes of its RAM.
    pub memory_bytes: u64,
    /// What its virtio-iommu is set to and holds, while it is booted and has one.
    pub iommu: Option<IommuStatus>,
    /// That one's figures.
    pub engine: Option<Report>,
    /// Its devices, while it is booted.
    pub devices: Vec<DeviceNode>,
    /// What those count by themselves.
    pub parts: Vec<PartCounters>,
    /// How often the host reported an error of a device since the program started.
    pub device_errors: u64,
    /// How often the host wanted a device back.
    pub device_requests: u64,
    /// Lines of the log and of standard error that were dropped.
    pub lost_log_lines: u64,
    /// Events that were lost.
    pub lost_events: u64,
}

impl Figures {
    /// The state in a word.
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
