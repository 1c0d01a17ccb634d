// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interface through which the VMM uses a virtio-iommu device.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};

use iommu_bounce::{
    ConfigError, Counters, DmaMapper, DomainWindow, EndpointId, Engine, Fault, FaultReason, Histogram,
    Interrupt as Interruption, Permissions, Report, RestoreError, Translation,
};
use vm_memory::{GuestMemoryRegion, VolatileSlice};

use super::device::VirtioIommu;
use crate::dma::{FaultReporter, Stopped};
use crate::guest_visible::GuestVisibleMemory;
use crate::ram::RamRegion;
use crate::sync::{lock, lock_soon};
use crate::virtio::Interrupt;
use crate::windows::WindowMemory;

/// Settings and current usage of a virtio-iommu device. Latencies, and counters per domain and per endpoint, are in the engine's
/// [`Report`].
#[derive(Clone, Debug, Default)]
pub struct IommuStatus {
    /// Counters of the engine, for all domains and endpoints together.
    pub counters: Counters,
    /// Maximum window memory of all domains together, in bytes.
    pub budget: u64,
    /// Advised maximum size of bounced DMA, in bytes. If the value is 0, the driver chooses the maximum size.
    pub threshold: u32,
    /// The same for DMA that devices write. 0 stands for `threshold`.
    pub threshold_write: u32,
    /// Maximum number of bytes of guest RAM that may be mapped. `None` means no limit.
    pub max_mapped_bytes: Option<u64>,
    /// Size of a chunk in bytes.
    pub chunk_size: u64,
    /// Number of bytes of window memory that the host has allocated, including chunks that are allocated ahead of requests.
    pub held_window_bytes: u64,
    /// Windows of all domains.
    pub windows: Vec<DomainWindow>,
    /// Histogram of stalls. A stall is the time that a request waited because the polling thread had no CPU. The exact time is unknown, so
    /// each value is the maximum time that a request may have waited.
    pub poll_stalls: Histogram,
}

/// Handle of a virtio-iommu device, for the VMM.
pub struct IommuHandle {
    engine: Arc<Mutex<Engine>>,
    device: Arc<VirtioIommu>,
    windows: Option<Arc<WindowMemory>>,
    devices: Option<Arc<GuestVisibleMemory>>,
    interrupt: Arc<dyn Interrupt>,
    interruption: Interruption,
}

impl IommuHandle {
    pub(super) fn new(
        engine: Arc<Mutex<Engine>>,
        device: Arc<VirtioIommu>,
        (windows, devices): (Option<Arc<WindowMemory>>, Option<Arc<GuestVisibleMemory>>),
        interrupt: Arc<dyn Interrupt>,
    ) -> Self {
        let interruption = lock(&engine).interrupt();
        Self { engine, device, windows, devices, interrupt, interruption }
    }

    /// Puts an endpoint behind the IOMMU. From then on, the endpoint's DMA can access only memory that the guest maps for the endpoint. In
    /// bypass mode, the DMA can access all guest RAM.
    ///
    /// # Errors
    /// The ID is in use, or the host does not support the page size, the IOVAs or the bypass that the device configuration offers.
    pub fn add_endpoint(&self, id: EndpointId, mapper: Box<dyn DmaMapper>) -> Result<(), ConfigError> {
        lock(&self.engine).add_endpoint(id, mapper)
    }

    /// Turns the interruption of long requests on or off. The VMM turns the interruption on while a thread waits for vCPUs or for the
    /// device. The device serves an interrupted request when the device is resumed.
    pub fn interrupt(&self, wanted: bool) {
        self.interruption.want(wanted);
    }

    /// Returns the device, for tests of its parts.
    #[cfg(test)]
    pub(super) fn device(&self) -> &VirtioIommu {
        &self.device
    }

    /// Allows or forbids the polling thread to [poll](super::IommuParams::poll).
    pub fn allow_polling(&self, allowed: bool) {
        self.device.allow_polling(allowed);
    }

    /// Maps a new region of guest RAM for all endpoints in bypass mode.
    ///
    /// # Errors
    /// The host cannot map the RAM for one of these endpoints. The RAM is then mapped for no endpoint.
    pub fn add_ram(&self, region: &RamRegion) -> Result<(), ConfigError> {
        lock(&self.engine).add_ram(region.start_addr().0, region.len())
    }

    /// Unmaps a region of RAM for all endpoints. Call this function after an attempt to add the region has failed and the region was
    /// removed from the guest. The driver may have mapped parts of the region before the removal.
    ///
    /// Returns false if the host keeps part of the RAM mapped. The caller must then keep the pages.
    #[must_use]
    pub fn take_ram(&self, region: &RamRegion) -> bool {
        lock(&self.engine).take_ram(region.start_addr().0, region.len())
    }

    /// Removes an endpoint and all mappings of the endpoint. Returns the endpoint's mapper.
    ///
    /// # Errors
    /// The endpoint does not exist.
    pub fn remove_endpoint(&self, id: EndpointId) -> Result<Box<dyn DmaMapper>, ConfigError> {
        lock(&self.engine).remove_endpoint(id)
    }

    /// Translates an access of an emulated device behind the IOMMU. If no mapping allows the access, reports a fault to the driver.
    ///
    /// # Errors
    /// No mapping allows the access. The error is the reported fault.
    pub fn translate(&self, endpoint: EndpointId, iova: u64, access: Permissions) -> Result<Translation, Fault> {
        let outcome = lock(&self.engine).translate(endpoint, iova, access);
        if outcome.is_err() {
            self.device.hand_over_faults();
        }
        outcome
    }

    /// Reports a fault of an endpoint to the driver. Returns false if the fault is dropped, because the endpoint does not exist or too many
    /// faults were reported. Dropped faults are counted.
    pub fn report_fault(&self, fault: Fault) -> bool {
        let reported = lock(&self.engine).report_fault(fault);
        self.device.hand_over_faults();
        reported
    }

    /// Returns the memory of bounce windows, if the device has windows.
    pub fn windows(&self) -> Option<&Arc<WindowMemory>> {
        self.windows.as_ref()
    }

    /// Returns the slots with guest-visible device memory, if devices behind the virtio-iommu may access this memory.
    pub fn devices(&self) -> Option<&Arc<GuestVisibleMemory>> {
        self.devices.as_ref()
    }

    /// Restores the mappings of device memory from the saved state. Call this function after the device's `restore`, when the device memory
    /// is visible to the guest again.
    ///
    /// # Errors
    /// A mapping cannot be restored. The [`RestoreError`] names the mapping.
    pub fn restore_device_memory(&self) -> Result<(), RestoreError> {
        lock(&self.engine).restore_device_memory()
    }

    /// Returns the indices of the chunks in bounce windows, in ascending order.
    pub fn window_chunks(&self) -> Vec<u32> {
        let mut chunks: Vec<u32> = lock(&self.engine).state().chunks().collect();
        chunks.sort_unstable();
        chunks
    }

    /// Calls `then` with the whole memory of a window chunk. Returns `None` if the chunk does not exist. The caller must have paused the
    /// device and all vCPUs, so that the chunk is not freed during the call.
    pub fn with_window_chunk<R>(&self, index: u32, then: impl FnOnce(VolatileSlice<'_>) -> R) -> Option<R> {
        self.windows.as_ref().filter(|windows| windows.is_backed(index))?.chunk(index).map(then)
    }

    /// Returns the first and last IOVA of the aperture of bounce windows, if the device has windows.
    pub fn window_aperture(&self) -> Option<(u64, u64)> {
        lock(&self.engine).window_aperture().map(RangeInclusive::into_inner)
    }

    /// Returns the engine's counters and latencies, and the counters per domain and per endpoint.
    pub fn engine_report(&self) -> Report {
        lock(&self.engine).report()
    }

    /// Returns the engine's counters, for all domains and endpoints together.
    pub fn counters(&self) -> Counters {
        lock(&self.engine).counters()
    }

    /// Returns the settings and the current usage of the device.
    pub fn status(&self) -> IommuStatus {
        let held_window_bytes = self.held_window_bytes();
        status_of(&lock(&self.engine), held_window_bytes, self.device.poll_stalls())
    }

    /// Returns the status, for a thread that must not sleep. Returns `None` if another thread holds one of the locks for more than a few
    /// microseconds, for example while the host maps memory.
    pub fn status_soon(&self) -> Option<IommuStatus> {
        let held_window_bytes = self.windows.as_ref().map_or(Some(0), |windows| windows.held_bytes_soon())?;
        let poll_stalls = self.device.poll_stalls_soon()?;
        Some(status_of(&*lock_soon(&self.engine)?, held_window_bytes, poll_stalls))
    }

    /// Returns the number of bytes of window memory that the host has allocated, including chunks that are allocated ahead of requests.
    /// Returns 0 without bounce windows.
    pub fn held_window_bytes(&self) -> u64 {
        self.windows.as_ref().map_or(0, |windows| windows.held_bytes())
    }

    /// Changes the maximum window memory of all domains together, in bytes. If the driver uses bounce windows, notifies the driver.
    ///
    /// # Errors
    /// The device has no bounce windows, or the memory region of the windows is smaller than `bytes`.
    pub fn set_budget(&self, bytes: u64) -> Result<(), ConfigError> {
        let mut engine = lock(&self.engine);
        let notify = engine.set_budget(bytes)?;
        if let Some(windows) = &self.windows {
            windows.set_budget(bytes);
        }
        drop(engine);
        self.interrupt.config_changed(notify);
        Ok(())
    }

    /// Changes the advised maximum size of bounced DMA, in bytes. If `bytes` is 0, the driver chooses the maximum size. If the driver uses
    /// bounce windows, notifies the driver.
    ///
    /// # Errors
    /// The device has no bounce windows.
    pub fn set_threshold(&self, bytes: u32) -> Result<(), ConfigError> {
        let notify = lock(&self.engine).set_threshold(bytes)?;
        self.interrupt.config_changed(notify);
        Ok(())
    }

    /// Changes the advised maximum size of bounced DMA that devices write, in bytes. 0 stands for the size of
    /// [`set_threshold`](Self::set_threshold). If the driver uses bounce windows, notifies the driver.
    ///
    /// # Errors
    /// The device has no bounce windows.
    pub fn set_threshold_write(&self, bytes: u32) -> Result<(), ConfigError> {
        let notify = lock(&self.engine).set_threshold_write(bytes)?;
        self.interrupt.config_changed(notify);
        Ok(())
    }

    /// Changes the maximum number of bytes of guest RAM that may be mapped. `None` removes the limit. The driver is not notified. A MAP
    /// request that exceeds the limit fails.
    ///
    /// # Errors
    /// The limit is 0.
    pub fn set_max_mapped_bytes(&self, bytes: Option<u64>) -> Result<(), ConfigError> {
        lock(&self.engine).set_max_mapped_bytes(bytes)
    }
}

impl FaultReporter for IommuHandle {
    fn report_stopped(&self, Stopped { endpoint, iova, access }: Stopped) {
        // If the access still fails, `translate` reports the fault with its exact reason.
        if self.translate(endpoint, iova, access).is_ok() {
            // The guest has mapped the IOVA since the failed access. Report the failed access as a missing mapping.
            self.report_fault(Fault { reason: FaultReason::Mapping, endpoint, address: Some(iova), access });
        }
    }

    fn count_lost_faults(&self, count: u64) {
        lock(&self.engine).count_lost_faults(count);
    }
}

fn status_of(engine: &Engine, held_window_bytes: u64, poll_stalls: Histogram) -> IommuStatus {
    IommuStatus {
        counters: engine.counters(),
        budget: engine.budget(),
        threshold: engine.threshold(),
        threshold_write: engine.threshold_write(),
        max_mapped_bytes: engine.max_mapped_bytes(),
        chunk_size: engine.chunk_size(),
        held_window_bytes,
        windows: engine.domain_windows(),
        poll_stalls,
    }
}
