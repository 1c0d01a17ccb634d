// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What goes over the wire, in Cloud Hypervisor's terms. The configuration is [`crate::config`]'s.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::VmConfig;

/// The VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmmPing {
    /// Version with what it was built from.
    pub build_version: String,
    /// Version.
    pub version: String,
    /// Process ID.
    pub pid: u32,
    /// What it was built with.
    pub features: Vec<String>,
}

/// The state of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum VmState {
    /// There is a configuration; the VM was not booted yet.
    Created,
    /// The guest runs.
    Running,
    /// The vCPUs stand still; the devices' DMA goes on.
    Paused,
    /// The guest has ended, or was ended; the configuration is kept.
    Shutdown,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmInfo {
    /// Its configuration, with what was left to defaults filled in.
    pub config: VmConfig,
    /// Its state.
    pub state: VmState,
    /// Bytes of RAM.
    pub memory_actual_size: u64,
    /// Its devices by ID, while it is booted.
    pub device_tree: BTreeMap<String, DeviceNode>,
}

/// A device of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceNode {
    /// Its ID.
    pub id: String,
    /// Always empty.
    pub resources: Vec<BTreeMap<String, String>>,
    /// Always empty.
    pub children: Vec<String>,
    /// Where the guest sees it: segment, bus, device, function.
    pub pci_bdf: String,
}

/// Counters by device ID and name.
pub type VmCounters = BTreeMap<String, BTreeMap<String, u64>>;

/// A new size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmResize {
    /// Number of vCPUs wanted: what it is, as vCPUs cannot be added or removed.
    #[serde(default)]
    pub desired_vcpus: Option<u32>,
    /// Bytes of RAM wanted: what it is, as RAM cannot be added or removed.
    #[serde(default)]
    pub desired_ram: Option<u64>,
    /// Bytes of the balloon wanted: 0, as there is no balloon.
    #[serde(default)]
    pub desired_balloon: Option<u64>,
}

/// The device to be removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmRemoveDevice {
    /// Its ID.
    pub id: String,
}
