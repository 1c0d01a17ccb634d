// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Mappers of devices, before the virtio-iommu uses them.

use std::sync::Arc;

use devices::dma::TableMapper;
use devices::guest_visible::GuestVisibleMemory;
use devices::reclaim::PinningMapper;
use devices::vfio::VfioMapper;
use devices::vfio::user::UserMapper;
use devices::virtio::vhost_user::VhostUserMapper;
use devices::windows::WindowMemory;
use iommu_bounce::DmaMapper;

/// Mapper that no virtio-iommu uses yet.
pub(super) trait EndpointMapper: DmaMapper {
    /// Enables the mapper to map the chunks of `windows` and the guest-visible memory of `devices`. Called before the mapper is given to
    /// the virtio-iommu.
    fn connect(&self, windows: Option<&Arc<WindowMemory>>, devices: Option<&Arc<GuestVisibleMemory>>) {
        let _ = (windows, devices);
    }
}

/// This mapper needs neither argument of `connect`: VFIO maps windows and device memory by their addresses in this process, as it maps RAM.
impl EndpointMapper for VfioMapper {}

impl EndpointMapper for PinningMapper<VfioMapper> {}

impl EndpointMapper for UserMapper {
    fn connect(&self, windows: Option<&Arc<WindowMemory>>, devices: Option<&Arc<GuestVisibleMemory>>) {
        UserMapper::connect(self, windows, devices);
    }
}

impl EndpointMapper for VhostUserMapper {
    fn connect(&self, windows: Option<&Arc<WindowMemory>>, devices: Option<&Arc<GuestVisibleMemory>>) {
        VhostUserMapper::connect(self, windows, devices);
    }
}

impl EndpointMapper for TableMapper {
    fn connect(&self, windows: Option<&Arc<WindowMemory>>, devices: Option<&Arc<GuestVisibleMemory>>) {
        TableMapper::connect(self, windows, devices);
    }
}
