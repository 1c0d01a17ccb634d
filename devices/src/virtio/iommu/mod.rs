// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-iommu on PCI. This module contains the queues and the device configuration. The engine of `iommu_bounce` serves the requests.

mod contention;
mod device;
mod events;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod handle;
mod pace;
mod poller;
mod queues;
mod ram;
mod requests;
mod stalls;
mod state;

#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex};

use iommu_bounce::{ChunkStore, ConfigError, Engine, EngineConfig};
use thiserror::Error;

pub use self::device::VirtioIommu;
pub use self::handle::{IommuHandle, IommuStatus};
pub use self::poller::POLL_ROLE;
pub use self::ram::RamView;
use super::{TransportError, VirtioPciDevice, VirtioPciParams};
use crate::dma::DeviceMemory;
use crate::guest_visible::GuestVisibleMemory;
use crate::platform::{DeviceObserver, MemorySlots, MsiAllocator};
use crate::ram::Ram;
use crate::sync::lock;
use crate::windows::{WindowError, WindowMemory, WindowMemoryConfig};

/// Memory region that contains the bounce windows. [`EngineConfig::window`] sets the budget.
pub struct WindowRegion {
    /// Size of the shared memory region in bytes, a multiple of `chunk_size`. The budget cannot exceed this size.
    pub size: u64,
    /// Size of a chunk in bytes, a power of two. The protocol expects 2 MiB.
    pub chunk_size: u64,
    /// True if chunks consist of huge pages of 2 MiB.
    pub hugepages: bool,
    /// Memory slots that make chunks visible to the guest.
    pub slots: Arc<dyn MemorySlots>,
}

/// Optional ring features that the device offers (virtio 1.3, sections 2.7.5.3 and 2.7.10).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFeatures {
    /// `INDIRECT_DESC`: a request may use an indirect descriptor table.
    pub indirect_desc: bool,
    /// `EVENT_IDX`: the driver and the device each state the ring index that triggers the next notification.
    pub event_idx: bool,
}

/// Parameters of a virtio-iommu device.
pub struct IommuParams {
    /// Name of the device in logs and the API.
    pub id: String,
    /// Guest RAM. The RAM contains the queues, and the driver can map the RAM for DMA of the endpoints.
    pub memory: Arc<Ram>,
    /// Allocator of interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Configuration of the engine. Set `engine.window` if and only if `windows` is set.
    pub engine: EngineConfig,
    /// Memory region that contains the bounce windows. `None` if the device has no bounce windows.
    pub windows: Option<WindowRegion>,
    /// Optional features of the queues.
    pub rings: RingFeatures,
    /// True if a thread polls for requests while requests arrive fast. The thread needs a host CPU in addition to the host CPUs that run
    /// vCPUs. The thread stops polling when a request takes less than 1/32 of the time between two requests.
    pub poll: bool,
    /// Memory slots with guest-visible device memory, if other devices may access this memory.
    pub devices: Option<Arc<GuestVisibleMemory>>,
    /// True if the host can map the registers of one device for DMA of another device. The virtio-iommu then offers the `MMIO` feature.
    pub mmio: bool,
    /// Observer that is notified when the guest's driver activates or resets the device.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Error while a virtio-iommu device is created.
#[derive(Debug, Error)]
pub enum IommuError {
    /// The configuration of the engine breaks a rule.
    #[error("{0}")]
    Engine(#[from] ConfigError),
    /// The configuration of the window memory breaks a rule, or the host cannot allocate the memory.
    #[error("window memory: {0}")]
    Windows(#[from] WindowError),
    /// The host cannot start the polling thread.
    #[error("cannot start the polling thread: {0}")]
    Thread(#[source] std::io::Error),
    /// The PCI function of the device cannot be created.
    #[error("{0}")]
    Transport(#[from] TransportError),
}

/// Creates a virtio-iommu device. Returns the PCI function for the root bus, and the handle for the VMM. With the handle, the VMM adds
/// endpoints, reads counters and changes the budget.
///
/// # Errors
/// The configuration breaks a rule, or an operation of the host fails. The [`IommuError`] states the reason.
pub fn create(params: IommuParams) -> Result<(Arc<VirtioPciDevice>, Arc<IommuHandle>), IommuError> {
    let IommuParams { id, memory, msi, engine: config, windows, rings, poll, devices, mmio, observer } = params;
    let budget = config.window.as_ref().map_or(0, |window| window.budget);
    let windows = windows
        .map(|WindowRegion { size, chunk_size, hugepages, slots }| {
            WindowMemory::new(&WindowMemoryConfig { region_size: size, chunk_size, budget, hugepages, slots })
        })
        .transpose()?
        .map(Arc::new);
    let store = windows.as_ref().map(|windows| Box::new(windows.store()) as Box<dyn ChunkStore>);
    let ram = RamView::new(memory.clone(), devices.clone(), mmio);
    let engine = Arc::new(Mutex::new(Engine::new(config, Arc::new(ram), store)?));
    if let Some(devices) = &devices {
        let engine = Arc::downgrade(&engine);
        // If the engine no longer exists, no endpoint has a mapper, so nothing is mapped.
        let revoke = move |gpa, len| engine.upgrade().is_none_or(|engine| lock(&engine).revoke_device_memory(gpa, len));
        devices.set_revoke(Box::new(revoke));
    }
    let device = VirtioIommu::new(engine.clone(), windows.clone(), rings, poll).map_err(IommuError::Thread)?;
    let device = Arc::new(device);
    let memory = DeviceMemory::all_ram(memory);
    // Do not use doorbells. The vCPU thread that exits for a notification serves the requests, because the guest's driver spins until the
    // answer arrives.
    let params = VirtioPciParams { id, device: device.clone(), memory, msi, doorbells: None, observer };
    let function = Arc::new(VirtioPciDevice::new(params)?);
    let handle = IommuHandle::new(engine, device, (windows, devices), function.interrupt());
    Ok((function, Arc::new(handle)))
}
