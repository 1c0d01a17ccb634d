// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What an emulated device sees of the guest's memory.

use std::sync::Arc;

use devices::dma::{DeviceMemory, DmaTable, TableMapper};

use super::Site;
use super::mapper::EndpointMapper;

/// The memory of a device that this process emulates.
pub(super) struct Reach {
    /// What the device does its DMA by.
    pub(super) memory: DeviceMemory,
    /// Its address space, if it is behind the virtio-iommu.
    pub(super) mapper: Option<Box<dyn EndpointMapper>>,
}

impl Reach {
    /// Behind the virtio-iommu, the device `id` sees what is mapped for it, and its faults go to the guest; otherwise it sees all RAM.
    pub(super) fn new(id: &str, behind_iommu: bool, site: &mut Site<'_>) -> Self {
        let ram = site.shared.context.memory.clone();
        if !behind_iommu {
            return Self { memory: DeviceMemory::all_ram(ram), mapper: None };
        }
        let faults = (site.address.endpoint_id(), site.shared.faults.sender());
        let table = Arc::new(DmaTable::new(id, ram, Some(faults)));
        Self { memory: DeviceMemory::mapped(table.clone()), mapper: Some(Box::new(TableMapper::new(table))) }
    }
}
