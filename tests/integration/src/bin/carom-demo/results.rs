// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The demo's results, as `--json` writes them.

use std::collections::BTreeMap;

use carom_integration::events::Requests;
use carom_integration::workload::{DmaMap, Fio};
use serde::{Deserialize, Serialize};

/// All results of one run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    pub(crate) versions: BTreeMap<String, String>,
    /// Whether this was the short form.
    pub(crate) quick: bool,
    pub(crate) configs: Vec<Config>,
    /// What went wrong: one line for each guest that failed.
    pub(crate) failures: Vec<String>,
}

/// Where it ran.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// The physical machine.
    pub(crate) host: String,
    /// `tcg` or `kvm`: how the rig's machine was run; `direct`: no rig.
    pub(crate) rig: String,
    /// Kernel that KVM and VFIO are of.
    pub(crate) kernel: String,
    /// RAM of each guest.
    pub(crate) guest_ram_bytes: u64,
}

/// Figures of one configuration.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Config {
    pub(crate) name: String,
    /// `carom` or `qemu`.
    pub(crate) vmm: String,
    /// By block size: 1 job on 1 vCPU.
    pub(crate) fio: BTreeMap<String, Fio>,
    /// By block size: 2 jobs on 2 vCPUs; full run only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fio_2_jobs: Option<BTreeMap<String, Fio>>,
    pub(crate) dma_map: DmaMap,
    /// Requests from the guest's start to the end of fio's reads; null where there is no virtio-iommu or it does not count.
    pub(crate) requests: Option<Requests>,
    /// Most memory that the VMM had pinned, in bytes.
    pub(crate) pinned_bytes: u64,
    /// Bytes that were written and verified; only where the configuration has that pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) verified_bytes: Option<u64>,
    /// How often a guest of this configuration hung and was started again.
    pub(crate) retries: u32,
}
