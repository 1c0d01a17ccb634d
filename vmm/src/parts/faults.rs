// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Passes DMA faults, which are accesses that the virtio-iommu stopped, to the guest's driver. The faults come from devices whose DMA goes
//! through this process.

use std::sync::Arc;

use devices::dma::{FaultRelay, FaultReports, FaultSender, fault_relay};
use devices::virtio::iommu::IommuHandle;

use crate::error::VmError;

/// Path of fault reports. It is set up once a device needs it.
pub(super) struct FaultPath {
    sender: FaultSender,
    /// Holds the faults until the virtio-iommu is connected.
    relay: Option<FaultRelay>,
    /// Delivers the faults from then on.
    reports: Option<FaultReports>,
    needed: bool,
}

impl FaultPath {
    pub(super) fn new() -> Self {
        let (sender, relay) = fault_relay();
        Self { sender, relay: Some(relay), reports: None, needed: false }
    }

    /// Returns the sender of a device's faults.
    pub(super) fn sender(&mut self) -> FaultSender {
        self.needed = true;
        self.sender.clone()
    }

    /// Connects the faults to `iommu`, if a device may send any and they are not connected yet.
    pub(super) fn connect(&mut self, iommu: &Arc<IommuHandle>) -> Result<(), VmError> {
        let Some(relay) = self.relay.take_if(|_| self.needed) else { return Ok(()) };
        match relay.spawn(iommu.clone()) {
            Ok(reports) => {
                self.reports = Some(reports);
                Ok(())
            }
            Err(source) => {
                // The next device may succeed.
                *self = Self::new();
                Err(VmError::Device { what: "start the thread for device faults", source })
            }
        }
    }

    /// Ends the reports. They do not use the virtio-iommu any more.
    pub(super) fn disconnect(&mut self) {
        self.reports = None;
    }
}
