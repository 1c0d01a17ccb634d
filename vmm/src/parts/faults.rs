// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Delivery of DMA faults to the guest's virtio-iommu driver. A DMA fault is a device's memory access that the virtio-iommu rejected. Only
//! devices whose DMA passes through this process report DMA faults.

use std::sync::Arc;

use devices::dma::{FaultRelay, FaultReports, FaultSender, fault_relay};
use devices::virtio::iommu::IommuHandle;

use crate::error::VmError;

/// Path of fault reports from devices to the virtio-iommu. The delivery thread starts only after a device has asked for a sender.
pub(super) struct FaultPath {
    sender: FaultSender,
    /// Relay that holds the faults until the virtio-iommu is connected.
    relay: Option<FaultRelay>,
    /// Handle of the thread that delivers the faults once the virtio-iommu is connected.
    reports: Option<FaultReports>,
    needed: bool,
}

impl FaultPath {
    pub(super) fn new() -> Self {
        let (sender, relay) = fault_relay();
        Self { sender, relay: Some(relay), reports: None, needed: false }
    }

    /// Returns a sender for the faults of a device.
    pub(super) fn sender(&mut self) -> FaultSender {
        self.needed = true;
        self.sender.clone()
    }

    /// Connects the relay to `iommu`, if a device may send faults and the relay is not connected yet.
    pub(super) fn connect(&mut self, iommu: &Arc<IommuHandle>) -> Result<(), VmError> {
        let Some(relay) = self.relay.take_if(|_| self.needed) else { return Ok(()) };
        match relay.spawn(iommu.clone()) {
            Ok(reports) => {
                self.reports = Some(reports);
                Ok(())
            }
            Err(source) => {
                // The failed start has dropped the relay. Create a new relay, because the thread may start successfully for the next
                // device.
                *self = Self::new();
                Err(VmError::Device { what: "start the thread for device faults", source })
            }
        }
    }

    /// Ends the delivery of faults. Afterwards the delivery thread does not use the virtio-iommu any more.
    pub(super) fn disconnect(&mut self) {
        self.reports = None;
    }
}
