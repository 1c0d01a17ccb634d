// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The way of accesses that the virtio-iommu stopped, from devices whose DMA goes through this process to the guest's driver.

use std::sync::Arc;

use devices::dma::{FaultRelay, FaultReports, FaultSender, fault_relay};
use devices::virtio::iommu::IommuHandle;

use crate::error::VmError;

/// A way that is there once a device needs it.
pub(super) struct FaultPath {
    sender: FaultSender,
    /// Until the virtio-iommu is at its end.
    relay: Option<FaultRelay>,
    /// From then on.
    reports: Option<FaultReports>,
    needed: bool,
}

impl FaultPath {
    pub(super) fn new() -> Self {
        let (sender, relay) = fault_relay();
        Self { sender, relay: Some(relay), reports: None, needed: false }
    }

    /// Where a device sends its faults.
    pub(super) fn sender(&mut self) -> FaultSender {
        self.needed = true;
        self.sender.clone()
    }

    /// Has faults come to `iommu`, if a device may send any and they do not yet.
    pub(super) fn connect(&mut self, iommu: &Arc<IommuHandle>) -> Result<(), VmError> {
        let Some(relay) = self.relay.take_if(|_| self.needed) else { return Ok(()) };
        match relay.spawn(iommu.clone()) {
            Ok(reports) => {
                self.reports = Some(reports);
                Ok(())
            }
            Err(source) => {
                // The next device may have more luck.
                *self = Self::new();
                Err(VmError::Device { what: "starting the thread for faults of devices", source })
            }
        }
    }

    /// Ends the reports. Nothing of them uses the virtio-iommu any more.
    pub(super) fn disconnect(&mut self) {
        self.reports = None;
    }
}
