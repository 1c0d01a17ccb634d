// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which device is behind which endpoint, for address spaces among which devices can move.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, Weak};

use iommu_bounce::EndpointId;

use super::dma_space::DmaSpace;
use crate::sync::lock;

/// A device that can change its address space while it runs.
pub(crate) trait Attachable: Send + Sync {
    /// Puts the device in `space` and takes it out of the one where it was, in one step. On error it stays there.
    fn attach(&self, space: &DmaSpace) -> io::Result<()>;
}

/// The devices behind the endpoints of one IOMMUFD. Clones are the same one. It keeps no device open.
#[derive(Clone, Default)]
pub(crate) struct EndpointDevices(Arc<Mutex<BTreeMap<EndpointId, Weak<dyn Attachable>>>>);

impl EndpointDevices {
    /// `device` is behind `endpoint` from now on.
    pub(crate) fn insert(&self, endpoint: EndpointId, device: Weak<dyn Attachable>) {
        lock(&self.0).insert(endpoint, device);
    }

    /// Puts the device behind `endpoint` in `space`. On error it stays where it is.
    pub(crate) fn attach(&self, endpoint: EndpointId, space: &DmaSpace) -> io::Result<()> {
        let device = lock(&self.0).get(&endpoint).and_then(Weak::upgrade);
        let gone = || io::Error::new(io::ErrorKind::NotFound, format!("endpoint {endpoint:#x} has no open device"));
        device.ok_or_else(gone)?.attach(space)
    }
}
