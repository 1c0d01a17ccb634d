// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-iommu on PCI: queues and configuration in front of the engine of `iommu_bounce`.

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
use crate::platform::{DeviceObserver, MemorySlots, MsiAllocator};
use crate::ram::Ram;
use crate::shown::ShownMemory;
use crate::sync::lock;
use crate::windows::{WindowError, WindowMemory, WindowMemoryConfig};

/// The memory behind bounce windows. The budget stands in [`EngineConfig::window`].
pub struct WindowRegion {
    /// Bytes of the shared memory region, the most that the budget can be raised to: a multiple of `chunk_size`.
    pub size: u64,
    /// Bytes per chunk, a power of two; 2 MiB is what the protocol expects.
    pub chunk_size: u64,
    /// Chunks are made of huge pages of 2 MiB.
    pub hugepages: bool,
    /// Where the guest's view of chunks is made.
    pub slots: Arc<dyn MemorySlots>,
}

/// What the device offers of the rings' optional parts (virtio 1.3, sections 2.7.5.3 and 2.7.10).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFeatures {
    /// `INDIRECT_DESC`: a request may have a table of descriptors of its own.
    pub indirect_desc: bool,
    /// `EVENT_IDX`: driver and device tell each other of which element they want to hear next.
    pub event_idx: bool,
}

/// What a virtio-iommu device is made of.
pub struct IommuParams {
    /// Name for logs and the API.
    pub id: String,
    /// Guest RAM: the queues lie in it, and only it can be mapped.
    pub memory: Arc<Ram>,
    /// Interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// The engine's set-up. `engine.window` goes with `windows`: both or neither.
    pub engine: EngineConfig,
    /// The memory behind bounce windows.
    pub windows: Option<WindowRegion>,
    /// What its queues can do.
    pub rings: RingFeatures,
    /// When requests come fast, a thread polls for them. It needs a CPU of the host besides those that run vCPUs, and
    /// gives it back when a request takes less than a thirty-second of the time until the next.
    pub poll: bool,
    /// The slots in which the guest sees devices' memory, if other devices are to be let at that.
    pub devices: Option<Arc<ShownMemory>>,
    /// Hosts map registers of devices for other devices: `MMIO` is offered.
    pub mmio: bool,
    /// Who is to know when the guest's driver activates and resets the device.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Why a virtio-iommu device could not be made.
#[derive(Debug, Error)]
pub enum IommuError {
    /// The engine's set-up breaks a rule.
    #[error("virtio-iommu: {0}")]
    Engine(#[from] ConfigError),
    /// The window memory's set-up breaks a rule, or the host refused it.
    #[error("virtio-iommu: window memory: {0}")]
    Windows(#[from] WindowError),
    /// The host gave no thread to poll with.
    #[error("virtio-iommu: starting its polling thread: {0}")]
    Thread(#[source] std::io::Error),
    /// The transport could not be made.
    #[error("virtio-iommu: {0}")]
    Transport(#[from] TransportError),
}

/// Makes a virtio-iommu device: the PCI function to put on the root bus, and the handle by which the VMM adds endpoints,
/// reads figures and changes the budget.
///
/// # Errors
/// An [`IommuError`] that names the field and its rule, or what the host refused.
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
        // Without the engine there are no mappers, and nothing is mapped.
        let revoke = move |gpa, len| engine.upgrade().is_none_or(|engine| lock(&engine).revoke_device_memory(gpa, len));
        devices.set_revoke(Box::new(revoke));
    }
    let device = VirtioIommu::new(engine.clone(), windows.clone(), rings, poll).map_err(IommuError::Thread)?;
    let device = Arc::new(device);
    let memory = DeviceMemory::all_ram(memory);
    // Notifications are served in the exit of the vCPU, whose driver spins for the answer.
    let params = VirtioPciParams { id, device: device.clone(), memory, msi, doorbells: None, observer };
    let function = Arc::new(VirtioPciDevice::new(params)?);
    let handle = IommuHandle::new(engine, device, (windows, devices), function.interrupt());
    Ok((function, Arc::new(handle)))
}
