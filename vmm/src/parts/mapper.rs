// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The address spaces of devices on their way behind the virtio-iommu.

use devices::dma::TableMapper;
use devices::reclaim::PinningMapper;
use devices::vfio::VfioMapper;
use devices::vfio::user::UserMapper;
use devices::virtio::iommu::IommuHandle;
use devices::virtio::vhost_user::VhostUserMapper;
use iommu_bounce::DmaMapper;

/// A mapper that no virtio-iommu has yet.
pub(super) trait EndpointMapper: DmaMapper {
    /// Learns of the virtio-iommu that it goes to, before it does.
    fn connect(&self, iommu: &IommuHandle) {
        let _ = iommu;
    }
}

/// The host maps windows as it maps RAM.
impl EndpointMapper for VfioMapper {}

impl EndpointMapper for PinningMapper<VfioMapper> {}

impl EndpointMapper for UserMapper {
    fn connect(&self, iommu: &IommuHandle) {
        UserMapper::connect(self, iommu);
    }
}

impl EndpointMapper for VhostUserMapper {
    fn connect(&self, iommu: &IommuHandle) {
        VhostUserMapper::connect(self, iommu.windows(), iommu.devices());
    }
}

impl EndpointMapper for TableMapper {
    fn connect(&self, iommu: &IommuHandle) {
        TableMapper::connect(self, iommu.windows(), iommu.devices());
    }
}
