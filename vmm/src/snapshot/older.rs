// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fills in fields that snapshots of older versions lack.

use carom_api::IommuBounceConfig;
use serde::Deserialize;

use crate::vm_state::VmState;

/// Fills in a missing [`VmState::window_aperture`] from the virtio-iommu's saved state. The restore needs the aperture before it builds the
/// virtio-iommu.
pub(crate) fn fill_in_window_aperture(state: &mut VmState) {
    if state.window_aperture.is_none() {
        let iommu = state.functions.iter().find(|function| function.id == IommuBounceConfig::ID);
        // The aperture is in the state of the device, which is inside the state of the transport.
        let aperture = iommu.and_then(|iommu| iommu.state.payload.pointer("/device/payload/window/aperture"));
        state.window_aperture = aperture.and_then(|aperture| Deserialize::deserialize(aperture).ok());
    }
}
