// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of the transport.

use serde::{Deserialize, Serialize};

use super::common::CommonState;
use super::interrupts::InterruptsState;
use crate::pci::ConfigState;
use crate::state::DeviceState;

/// Kind and version of the state of a virtio device on PCI.
pub(super) const STATE: (&str, u32) = ("virtio-pci", 1);

/// State of a virtio device on PCI.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TransportState {
    pub(super) config: ConfigState,
    pub(super) interrupts: InterruptsState,
    pub(super) common: CommonState,
    /// The device's own state.
    pub(super) device: DeviceState,
}
