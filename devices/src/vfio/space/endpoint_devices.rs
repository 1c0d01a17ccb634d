// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! List of endpoints with their devices. With IOMMUFD, the engine moves endpoints to other address spaces while their devices run.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, Weak};

use iommu_bounce::EndpointId;

use super::dma_space::DmaSpace;
use crate::sync::lock;

/// A device that can be attached to another address space while it runs.
pub(crate) trait Attachable: Send + Sync {
    /// Attaches the device to `space` and detaches it from its old address space, in one step. On error the device stays in the
    /// old address space.
    fn attach(&self, space: &DmaSpace) -> io::Result<()>;
}

/// Devices that use one IOMMUFD, by endpoint. Clones share one list, which keeps no device open.
#[derive(Clone, Default)]
pub(crate) struct EndpointDevices(Arc<Mutex<BTreeMap<EndpointId, Weak<dyn Attachable>>>>);

impl EndpointDevices {
    /// Registers `device` as the device of `endpoint`.
    pub(crate) fn insert(&self, endpoint: EndpointId, device: Weak<dyn Attachable>) {
        lock(&self.0).insert(endpoint, device);
    }

    /// Attaches the device of `endpoint` to `space`. On error the device stays in its address space.
    pub(crate) fn attach(&self, endpoint: EndpointId, space: &DmaSpace) -> io::Result<()> {
        let device = lock(&self.0).get(&endpoint).and_then(Weak::upgrade);
        let gone = || io::Error::new(io::ErrorKind::NotFound, format!("endpoint {endpoint:#x} has no open device"));
        device.ok_or_else(gone)?.attach(space)
    }
}
