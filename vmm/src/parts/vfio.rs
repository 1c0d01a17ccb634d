// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host devices (VFIO).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use carom_api::config::PlatformConfig;
use carom_api::{DeviceConfig, PartConfig};
use devices::pci::PciDevice;
use devices::platform::SharedLine;
use devices::ram::RamRegion;
use devices::reclaim::{PinnedWhole, PinningMapper, Reclaim};
use devices::vfio::{
    self, DmaSpace, GuestRamMapping, HostFunctionPath, HostIommu, VfioPciDevice, VfioPciError, map_guest_ram,
};
use kvm_ioctls::VmFd;
use log::warn;
use vfio_ioctls::VfioDeviceFd;

use super::mapper::EndpointMapper;
use super::{Builder, Built, Part, Site, name, not_built_here, reset};
use crate::arch::segments;
use crate::error::VmError;
use crate::kvm::line::KvmSharedLine;
use crate::kvm::{KvmVfioFiles, create_vfio_device};

pub(super) const BUILDER: Builder =
    Builder { kind: &DeviceConfig::KIND, roles: &[vfio::NOTICES_ROLE], counters: Vec::new, build };

/// Host IOMMU address space, shared by all devices that are not behind the virtio-iommu. Dropping the last of these devices closes the
/// address space.
struct RamSpace {
    /// Mapping of RAM for the devices. Dropping the mapping unmaps and unpins RAM.
    ram: GuestRamMapping,
    space: DmaSpace,
    /// Dropped after `ram`, because RAM stays pinned until the mapping is dropped.
    _pinned: Option<PinnedWhole>,
    /// True if no more devices may join the address space. Devices that have already joined stay.
    closed: AtomicBool,
}

/// State that host devices share.
pub(super) struct HostDevices {
    iommufd: bool,
    /// Host IOMMU, opened together with the first device.
    host: Option<HostIommu>,
    /// Address space for devices that are not behind the virtio-iommu. It exists only while a device uses it.
    ram: Weak<RamSpace>,
    /// All devices that were opened. Some of them may be closed by now.
    opened: Vec<Weak<VfioPciDevice>>,
}

impl HostDevices {
    pub(super) fn new(iommufd: bool) -> Self {
        Self { iommufd, host: None, ram: Weak::new(), opened: Vec::new() }
    }

    fn host(&mut self, vm: &VmFd) -> Result<&HostIommu, VmError> {
        if self.host.is_none() {
            self.host = Some(open_host_iommu(self.iommufd, vm)?);
        }
        Ok(self.host.as_ref().expect("just made"))
    }

    /// Rejects a function that is already open. With a VFIO container, a second open would succeed, although the function is in use and was
    /// not reset.
    fn check_new(&mut self, function: &HostFunctionPath) -> Result<(), VfioPciError> {
        self.opened.retain(|opened| opened.strong_count() > 0);
        let is_it = |opened: &Weak<VfioPciDevice>| opened.upgrade().is_some_and(|it| it.host_name() == function.name());
        if self.opened.iter().any(is_it) {
            return Err(VfioPciError::Twice { name: function.name().to_string() });
        }
        Ok(())
    }
}

/// VFIO device of a VM. Rust drops the fields in the order of their declaration: first the function, then the address space that its DMA
/// uses.
struct HostDevice {
    function: Arc<VfioPciDevice>,
    /// Shared address space, for a device that is not behind the virtio-iommu.
    ram: Option<Arc<RamSpace>>,
    iommufd: bool,
}

impl Part for HostDevice {
    fn add_ram(&self, region: &RamRegion) -> Result<(), VmError> {
        let Some(ram) = &self.ram else { return Ok(()) };
        ram.ram.add(region).map_err(|error| VmError::MoreRam(format!("{}: {error}", self.function.id())))
    }

    fn take_ram(&self, region: &RamRegion) {
        if let Some(ram) = &self.ram {
            ram.ram.remove(region);
        }
    }

    fn leave(&mut self, function: &dyn PciDevice) {
        self.function.unwatch();
        reset(function);
        if let (Some(ram), false, true) = (&self.ram, self.iommufd, self.function.is_held()) {
            // The kernel may remove the group from the container before this process closes the container. The container's object in
            // `vfio_ioctls` does not notice the removal, so adding the group again would fail. Therefore no more devices may join the
            // space.
            ram.closed.store(true, Ordering::Relaxed);
        }
    }
}

/// Opens the device. A device behind the virtio-iommu gets its own address space with a mapper. Other devices share an address space that
/// maps all RAM.
fn build(config: &PartConfig, site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::Vfio(config) = config else { return Err(not_built_here(config)) };
    let Site { address, shared } = site;
    let (context, devices) = (&shared.context, &mut shared.host_devices);
    let fail = |source: VfioPciError| {
        let path = Some(config.path.display().to_string());
        VmError::Vfio { field: DeviceConfig::PATH, path, source: Box::new(source) }
    };
    let host_path = HostFunctionPath::inspect(&config.path).map_err(fail)?;
    devices.check_new(&host_path).map_err(fail)?;
    let joined = devices.ram.upgrade().filter(|ram| !config.iommu && !ram.closed.load(Ordering::Relaxed));
    let iommufd = devices.iommufd;
    let space = match &joined {
        Some(ram) => ram.space.clone(),
        None => devices.host(&context.vm)?.new_space().map_err(fail)?,
    };
    let id = name(config);
    let (msi, bars) = (context.msi.clone(), context.bars.clone());
    let line = KvmSharedLine::new(context.vm.clone(), segments::intx_irq(address));
    let line = line.map(|line| Arc::new(line) as Arc<dyn SharedLine>);
    let function = Arc::new(VfioPciDevice::open(id, &config.path, &space, msi, line, bars).map_err(fail)?);
    devices.opened.push(Arc::downgrade(&function));
    if let Err(error) = function.watch(context.listener.clone()) {
        warn!("{id}: cannot watch the device for host errors and removal requests: {error}");
    }
    if config.iommu {
        let peers = host_path.peer_memory();
        let host = devices.host(&context.vm)?;
        let mapper = host.mapper(space, address.endpoint_id(), &function, context.memory.clone()).map_err(fail)?;
        let mapper = mapper.without(&peers);
        let mapper: Box<dyn EndpointMapper> = match &context.reclaim {
            Some(reclaim) => Box::new(PinningMapper::new(mapper, reclaim.clone())),
            None => Box::new(mapper),
        };
        let part = Box::new(HostDevice { function: function.clone(), ram: None, iommufd });
        return Ok(Built { function, part, mapper: Some(mapper) });
    }
    let ram = match joined {
        Some(ram) => ram,
        None => {
            // RAM is mapped only now, because the space must already contain a device.
            let pinned = context.reclaim.as_ref().map(Reclaim::pin_whole);
            let ram = map_guest_ram(&space, &context.memory).map_err(fail)?;
            Arc::new(RamSpace { ram, space, _pinned: pinned, closed: AtomicBool::new(false) })
        }
    };
    devices.ram = Arc::downgrade(&ram);
    let part = Box::new(HostDevice { function: function.clone(), ram: Some(ram), iommufd });
    Ok(Built { function, part, mapper: None })
}

fn open_host_iommu(iommufd: bool, vm: &VmFd) -> Result<HostIommu, VmError> {
    let kvm_vfio = create_vfio_device(vm)?;
    if !iommufd {
        return Ok(HostIommu::containers(Some(Arc::new(VfioDeviceFd::new_from_kvm(kvm_vfio)))));
    }
    HostIommu::iommufd(Some(Arc::new(KvmVfioFiles(kvm_vfio)))).map_err(|source| VmError::Vfio {
        field: PlatformConfig::IOMMUFD,
        path: None,
        source: Box::new(source),
    })
}
