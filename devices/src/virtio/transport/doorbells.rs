// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Notifications that reach a device's thread without a vCPU that leaves the guest for the VMM.
//!
//! The host's kernel writes an event for each write to a queue's address in the BAR for notifications. It does so only while
//! the device serves a driver, may use the bus, and its BAR is decoded: otherwise a vCPU comes to the VMM, which drops it.

use std::sync::{Arc, Mutex};

use log::warn;

use super::layout::NOTIFY_MULTIPLIER;
use crate::platform::{Doorbells, Space};
use crate::sync::lock;
use crate::virtio::VirtioDevice;

/// The doorbells of one device.
pub(super) struct QueueDoorbells {
    platform: Option<Arc<dyn Doorbells>>,
    place: Mutex<Place>,
}

#[derive(Default)]
struct Place {
    /// Where the BAR is claimed.
    bar: Option<u64>,
    /// Where the kernel listens.
    listening: Option<u64>,
}

impl QueueDoorbells {
    /// None yet. Without `platform` there never are.
    pub(super) fn new(platform: Option<Arc<dyn Doorbells>>) -> Self {
        Self { platform, place: Mutex::default() }
    }

    /// The BAR is at `address` from now on, or nowhere.
    pub(super) fn set_bar(&self, address: Option<u64>) {
        lock(&self.place).bar = address;
    }

    /// Has the kernel listen where the BAR is, if it is decoded at `decoded`, the device `serves` and that is not so already.
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
                warn!("disconnecting a doorbell at port {address:#x}: {error}");
            }
        }
        for (address, bell) in wanted.into_iter().flat_map(bells) {
            if let Err(error) = platform.connect(Space::Port, address, bell) {
                // The vCPU rings it then.
                warn!("connecting a doorbell at port {address:#x}: {error}");
            }
        }
        place.listening = wanted;
    }
}
