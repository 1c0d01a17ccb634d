// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Notifications that reach a device's thread without an exit of the vCPU to the VMM.
//!
//! The host kernel writes an eventfd for each guest write to a queue's address in the notification BAR. The eventfds are connected only
//! while the device serves a driver, the device may use the bus, and the BAR is decoded. If one of these conditions is not met, the vCPU
//! exits to the VMM, and the VMM ignores the notification.

use std::sync::{Arc, Mutex};

use log::warn;

use super::layout::NOTIFY_MULTIPLIER;
use crate::platform::{Doorbells, Space};
use crate::sync::lock;
use crate::virtio::VirtioDevice;

/// Doorbells of one device.
pub(super) struct QueueDoorbells {
    platform: Option<Arc<dyn Doorbells>>,
    place: Mutex<Place>,
}

#[derive(Default)]
struct Place {
    /// Address of the notification BAR on the bus, or `None` while the BAR is not on the bus.
    bar: Option<u64>,
    /// Address of the BAR for which the doorbells are connected.
    listening: Option<u64>,
}

impl QueueDoorbells {
    /// Returns doorbells that are not connected yet. Without `platform`, [`Self::update`] never connects the doorbells.
    pub(super) fn new(platform: Option<Arc<dyn Doorbells>>) -> Self {
        Self { platform, place: Mutex::default() }
    }

    /// Sets the address of the notification BAR on the bus. `None` means that the BAR is not on the bus.
    pub(super) fn set_bar(&self, address: Option<u64>) {
        lock(&self.place).bar = address;
    }

    /// Connects the doorbells at the BAR's address, if the device serves a driver (`serves`) and the BAR is decoded at this address
    /// (`decoded`). Otherwise disconnects the doorbells.
    pub(super) fn update(&self, device: &dyn VirtioDevice, serves: bool, decoded: Option<u64>) {
        let Some(platform) = &self.platform else { return };
        let mut place = lock(&self.place);
        let wanted = place.bar.filter(|bar| serves && decoded == Some(*bar));
        if wanted == place.listening {
            return;
        }
        let queues = u16::try_from(device.queue_sizes().len()).unwrap_or(u16::MAX);
        let bells = |base: u64| {
            (0..queues).filter_map(move |queue| {
                Some((base + u64::from(queue) * u64::from(NOTIFY_MULTIPLIER), device.doorbell(queue)?))
            })
        };
        for (address, bell) in place.listening.take().into_iter().flat_map(bells) {
            if let Err(error) = platform.disconnect(Space::Port, address, bell) {
                warn!("cannot disconnect the virtio doorbell at port {address:#x}: {error}");
            }
        }
        for (address, bell) in wanted.into_iter().flat_map(bells) {
            if let Err(error) = platform.connect(Space::Port, address, bell) {
                // Without the doorbell, a notification causes an exit to the VMM, and the VMM notifies the device.
                warn!(
                    "cannot connect a virtio doorbell at port {address:#x}, so notifications at this port are slower: {error}"
                );
            }
        }
        place.listening = wanted;
    }
}
