// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the VM gives to the devices that are built for it.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use devices::pci::{PciAddress, PciRoot};
use devices::platform::{DeviceObserver, Doorbells, HostListener, MemorySlots, MsiAllocator};
use devices::ram::Ram;
use devices::reclaim::Reclaim;
use devices::shown::ShownMemory;
use kvm_ioctls::VmFd;

use super::rate_limits::RateLimitGroups;

/// What devices need of the VM.
pub struct DeviceContext {
    pub(crate) vm: Arc<VmFd>,
    pub(crate) memory: Arc<Ram>,
    /// Bytes of RAM that the guest was booted with. In a VM that is restored, the configuration has those that came since, too.
    pub(crate) ram_size: u64,
    /// Gives RAM back to the host that the guest does without, in a VM with a balloon: who pins RAM tells it.
    pub(crate) reclaim: Option<Arc<Reclaim>>,
    pub(crate) slots: Arc<dyn MemorySlots>,
    /// Shows BARs to the guest, and takes them from other devices before they go.
    pub(crate) bars: Arc<ShownMemory>,
    pub(crate) msi: Arc<dyn MsiAllocator>,
    pub(crate) doorbells: Arc<dyn Doorbells>,
    pub(crate) pci: Arc<PciRoot>,
    /// Limits on the rate that disks share.
    pub(crate) limits: RateLimitGroups,
    /// Learns what the guest does with virtio devices.
    pub(crate) observer: Arc<dyn DeviceObserver>,
    /// Learns what the host says of its devices.
    pub(crate) listener: Arc<dyn HostListener>,
    /// Where devices were, by name, in a VM that is restored. The order in which they were added is not kept.
    pub(crate) places: BTreeMap<String, PciAddress>,
    /// IOVAs of the bounce windows' aperture, in a VM that is restored with some. Nobody has checked it.
    pub(crate) window_aperture: Option<RangeInclusive<u64>>,
}
