// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! All parts of a VM on its root buses: parts that are present at boot, and hot-plugged parts.

use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use carom_api::config::IommuPoll;
use carom_api::kinds::{Kind, KindConfig};
use carom_api::{ConfigError, DeviceConfig, PartConfig, VmConfig};
use devices::pci::{PciAddress, PciDevice};
use devices::ram::RamRegion;
use devices::virtio::iommu::IommuHandle;

use super::context::DeviceContext;
use super::faults::FaultPath;
use super::vfio::HostDevices;
use super::{Built, Part, Shared, Site, iommu, name};
use crate::arch::segments;
use crate::error::VmError;
use crate::machine::PartCounters;

/// Part on a root bus.
struct Placed {
    id: String,
    address: PciAddress,
    /// True if the part is behind the virtio-iommu.
    behind: bool,
    kind: &'static Kind,
    function: Arc<dyn PciDevice>,
    part: Box<dyn Part>,
}

/// Maximum time to wait until a vCPU's last access to a device ends, after the device has left the bus.
const LAST_ACCESS: Duration = Duration::from_secs(10);

/// Drops a function that is no longer on a bus. If a vCPU is accessing the function, waits until the access ends. So the calling thread,
/// and not the vCPU's thread, drops the last reference and closes the function. The system call filter of a vCPU's thread forbids the
/// necessary calls. If the access does not end within `timeout`, the function stays open.
fn drop_last(function: Arc<dyn PciDevice>, timeout: Duration) {
    let start = Instant::now();
    while Arc::strong_count(&function) > 1 {
        if start.elapsed() > timeout {
            log::warn!("{}: a vCPU is still using the removed device, so its host resources stay open", function.id());
            return std::mem::forget(function);
        }
        thread::sleep(Duration::from_micros(100));
    }
}

/// All parts of a VM.
///
/// Rust drops the fields in the order of their declaration: first the parts, then the objects that the parts' DMA uses.
pub struct PartBus {
    parts: Vec<Placed>,
    iommu: Option<Arc<IommuHandle>>,
    poll: IommuPoll,
    /// Segments on which all devices are behind the virtio-iommu.
    iommu_segments: Vec<u16>,
    shared: Shared,
}

impl Drop for PartBus {
    fn drop(&mut self) {
        self.shared.faults.disconnect();
    }
}

impl PartBus {
    /// Builds the parts of `config`, and puts them and the virtio-iommu on the root buses.
    ///
    /// # Errors
    /// A part does not fit this host, or needs a file, device or slot that is unavailable.
    pub fn new(config: &VmConfig, context: DeviceContext) -> Result<Self, VmError> {
        let host_devices = HostDevices::new(config.platform.iommufd);
        let shared = Shared { context, faults: FaultPath::new(), host_devices };
        let mut bus = Self {
            parts: Vec::new(),
            iommu: None,
            poll: config.platform.iommu_poll,
            iommu_segments: config.platform.iommu_segments.clone(),
            shared,
        };
        let mut endpoints = Vec::new();
        // Slots that the configuration assigns. Parts without an assigned slot do not use these slots.
        let slot = |part: &dyn KindConfig| Some(PciAddress::on_segment(part.pci_segment(), part.pci_device_id()?));
        let wanted: Vec<PciAddress> = config.parts().filter_map(slot).collect();
        for part in config.parts().filter(|part| part.kind().takes_slot) {
            // The virtio-iommu is built after this loop, so `bus.iommu` is still `None`. Pass `has_iommu`, because a VM with a virtio-iommu
            // has other slot ranges for its parts.
            let address = bus.place(part, config.has_iommu(), &wanted)?;
            let mut built = Site { address, shared: &mut bus.shared }.build(&part.to_part())?;
            endpoints.extend(built.mapper.take().map(|mapper| (address, mapper)));
            bus.put(address, part.kind(), part.is_behind_iommu(), built)?;
        }
        if config.has_iommu() {
            let (built, handle) = iommu::build(config, endpoints, &bus.shared.context)?;
            bus.put(iommu::IOMMU_ADDRESS, iommu::KIND, false, built)?;
            bus.shared.faults.connect(&handle)?;
            bus.iommu = Some(handle);
        }
        Ok(bus)
    }

    fn put(&mut self, address: PciAddress, kind: &'static Kind, behind: bool, built: Built) -> Result<(), VmError> {
        let Built { function, part, .. } = built;
        let id = function.id().to_string();
        self.shared.context.pci.add(address, function.clone())?;
        self.parts.push(Placed { id, address, behind, kind, function, part });
        Ok(())
    }

    /// Allows or forbids polling for requests to the virtio-iommu, depending on the new number of vCPUs.
    pub fn vcpus_changed(&self, count: u32) {
        if let Some(iommu) = &self.iommu {
            iommu.allow_polling(iommu::polls(self.poll, count));
        }
    }

    /// Returns the ID and address of each part, including parts that have left the bus and are not closed yet.
    pub fn places(&self) -> impl Iterator<Item = (&str, PciAddress)> {
        self.parts.iter().map(|placed| (placed.id.as_str(), placed.address))
    }

    /// Returns the virtio-iommu, if the VM has one.
    pub fn iommu(&self) -> Option<&Arc<IommuHandle>> {
        self.iommu.as_ref()
    }

    /// Returns the bytes of RAM that parts such as the balloon hold. The guest does not use this RAM.
    pub fn held_ram(&self) -> u64 {
        self.parts.iter().map(|placed| placed.part.held_ram()).sum()
    }

    /// Returns the path of the pseudoterminal that the virtio-console is connected to, if any.
    pub fn console_pty(&self) -> Option<&Path> {
        self.parts.iter().find_map(|placed| placed.part.pty())
    }

    /// Returns the counters of all parts that have counters.
    pub fn counters(&self) -> Vec<PartCounters> {
        let of = |placed: &Placed| PartCounters {
            id: placed.id.clone(),
            kind: placed.kind.name,
            counters: placed.part.counters(),
        };
        self.parts.iter().map(of).filter(|part| !part.counters.is_empty()).collect()
    }

    /// Builds a part and puts it on a root bus of the running VM. Returns its address. On error, nothing changes.
    ///
    /// # Errors
    /// The part cannot be hot-plugged, does not fit this host, or needs a file, device or slot that is unavailable.
    pub fn add(&mut self, config: &PartConfig) -> Result<PciAddress, VmError> {
        let kind = config.kind();
        if kind.add.is_none() {
            return Err(
                ConfigError::new(kind.field, "cannot be hot-plugged: configure it when the VM is created").into()
            );
        }
        let behind = config.is_behind_iommu();
        let address = self.free_address(&**config, self.iommu.is_some(), &[])?;
        let mut built = Site { address, shared: &mut self.shared }.build(config)?;
        if let Some(iommu) = &self.iommu {
            self.shared.faults.connect(iommu)?;
            built.mapper.take().map_or(Ok(()), |mapper| iommu::connect(iommu, address, mapper))?;
        }
        let put = self.put(address, kind, behind, built);
        if put.is_err() {
            self.disconnect(address, behind);
        }
        put.map(|()| address)
    }

    /// Gives access to new RAM to all parts that access RAM directly, and to all endpoints in bypass mode.
    ///
    /// # Errors
    /// The host cannot map the RAM for a part. Other parts may already have access to the RAM, until [`take_ram`](Self::take_ram) is
    /// called.
    pub fn add_ram(&self, region: &RamRegion) -> Result<(), VmError> {
        self.parts.iter().try_for_each(|placed| placed.part.add_ram(region))?;
        let Some(iommu) = &self.iommu else { return Ok(()) };
        iommu.add_ram(region).map_err(|error| VmError::Iommu(error.to_string()))
    }

    /// Removes the access of all parts to RAM, after [`add_ram`](Self::add_ram) failed and the RAM was withdrawn. Parts that `add_ram` did
    /// not change may also have access. A driver may have mapped the RAM for such a part, or started the part with addresses in the RAM.
    /// Returns `false` if the host keeps a mapping of the RAM, so that the pages must stay allocated.
    #[must_use]
    pub fn take_ram(&self, region: &RamRegion) -> bool {
        self.parts.iter().for_each(|placed| placed.part.take_ram(region));
        self.iommu.as_ref().is_none_or(|iommu| iommu.take_ram(region))
    }

    /// Changes the size of the part with this ID.
    ///
    /// # Errors
    /// The part cannot be resized to `bytes`.
    pub fn resize(&self, id: &str, bytes: u64) -> Result<(), VmError> {
        let resized = self.parts.iter().find(|placed| placed.id == id);
        // Only a disk can be missing here, because no other resizable part can be removed.
        let gone = || VmError::Device { what: "resize a disk", source: std::io::ErrorKind::NotFound.into() };
        resized.ok_or_else(gone).and_then(|placed| placed.part.resize(bytes)).map_err(|error| error.of_device(id))
    }

    /// Closes a part that has left the bus. Returns its ID. Afterwards no memory is mapped or pinned for the part. The part's host
    /// resources are closed, unless a vCPU's access to the part does not end in time.
    pub fn close(&mut self, address: PciAddress) -> Option<String> {
        let place = self.parts.iter().position(|placed| placed.address == address)?;
        let Placed { id, behind, function, mut part, .. } = self.parts.remove(place);
        part.leave(&*function);
        self.disconnect(address, behind);
        drop(part);
        drop_last(function, LAST_ACCESS);
        Some(id)
    }

    /// Removes all mappings of a part behind the virtio-iommu.
    fn disconnect(&self, address: PciAddress, behind: bool) {
        if let (true, Some(iommu)) = (behind, &self.iommu) {
            // Dropping the part's mapper empties the part's address space.
            drop(iommu.remove_endpoint(address.endpoint_id()));
        }
    }

    /// Returns the address of the part with this ID, if the part can be hot-unplugged.
    pub fn find(&self, id: &str) -> Option<PciAddress> {
        let mut leaving = self.parts.iter().filter(|placed| placed.kind.add.is_some());
        leaving.find(|placed| placed.id == id).map(|placed| placed.address)
    }

    /// Returns the slot from the saved state if the part can use this slot. Otherwise returns a free slot.
    fn place(&self, part: &dyn KindConfig, has_iommu: bool, wanted: &[PciAddress]) -> Result<PciAddress, VmError> {
        let free = self.free_address(part, has_iommu, wanted)?;
        let (slots, _) = self.slots(part, has_iommu);
        let saved = self.shared.context.places.get(name(part));
        let fits = |saved: &&PciAddress| saved.segment == part.pci_segment() && slots.contains(&saved.device);
        Ok(saved.filter(fits).copied().unwrap_or(free))
    }

    /// Returns the slots that a part may use. `has_iommu` is true if the VM has a virtio-iommu. Also returns words that describe these
    /// slots in error texts.
    fn slots(&self, part: &dyn KindConfig, has_iommu: bool) -> (RangeInclusive<u8>, &'static str) {
        let segment = part.pci_segment();
        let all = self.iommu_segments.contains(&segment);
        match (has_iommu, part.is_behind_iommu()) {
            (true, true) => (segments::slots_behind_iommu(segment, all), " behind the virtio-iommu"),
            (true, false) => (segments::slots_beside_iommu(all), " not behind the virtio-iommu"),
            (false, _) => (segments::slots(segment), ""),
        }
    }

    /// Returns the slot that the configuration assigns to a part. If it assigns no slot, returns a free slot that is not in `wanted`. The
    /// slots that the part may use depend on `has_iommu`.
    fn free_address(
        &self,
        part: &dyn KindConfig,
        has_iommu: bool,
        wanted: &[PciAddress],
    ) -> Result<PciAddress, VmError> {
        let kind = part.kind();
        if !has_iommu && part.is_behind_iommu() {
            let rule = "the VM runs without a virtio-iommu: boot the VM with iommu_bounce, with iommu_segments, or with a device that has \
                        iommu on";
            return Err(ConfigError::new(kind.iommu.unwrap_or(DeviceConfig::IOMMU), rule).into());
        }
        let (mut slots, which) = self.slots(part, has_iommu);
        let segment = part.pci_segment();
        // Parts that have left the bus and are not closed yet still occupy their slots.
        let on_bus = self.shared.context.pci.devices().into_iter().map(|(address, _)| address);
        let taken: Vec<PciAddress> = on_bus.chain(self.parts.iter().map(|placed| placed.address)).collect();
        if let Some(slot) = part.pci_device_id() {
            let address = PciAddress::on_segment(segment, slot);
            let rule = if !slots.contains(&slot) {
                let (first, last) = (slots.start(), slots.end());
                format!("{slot} is not allowed: on segment {segment}, the slots{which} are {first} to {last}")
            } else if taken.contains(&address) {
                let rule = format!("slot {slot} on segment {segment} is taken: choose another slot");
                return Err(ConfigError::conflict(kind.slot_field(), rule).into());
            } else {
                return Ok(address);
            };
            return Err(ConfigError::new(kind.slot_field(), rule).into());
        }
        let place = slots.find_map(|slot| {
            let address = PciAddress::on_segment(segment, slot);
            (!taken.contains(&address) && !wanted.contains(&address)).then_some(address)
        });
        place.ok_or_else(|| {
            let rule = format!("on segment {segment}, all slots{which} are taken: remove a device first");
            ConfigError::new(kind.field, rule).into()
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use devices::pvpanic::PvPanic;

    use super::*;
    use crate::parts::observer::Observer;
    use crate::process::event_monitor::EventMonitor;

    #[test]
    fn function_in_an_access_is_closed_when_the_access_ends() {
        let function: Arc<dyn PciDevice> =
            Arc::new(PvPanic::new("device".into(), Arc::new(Observer(EventMonitor::none()))));
        let closed = Arc::downgrade(&function);
        let of_access = function.clone();
        let access = thread::spawn(move || drop(of_access));
        // The timeout is only reached if the test hangs.
        drop_last(function, Duration::from_secs(600));
        assert!(closed.upgrade().is_none());
        access.join().unwrap();
        // If an access does not end, `drop_last` waits only until its timeout.
        let function: Arc<dyn PciDevice> =
            Arc::new(PvPanic::new("device".into(), Arc::new(Observer(EventMonitor::none()))));
        let closed = Arc::downgrade(&function);
        drop_last(function.clone(), Duration::ZERO);
        drop(function);
        // The function is never closed. The static variable lets a leak detector know that this is wanted.
        static KEPT: OnceLock<Arc<dyn PciDevice>> = OnceLock::new();
        let kept = closed.upgrade().expect("the last access does not close the function");
        assert!(KEPT.set(kept).is_ok());
    }
}
