// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices of the host in the VM, and of other processes, and the virtio-iommu in front of them: what is there at boot, and
//! what comes and goes while the guest runs.

use std::sync::Arc;

use carom_api::config::{IommuPoll, PlatformConfig};
use carom_api::limits::CHUNK_SIZE;
use carom_api::{ConfigError, DeviceConfig, IommuBounceConfig, PartConfig, RngConfig, UserDeviceConfig, VmConfig};
use devices::dma::{FaultRelay, FaultSender, TableMapper, fault_relay};
use devices::pci::{PciAddress, PciDevice};
use devices::vfio::user::{UserMapper, UserServer};
use devices::vfio::{DmaSpace, GuestRamMapping, HostIommu, VfioMapper, VfioPciDevice, map_guest_ram};
use devices::virtio::iommu::{self, IommuHandle, IommuParams, RingFeatures, WindowRegion};
use devices::virtio::rng::VirtioRng;
use iommu_bounce::{DmaMapper, EngineConfig, MapperLimits, WindowConfig};
use kvm_ioctls::VmFd;
use log::{error, warn};
use vfio_ioctls::VfioDeviceFd;

use super::common_limits;
use super::device_context::DeviceContext;
use super::rng::Rng;
use crate::arch::layout::{MSI_WINDOW, PCI_SLOTS, PCI_SLOTS_BEHIND_IOMMU, PCI_SLOTS_BESIDE_IOMMU};
use crate::kvm::create_vfio_device;
use crate::machine::VmError;

/// Where the virtio-iommu sits.
pub(super) const IOMMU_ADDRESS: PciAddress = PciAddress::on_root_bus(1);
/// What the virtio-iommu's queues can do.
const RING_FEATURES: RingFeatures = RingFeatures { indirect_desc: true, event_idx: true };

/// The address space of a device behind the virtio-iommu.
enum Mapper {
    Vfio(VfioMapper),
    User(UserMapper),
    /// Of a device that this process emulates.
    Table(TableMapper),
}

impl Mapper {
    fn limits(&self) -> MapperLimits {
        match self {
            Self::Vfio(mapper) => mapper.limits(),
            Self::User(mapper) => mapper.limits(),
            Self::Table(mapper) => mapper.limits(),
        }
    }

    /// As the virtio-iommu takes it.
    fn behind(self, iommu: &IommuHandle) -> Box<dyn DmaMapper> {
        match self {
            Self::Vfio(mapper) => Box::new(mapper),
            Self::User(mapper) => {
                mapper.connect(iommu);
                Box::new(mapper)
            }
            Self::Table(mapper) => {
                mapper.connect(iommu.windows());
                Box::new(mapper)
            }
        }
    }
}

/// A device of the host in the VM.
struct Device {
    address: PciAddress,
    /// Whether it is behind the virtio-iommu.
    behind: bool,
    /// How many shared spaces were retired before the one that it was put in, if it is not.
    retired_before: usize,
    function: Arc<VfioPciDevice>,
}

/// An address space of the host that all devices share that are not behind the virtio-iommu.
struct SharedSpace {
    /// Held for its end: dropping it unmaps RAM for the devices.
    _ram: GuestRamMapping,
    space: DmaSpace,
}

/// The devices of the host in the VM, with what they need of the host.
///
/// Fields are dropped in this order: devices before what their DMA goes through.
pub(super) struct Passthrough {
    devices: Vec<Device>,
    iommu: Option<Arc<IommuHandle>>,
    shared: Option<SharedSpace>,
    /// Such spaces that take no more devices, while those that are in them may go on.
    retired: Vec<SharedSpace>,
    /// There once a device was.
    host: Option<HostIommu>,
    iommufd: bool,
    /// There once a device of another process was.
    faults: Option<FaultSender>,
    rng: Option<Arc<VirtioRng>>,
    context: DeviceContext,
}

impl Passthrough {
    /// Opens the devices of `config`, and puts them and the virtio-iommu on the root bus.
    pub(super) fn new(config: &VmConfig, context: DeviceContext) -> Result<Self, VmError> {
        let iommufd = config.platform.iommufd;
        let (devices, retired) = (Vec::new(), Vec::new());
        let mut all =
            Self { devices, iommu: None, shared: None, retired, host: None, iommufd, faults: None, rng: None, context };
        let mut endpoints = Vec::new();
        for device in &config.devices {
            // Which slots a device may take follows from whether there will be an IOMMU.
            let address = all.free_address(config.has_iommu(), device.iommu)?;
            let (function, mapper) = all.open(device, address)?;
            endpoints.extend(mapper.map(|mapper| (address, Mapper::Vfio(mapper))));
            all.put(address, device.iommu, function)?;
        }
        let (faults, relay) = fault_relay();
        if let Some(rng) = &config.rng {
            let address = all.place(RngConfig::ID, config.has_iommu(), rng.iommu)?;
            let rng = Rng::open(rng, address, &faults, &all.context)?;
            endpoints.extend(rng.mapper.map(|mapper| (address, Mapper::Table(mapper))));
            all.context.pci.add(address, rng.function)?;
            all.rng = Some(rng.device);
        }
        let emulated_behind = config.rng.as_ref().is_some_and(|rng| rng.iommu);
        let relay = (emulated_behind || !config.user_devices.is_empty()).then_some(relay);
        all.faults = relay.is_some().then_some(faults);
        for device in &config.user_devices {
            let address = all.free_address(config.has_iommu(), device.iommu)?;
            let (function, mapper) = all.open_user(device, address)?;
            endpoints.extend(mapper.map(|mapper| (address, Mapper::User(mapper))));
            all.put(address, device.iommu, function)?;
        }
        if config.has_iommu() {
            let iommu = add_iommu(config, endpoints, &all.context)?;
            relay_faults(relay, &iommu)?;
            all.iommu = Some(iommu);
        }
        Ok(all)
    }

    fn put(&mut self, address: PciAddress, behind: bool, function: Arc<VfioPciDevice>) -> Result<(), VmError> {
        self.context.pci.add(address, function.clone())?;
        self.devices.push(Device { address, behind, retired_before: self.retired.len(), function });
        Ok(())
    }

    /// The virtio-rng device, if there is one.
    pub(super) fn rng(&self) -> Option<&VirtioRng> {
        self.rng.as_deref()
    }

    /// The virtio-iommu, if there is one.
    pub(super) fn iommu(&self) -> Option<&Arc<IommuHandle>> {
        self.iommu.as_ref()
    }

    /// Opens a device and puts it on the root bus of the running VM. Returns where it is. On error nothing has changed.
    pub(super) fn add(&mut self, device: &PartConfig) -> Result<PciAddress, VmError> {
        let behind = device.is_behind_iommu();
        let address = self.free_address(self.iommu.is_some(), behind)?;
        let (function, mapper) = match device {
            PartConfig::Vfio(device) => {
                let (function, mapper) = self.open(device, address)?;
                (function, mapper.map(Mapper::Vfio))
            }
            PartConfig::VfioUser(device) => {
                if let (None, Some(iommu)) = (&self.faults, &self.iommu) {
                    let (faults, relay) = fault_relay();
                    relay_faults(Some(relay), iommu)?;
                    self.faults = Some(faults);
                }
                let (function, mapper) = self.open_user(device, address)?;
                (function, mapper.map(Mapper::User))
            }
            PartConfig::Iommu(_) | PartConfig::Rng(_) => {
                return Err(ConfigError::new(device.kind().field, "is there from the start or not at all").into());
            }
        };
        let added = self.connect(address, &function, mapper);
        if added.is_err() {
            self.disconnect(address, behind);
            self.end_shared_space();
        } else {
            let retired_before = self.retired.len();
            self.devices.push(Device { address, behind, retired_before, function });
        }
        added.map(|()| address)
    }

    fn connect(
        &self,
        address: PciAddress,
        function: &Arc<VfioPciDevice>,
        mapper: Option<Mapper>,
    ) -> Result<(), VmError> {
        if let (Some(iommu), Some(mapper)) = (&self.iommu, mapper) {
            iommu
                .add_endpoint(address.endpoint_id(), mapper.behind(iommu))
                .map_err(|error| VmError::Iommu(format!("device at {address}: {error}")))?;
        }
        Ok(self.context.pci.add(address, function.clone())?)
    }

    /// Gives a device back that has left the bus. Returns its name. Nothing is mapped for it or pinned afterwards.
    pub(super) fn close(&mut self, address: PciAddress) -> Option<String> {
        let place = self.devices.iter().position(|device| device.address == address)?;
        let Device { behind, retired_before, function, .. } = self.devices.remove(place);
        let id = function.id().to_string();
        function.unwatch();
        if let Err(error) = function.reset() {
            error!("{id}: resetting it: {error}");
        }
        self.disconnect(address, behind);
        if !behind && !self.iommufd && function.is_held() && retired_before == self.retired.len() {
            // The kernel may take the group out of the container before it is closed, which the container does not learn: it
            // would not take the group again.
            self.retired.extend(self.shared.take());
        }
        drop(function);
        self.end_shared_space();
        Some(id)
    }

    /// Takes away what a device behind the virtio-iommu can reach.
    fn disconnect(&self, address: PciAddress, behind: bool) {
        if let (true, Some(iommu)) = (behind, &self.iommu) {
            // Its mapper is dropped, which empties its address space. There is none where it was not taken in.
            drop(iommu.remove_endpoint(address.endpoint_id()));
        }
    }

    /// Unpins RAM when no device reaches it directly any more.
    fn end_shared_space(&mut self) {
        if self.devices.iter().all(|device| device.behind) {
            self.shared = None;
            self.retired.clear();
        }
    }

    /// Where the device of this name is.
    pub(super) fn find(&self, id: &str) -> Option<PciAddress> {
        self.devices.iter().find(|device| device.function.id() == id).map(|device| device.address)
    }

    /// The slot that the device of this name was saved in, if it was and that is one for it; otherwise a free one.
    fn place(&self, id: &str, has_iommu: bool, behind: bool) -> Result<PciAddress, VmError> {
        let free = self.free_address(has_iommu, behind)?;
        let slots = match (has_iommu, behind) {
            (true, true) => PCI_SLOTS_BEHIND_IOMMU,
            (true, false) => PCI_SLOTS_BESIDE_IOMMU,
            (false, _) => PCI_SLOTS,
        };
        let saved = self.context.places.get(id).filter(|saved| slots.contains(&saved.device));
        Ok(saved.copied().unwrap_or(free))
    }

    /// A slot for a device, of a VM with or without a virtio-iommu.
    fn free_address(&self, has_iommu: bool, behind: bool) -> Result<PciAddress, VmError> {
        let (slots, which) = match (has_iommu, behind) {
            (true, true) => (PCI_SLOTS_BEHIND_IOMMU, "behind"),
            (true, false) => (PCI_SLOTS_BESIDE_IOMMU, "beside"),
            (false, false) => (PCI_SLOTS, "without"),
            (false, true) => {
                let rule = "the VM runs without a virtio-iommu; it has one if it is booted with iommu_bounce, or with a \
                            device that has iommu on";
                return Err(ConfigError::new(DeviceConfig::IOMMU, rule).into());
            }
        };
        // Those of devices that have left the bus and are not given back yet, too.
        let on_bus = self.context.pci.devices().into_iter().map(|(address, _)| address);
        let taken: Vec<PciAddress> = on_bus.chain(self.devices.iter().map(|device| device.address)).collect();
        slots.map(PciAddress::on_root_bus).find(|address| !taken.contains(address)).ok_or_else(|| {
            let rule = format!("all slots {which} the virtio-iommu are taken: remove a device first");
            ConfigError::new(DeviceConfig::OPTION, rule).into()
        })
    }

    /// Opens a device, in an address space of its own with its mapper if it is to be behind the virtio-iommu, and with
    /// the others in one that has all RAM if not.
    fn open(
        &mut self,
        device: &DeviceConfig,
        address: PciAddress,
    ) -> Result<(Arc<VfioPciDevice>, Option<VfioMapper>), VmError> {
        let fail = |source| {
            let path = Some(device.path.display().to_string());
            VmError::Vfio { field: DeviceConfig::PATH, path, source: Box::new(source) }
        };
        if self.host.is_none() {
            self.host = Some(open_host_iommu(self.iommufd, &self.context.vm)?);
        }
        let host = self.host.as_ref().expect("just made");
        let space = match &self.shared {
            Some(shared) if !device.iommu => shared.space.clone(),
            _ => host.new_space().map_err(fail)?,
        };
        let id = device.id.as_deref().unwrap_or("_vfio");
        let (msi, bars) = (self.context.msi.clone(), self.context.bars.clone());
        let function = Arc::new(VfioPciDevice::open(id, &device.path, &space, msi, bars).map_err(fail)?);
        if let Err(error) = function.watch(self.context.listener.clone()) {
            warn!("{id}: its errors will not be heard of, nor that the host wants it back: {error}");
        }
        if device.iommu {
            let memory = self.context.memory.clone();
            let mapper = host.mapper(space, address.endpoint_id(), &function, memory).map_err(fail)?;
            return Ok((function, Some(mapper)));
        }
        if self.shared.is_none() {
            // The space must have a device by then.
            let _ram = map_guest_ram(&space, &self.context.memory).map_err(fail)?;
            self.shared = Some(SharedSpace { _ram, space });
        }
        Ok((function, None))
    }
}

impl Passthrough {
    /// Connects to the server of a device.
    fn open_user(
        &self,
        device: &UserDeviceConfig,
        address: PciAddress,
    ) -> Result<(Arc<VfioPciDevice>, Option<UserMapper>), VmError> {
        let open = || {
            let faults = self.faults.clone().filter(|_| device.iommu).map(|faults| (address.endpoint_id(), faults));
            let server = UserServer::connect(&device.socket, self.context.memory.clone(), faults)?;
            if !device.iommu {
                server.share_ram()?;
            }
            let id = device.id.as_deref().unwrap_or("_vfio_user");
            // Nothing of it is shown to the guest as memory, and so nothing to other devices.
            let function = server.function(id, &*self.context.msi, self.context.bars.clone())?;
            Ok((Arc::new(function), device.iommu.then(|| server.mapper())))
        };
        open().map_err(|source| VmError::Vfio { field: UserDeviceConfig::SOCKET, path: None, source: Box::new(source) })
    }
}

/// Has faults of devices that other processes emulate come to the virtio-iommu's driver.
fn relay_faults(relay: Option<FaultRelay>, iommu: &Arc<IommuHandle>) -> Result<(), VmError> {
    let Some(relay) = relay else { return Ok(()) };
    relay.spawn(iommu).map_err(|source| VmError::Device { what: "starting the thread for faults of devices", source })
}

fn open_host_iommu(iommufd: bool, vm: &VmFd) -> Result<HostIommu, VmError> {
    let kvm_vfio = Arc::new(VfioDeviceFd::new_from_kvm(create_vfio_device(vm)?));
    if !iommufd {
        return Ok(HostIommu::containers(Some(kvm_vfio)));
    }
    HostIommu::iommufd(Some(kvm_vfio)).map_err(|source| VmError::Vfio {
        field: PlatformConfig::IOMMUFD,
        path: None,
        source: Box::new(source),
    })
}

/// Makes the virtio-iommu for `endpoints`: it promises the guest what all of their mappers can do.
fn add_iommu(
    config: &VmConfig,
    endpoints: Vec<(PciAddress, Mapper)>,
    context: &DeviceContext,
) -> Result<Arc<IommuHandle>, VmError> {
    let limits: Vec<MapperLimits> = endpoints.iter().map(|(_, mapper)| mapper.limits()).collect();
    let bounce = config.iommu_bounce.as_ref();
    let engine = EngineConfig {
        page_size_mask: common_limits::page_size_mask(&limits),
        input_range: common_limits::input_range(&limits),
        msi_window: MSI_WINDOW,
        window: bounce.map(|bounce| window(bounce, &limits)).transpose()?,
        ..Default::default()
    };
    let windows = bounce.map(|bounce| WindowRegion {
        size: bounce.max,
        chunk_size: CHUNK_SIZE,
        hugepages: bounce.hugepages,
        slots: context.slots.clone(),
    });
    let params = IommuParams {
        id: IommuBounceConfig::ID.into(),
        memory: context.memory.clone(),
        msi: context.msi.clone(),
        engine,
        windows,
        poll: polls(config),
        rings: RING_FEATURES,
        // IOMMUFD maps no memory of devices.
        devices: (!config.platform.iommufd).then(|| context.bars.clone()),
        observer: Some(context.observer.clone()),
    };
    let (function, handle) = iommu::create(params).map_err(|error| VmError::Iommu(error.to_string()))?;
    for (address, mapper) in endpoints {
        handle
            .add_endpoint(address.endpoint_id(), mapper.behind(&handle))
            .map_err(|error| VmError::Iommu(format!("device at {address}: {error}")))?;
    }
    context.pci.add(IOMMU_ADDRESS, function)?;
    Ok(handle)
}

/// Whether a thread may poll for requests. Where it would take a CPU from a vCPU, it could keep that one waiting.
fn polls(config: &VmConfig) -> bool {
    let vcpus = usize::try_from(config.cpus.boot_vcpus).unwrap_or(usize::MAX);
    match config.platform.iommu_poll {
        IommuPoll::On => true,
        IommuPoll::Off => false,
        IommuPoll::Auto => std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > vcpus),
    }
}

fn window(bounce: &IommuBounceConfig, limits: &[MapperLimits]) -> Result<WindowConfig, VmError> {
    let aperture = common_limits::window_aperture(limits).ok_or_else(|| {
        ConfigError::new(
            IommuBounceConfig::OPTION,
            "the host's IOMMU has no room for bounce windows below 4G; leave it out",
        )
    })?;
    Ok(WindowConfig { aperture, budget: bounce.size, threshold: bounce.threshold.unwrap_or(0) })
}
