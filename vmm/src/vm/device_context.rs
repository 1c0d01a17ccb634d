// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the VM gives to the devices that are built for it.

use std::collections::BTreeMap;
use std::sync::Arc;

use devices::pci::{PciAddress, PciRoot};
use devices::platform::{DeviceObserver, Doorbells, HostListener, MemorySlots, MsiAllocator};
use devices::ram::Ram;
use devices::shown::ShownMemory;
use kvm_ioctls::VmFd;

/// What devices need of the VM.
pub(super) struct DeviceContext {
    pub(super) vm: Arc<VmFd>,
    pub(super) memory: Arc<Ram>,
    pub(super) slots: Arc<dyn MemorySlots>,
    /// Shows BARs to the guest, and takes them from other devices before they go.
    pub(super) bars: Arc<ShownMemory>,
    pub(super) msi: Arc<dyn MsiAllocator>,
    pub(super) doorbells: Arc<dyn Doorbells>,
    pub(super) pci: Arc<PciRoot>,
    /// Learns what the guest does with virtio devices.
    pub(super) observer: Arc<dyn DeviceObserver>,
    /// Learns what the host says of its devices.
    pub(super) listener: Arc<dyn HostListener>,
    /// Where devices were, by name, in a VM that is restored. The order in which they were added is not kept.
    pub(super) places: BTreeMap<String, PciAddress>,
}
