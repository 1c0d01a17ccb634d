// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The VMM's side of a virtio-iommu device.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};

use iommu_bounce::{
    ConfigError, Counters, DmaMapper, DomainWindow, EndpointId, Engine, Fault, FaultReason, Histogram,
    Interrupt as Interruption, Permissions, Report, RestoreError, Translation,
};
use vm_memory::{GuestMemoryRegion, VolatileSlice};

use super::device::VirtioIommu;
use crate::dma::{FaultReporter, Stopped};
use crate::ram::RamRegion;
use crate::shown::ShownMemory;
use crate::sync::{lock, lock_soon};
use crate::virtio::Interrupt;
use crate::windows::WindowMemory;

/// What a virtio-iommu device is set to and what it holds, at one moment. How long things took, and figures per domain and
/// endpoint, are in the engine's [`Report`].
#[derive(Clone, Debug, Default)]
pub struct IommuStatus {
    /// The engine's totals.
    pub counters: Counters,
    /// Bytes of window memory that all domains may use.
    pub budget: u64,
    /// Advice to the driver: the size in bytes at or below which it should copy; 0 leaves it to the driver.
    pub threshold: u32,
    /// The most bytes of guest RAM that may be mapped; `None` without a limit.
    pub max_mapped_bytes: Option<u64>,
    /// Bytes of a chunk.
    pub chunk_size: u64,
    /// Bytes of window memory that the host has allocated, the stash included.
    pub held_window_bytes: u64,
    /// The windows of all domains.
    pub windows: Vec<DomainWindow>,
    /// Stalls: times without a CPU of the polling thread while requests came. The requests waited for that long at most.
    pub poll_stalls: Histogram,
}

/// A handle on a virtio-iommu device, for whoever runs the VM.
pub struct IommuHandle {
    engine: Arc<Mutex<Engine>>,
    device: Arc<VirtioIommu>,
    windows: Option<Arc<WindowMemory>>,
    devices: Option<Arc<ShownMemory>>,
    interrupt: Arc<dyn Interrupt>,
    interruption: Interruption,
}

impl IommuHandle {
    pub(super) fn new(
        engine: Arc<Mutex<Engine>>,
        device: Arc<VirtioIommu>,
        (windows, devices): (Option<Arc<WindowMemory>>, Option<Arc<ShownMemory>>),
        interrupt: Arc<dyn Interrupt>,
    ) -> Self {
        let interruption = lock(&engine).interrupt();
        Self { engine, device, windows, devices, interrupt, interruption }
    }

    /// Puts an endpoint behind the IOMMU: its DMA reaches only what the guest maps from then on.
    ///
    /// # Errors
    /// The ID is in use, or the host cannot translate what the configuration promises.
    pub fn add_endpoint(&self, id: EndpointId, mapper: Box<dyn DmaMapper>) -> Result<(), ConfigError> {
        lock(&self.engine).add_endpoint(id, mapper)
    }

    /// Has requests that take long be left undone, while somebody waits for vCPUs and for the device. They are served when the device goes
    /// on.
    pub fn interrupt(&self, wanted: bool) {
        self.interruption.want(wanted);
    }

    /// Lets the device's thread [poll](super::IommuParams::poll), or not.
    pub fn allow_polling(&self, allowed: bool) {
        self.device.allow_polling(allowed);
    }

    /// RAM comes: endpoints in bypass mode reach it from now on.
    ///
    /// # Errors
    /// The host does not map it for one of them. Then none reaches it.
    pub fn add_ram(&self, region: &RamRegion) -> Result<(), ConfigError> {
        lock(&self.engine).add_ram(region.start_addr().0, region.len())
    }

    /// RAM that was refused goes, once it is withdrawn: no endpoint reaches it any more, though its driver may have mapped it meanwhile.
    /// `false` if the host keeps something mapped: then the pages must stay.
    #[must_use]
    pub fn take_ram(&self, region: &RamRegion) -> bool {
        lock(&self.engine).take_ram(region.start_addr().0, region.len())
    }

    /// Takes an endpoint away: everything is unmapped for it. Returns its mapper.
    ///
    /// # Errors
    /// There is no such endpoint.
    pub fn remove_endpoint(&self, id: EndpointId) -> Result<Box<dyn DmaMapper>, ConfigError> {
        lock(&self.engine).remove_endpoint(id)
    }

    /// Translates an access of a device that the VMM emulates behind the IOMMU, and reports it to the driver if it is not
    /// allowed.
    ///
    /// # Errors
    /// The fault.
    pub fn translate(&self, endpoint: EndpointId, iova: u64, access: Permissions) -> Result<Translation, Fault> {
        let outcome = lock(&self.engine).translate(endpoint, iova, access);
        if outcome.is_err() {
            self.device.hand_over_faults();
        }
        outcome
    }

    /// Reports a fault of an endpoint's to the driver. `false` if it is dropped, which is counted: there is no such
    /// endpoint, or too many faults came already.
    pub fn report_fault(&self, fault: Fault) -> bool {
        let reported = lock(&self.engine).report_fault(fault);
        self.device.hand_over_faults();
        reported
    }

    /// The memory of bounce windows, if there are any.
    pub fn windows(&self) -> Option<&Arc<WindowMemory>> {
        self.windows.as_ref()
    }

    /// Slots that show devices' memory to the guest, if devices behind the virtio-iommu may reach it.
    pub fn devices(&self) -> Option<&Arc<ShownMemory>> {
        self.devices.as_ref()
    }

    /// Maps memory of devices that a restored state has mapped. To be called once the guest sees that memory again.
    ///
    /// # Errors
    /// A [`RestoreError`] that names the mapping.
    pub fn restore_device_memory(&self) -> Result<(), RestoreError> {
        lock(&self.engine).restore_device_memory()
    }

    /// Indices of the chunks that bounce windows have, in ascending order.
    pub fn window_chunks(&self) -> Vec<u32> {
        let mut chunks: Vec<u32> = lock(&self.engine).state().chunks().collect();
        chunks.sort_unstable();
        chunks
    }

    /// Calls `then` with the memory of a chunk of a bounce window, all of it; `None` if there is no such chunk. The device is
    /// paused, and no vCPU runs: nobody gives it back meanwhile.
    pub fn with_window_chunk<R>(&self, index: u32, then: impl FnOnce(VolatileSlice<'_>) -> R) -> Option<R> {
        self.windows.as_ref().filter(|windows| windows.is_backed(index))?.chunk(index).map(then)
    }

    /// First and last IOVA of the aperture of bounce windows, if the device has windows.
    pub fn window_aperture(&self) -> Option<(u64, u64)> {
        lock(&self.engine).window_aperture().map(RangeInclusive::into_inner)
    }

    /// The engine's figures, per domain and endpoint too, with latencies.
    pub fn engine_report(&self) -> Report {
        lock(&self.engine).report()
    }

    /// The engine's totals.
    pub fn counters(&self) -> Counters {
        lock(&self.engine).counters()
    }

    /// What the device is set to and what it holds: its windows first of all.
    pub fn status(&self) -> IommuStatus {
        let held_window_bytes = self.held_window_bytes();
        status_of(&lock(&self.engine), held_window_bytes, self.device.poll_stalls())
    }

    /// The same for who must not wait; `None` if somebody keeps what it is read from for more than some microseconds, such as
    /// for a mapping that the host takes long for.
    pub fn status_soon(&self) -> Option<IommuStatus> {
        let held_window_bytes = self.windows.as_ref().map_or(Some(0), |windows| windows.held_bytes_soon())?;
        let poll_stalls = self.device.poll_stalls_soon()?;
        Some(status_of(&*lock_soon(&self.engine)?, held_window_bytes, poll_stalls))
    }

    /// Bytes of window memory that the host has allocated, the stash included; 0 without bounce windows.
    pub fn held_window_bytes(&self) -> u64 {
        self.windows.as_ref().map_or(0, |windows| windows.held_bytes())
    }

    /// Changes the window memory that all domains may use, in bytes. The driver is told if it uses bounce windows.
    ///
    /// # Errors
    /// There are no bounce windows, or the region is smaller.
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

    /// Changes the size in bytes at or below which the driver is advised to copy; 0 leaves it to the driver, which is
    /// told if it uses bounce windows.
    ///
    /// # Errors
    /// There are no bounce windows.
    pub fn set_threshold(&self, bytes: u32) -> Result<(), ConfigError> {
        let notify = lock(&self.engine).set_threshold(bytes)?;
        self.interrupt.config_changed(notify);
        Ok(())
    }

    /// Changes the most bytes of guest RAM that may be mapped; `None` lifts the limit. The driver learns of it by the requests that
    /// are refused.
    ///
    /// # Errors
    /// It is 0.
    pub fn set_max_mapped_bytes(&self, bytes: Option<u64>) -> Result<(), ConfigError> {
        lock(&self.engine).set_max_mapped_bytes(bytes)
    }
}

impl FaultReporter for IommuHandle {
    fn report_stopped(&self, Stopped { endpoint, iova, access }: Stopped) {
        // The engine knows, and reports, whether the endpoint is in a domain at all.
        if self.translate(endpoint, iova, access).is_ok() {
            // It was mapped since.
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
        max_mapped_bytes: engine.max_mapped_bytes(),
        chunk_size: engine.chunk_size(),
        held_window_bytes,
        windows: engine.domain_windows(),
        poll_stalls,
    }
}
