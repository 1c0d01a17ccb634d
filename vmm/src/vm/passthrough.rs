// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices of the host in the VM, and the virtio-iommu in front of them.

use std::sync::Arc;

use devices::pci::{PciAddress, PciRoot};
use devices::platform::{MemorySlots, MsiAllocator};
use devices::vfio::{DmaSpace, GuestRamMapping, HostIommu, VfioMapper, VfioPciDevice, map_guest_ram};
use devices::virtio::iommu::{self, IommuHandle, IommuParams, WindowRegion};
use iommu_bounce::{DmaMapper, EngineConfig, MapperLimits, WindowConfig};
use vfio_ioctls::VfioDeviceFd;
use vm_memory::GuestMemoryMmap;

use super::{VmError, promise};
use crate::acpi;
use crate::config::{CHUNK_SIZE, IommuBounceConfig, IommuPoll, VmConfig};
use crate::kvm::{KvmVm, create_vfio_device};
use crate::layout::MSI_WINDOW;

/// Where the virtio-iommu sits.
pub(super) const IOMMU_ADDRESS: PciAddress = PciAddress::on_root_bus(1);
/// Device number of the first passthrough device; the others follow.
const FIRST_DEVICE: u8 = 2;

/// What devices are connected to.
pub(super) struct Surroundings<'a> {
    pub(super) kvm: &'a KvmVm,
    pub(super) memory: &'a Arc<GuestMemoryMmap>,
    pub(super) slots: Arc<dyn MemorySlots>,
    pub(super) msi: Arc<dyn MsiAllocator>,
    pub(super) pci: &'a Arc<PciRoot>,
}

/// Where each of the configuration's devices sits, in order.
pub(super) fn addresses(config: &VmConfig) -> Vec<PciAddress> {
    (FIRST_DEVICE..32).map(PciAddress::on_root_bus).take(config.devices.len()).collect()
}

/// What passthrough leaves for the VM to keep.
pub(super) struct Passthrough {
    /// The virtio-iommu, if there is one.
    pub(super) iommu: Option<Arc<IommuHandle>>,
    /// RAM mapped for the devices that are not behind it.
    pub(super) ram: Option<GuestRamMapping>,
}

/// Opens all devices, and puts them and the virtio-iommu on the root bus.
pub(super) fn add_devices(
    config: &VmConfig,
    machine: &acpi::Machine,
    around: &Surroundings<'_>,
) -> Result<Passthrough, VmError> {
    if config.devices.is_empty() {
        return Ok(Passthrough { iommu: None, ram: None });
    }
    let kvm_vfio = VfioDeviceFd::new_from_kvm(create_vfio_device(&around.kvm.fd)?);
    let host = open_host_iommu(config, Arc::new(kvm_vfio))?;
    let mut ram = None;
    let mut shared: Option<DmaSpace> = None;
    let mut endpoints = Vec::new();
    for (index, (device, address)) in config.devices.iter().zip(addresses(config)).enumerate() {
        let fail = |source| VmError::Passthrough { path: device.path.display().to_string(), source };
        let space = match &shared {
            Some(space) if !device.iommu => space.clone(),
            _ => host.new_space().map_err(fail)?,
        };
        let id = device.id.clone().unwrap_or_else(|| format!("_vfio{index}"));
        let function =
            VfioPciDevice::open(&id, &device.path, &space, around.msi.clone(), around.slots.clone()).map_err(fail)?;
        if device.iommu {
            let mapper = host.mapper(space, address.endpoint_id(), &function, around.memory.clone()).map_err(fail)?;
            endpoints.push((address, mapper));
        } else if ram.is_none() {
            ram = Some(map_guest_ram(&space, around.memory).map_err(fail)?);
            shared = Some(space);
        }
        around.pci.add(address, Arc::new(function))?;
    }
    let iommu = machine.iommu.is_some().then(|| add_iommu(config, endpoints, around)).transpose()?;
    Ok(Passthrough { iommu, ram })
}

fn open_host_iommu(config: &VmConfig, kvm_vfio: Arc<VfioDeviceFd>) -> Result<HostIommu, VmError> {
    if !config.platform.iommufd {
        return Ok(HostIommu::containers(Some(kvm_vfio)));
    }
    HostIommu::iommufd(Some(kvm_vfio)).map_err(|source| VmError::Platform { source })
}

/// Makes the virtio-iommu for `endpoints`: it promises the guest what all of their mappers can do.
fn add_iommu(
    config: &VmConfig,
    endpoints: Vec<(PciAddress, VfioMapper)>,
    around: &Surroundings<'_>,
) -> Result<Arc<IommuHandle>, VmError> {
    let limits: Vec<MapperLimits> = endpoints.iter().map(|(_, mapper)| mapper.limits()).collect();
    let bounce = config.iommu_bounce.as_ref();
    let engine = EngineConfig {
        page_size_mask: promise::page_size_mask(&limits),
        input_range: promise::input_range(&limits),
        msi_window: MSI_WINDOW,
        window: bounce.map(|bounce| window(bounce, &limits)).transpose()?,
        ..Default::default()
    };
    let windows = bounce.map(|bounce| WindowRegion {
        size: bounce.max,
        chunk_size: CHUNK_SIZE,
        hugepages: bounce.hugepages,
        slots: around.slots.clone(),
    });
    let params = IommuParams {
        id: super::IOMMU_ID.into(),
        memory: around.memory.clone(),
        msi: around.msi.clone(),
        engine,
        windows,
        poll: polls(config),
    };
    let (function, handle) = iommu::create(params).map_err(|error| VmError::Iommu(error.to_string()))?;
    for (address, mapper) in endpoints {
        handle
            .add_endpoint(address.endpoint_id(), Box::new(mapper))
            .map_err(|error| VmError::Iommu(format!("device at {address}: {error}")))?;
    }
    around.pci.add(IOMMU_ADDRESS, function)?;
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
    let aperture = promise::window_aperture(limits).ok_or_else(|| {
        VmError::Iommu("the host's IOMMU has no room for bounce windows below 4G; leave --iommu-bounce out".to_string())
    })?;
    Ok(WindowConfig { aperture, budget: bounce.size, threshold: bounce.threshold.unwrap_or(0) })
}
