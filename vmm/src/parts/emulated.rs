// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices that this process emulates: their access to guest memory, and their connections to the rest of the VM.

use std::error::Error;
use std::io;
use std::sync::Arc;

use carom_api::kinds::KindConfig;
use devices::counters::Counter;
use devices::dma::{DeviceMemory, DmaTable, TableMapper};
use devices::platform::{DeviceObserver, Doorbells, MsiAllocator};
use devices::virtio::VirtioPciDevice;

use super::mapper::EndpointMapper;
use super::{Built, Part, Site, name};
use crate::error::VmError;

/// Part whose counters a closure returns. Its other methods are the defaults of [`Part`].
pub(super) struct Counting<F>(pub(super) F);

impl<F: Fn() -> Vec<Counter> + Send> Part for Counting<F> {
    fn counters(&self) -> Vec<Counter> {
        (self.0)()
    }
}

/// Connections between an emulated device and its VM.
pub(super) struct Wiring {
    pub(super) id: String,
    /// Memory that the device can access.
    pub(super) memory: DeviceMemory,
    pub(super) msi: Arc<dyn MsiAllocator>,
    pub(super) doorbells: Option<Arc<dyn Doorbells>>,
    pub(super) observer: Option<Arc<dyn DeviceObserver>>,
}

impl Site<'_> {
    /// Builds the part of `config`. `create` makes the device from its connections to the VM. A device behind the virtio-iommu can access
    /// only memory that is mapped for the device. Its DMA faults are reported to the guest. Any other device can access all RAM.
    pub(super) fn emulate<P: Part + 'static>(
        &mut self,
        config: &dyn KindConfig,
        create: impl FnOnce(Wiring) -> Result<(Arc<VirtioPciDevice>, P), VmError>,
    ) -> Result<Built, VmError> {
        let (id, ram) = (name(config), self.shared.context.memory.clone());
        let (memory, mapper) = if config.is_behind_iommu() {
            let faults = (self.address.endpoint_id(), self.shared.faults.sender());
            let table = Arc::new(DmaTable::new(id, ram, Some(faults)));
            let mapper: Box<dyn EndpointMapper> = Box::new(TableMapper::new(table.clone()));
            (DeviceMemory::mapped(table), Some(mapper))
        } else {
            (DeviceMemory::all_ram(ram), None)
        };
        let context = &self.shared.context;
        let (function, part) = create(Wiring {
            id: id.into(),
            memory,
            msi: context.msi.clone(),
            doorbells: Some(context.doorbells.clone()),
            observer: Some(context.observer.clone()),
        })
        .map_err(|error| error.of_device(id))?;
        Ok(Built { function, part: Box::new(part), mapper })
    }
}

/// Returns a function that turns a device's error into a [`VmError`]. `what` is the operation that failed, for example "create a disk".
pub(super) fn failed<E: Into<Box<dyn Error + Send + Sync>>>(what: &'static str) -> impl FnOnce(E) -> VmError {
    move |error| VmError::Device { what, source: io::Error::other(error) }
}
