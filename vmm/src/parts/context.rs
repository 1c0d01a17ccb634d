// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Objects and settings of the VM that the builders of devices use.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use devices::guest_visible::GuestVisibleMemory;
use devices::pci::{PciAddress, PciRoot};
use devices::platform::{DeviceObserver, Doorbells, HostListener, MemorySlots, MsiAllocator};
use devices::ram::Ram;
use devices::reclaim::Reclaim;
use kvm_ioctls::VmFd;

use super::rate_limits::RateLimitGroups;

/// Objects and settings of the VM that the builders of devices use, such as its RAM and its interrupts.
pub struct DeviceContext {
    pub(crate) vm: Arc<VmFd>,
    pub(crate) memory: Arc<Ram>,
    /// Bytes of RAM at boot. In a restored VM, the size in the configuration also includes RAM that was added after boot.
    pub(crate) ram_size: u64,
    /// Service that returns unused RAM to the host, if the VM has a balloon. Code that pins RAM must register the pinned RAM with this
    /// service.
    pub(crate) reclaim: Option<Arc<Reclaim>>,
    pub(crate) slots: Arc<dyn MemorySlots>,
    /// BARs that are mapped into the guest. Before such a mapping is removed, other devices lose access to the BAR.
    pub(crate) bars: Arc<GuestVisibleMemory>,
    pub(crate) msi: Arc<dyn MsiAllocator>,
    pub(crate) doorbells: Arc<dyn Doorbells>,
    pub(crate) pci: Arc<PciRoot>,
    /// Rate limits that disks share.
    pub(crate) limits: RateLimitGroups,
    /// Receiver of events that the guest causes on devices.
    pub(crate) observer: Arc<dyn DeviceObserver>,
    /// Receiver of the host's notices about VFIO devices.
    pub(crate) listener: Arc<dyn HostListener>,
    /// Addresses of devices in a restored VM, by ID. They cannot be computed again, because the order in which devices were added is not
    /// saved.
    pub(crate) places: BTreeMap<String, PciAddress>,
    /// Saved aperture of the bounce windows, if the VM is restored and had windows. The value is not validated yet.
    pub(crate) window_aperture: Option<RangeInclusive<u64>>,
}
