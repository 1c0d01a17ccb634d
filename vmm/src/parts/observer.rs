// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Events that the guest causes on devices, with Cloud Hypervisor's names.

use std::collections::BTreeMap;

use devices::platform::{DeviceEvent, DeviceObserver};

use crate::process::event_monitor::EventMonitor;

/// Observer that writes the events of devices to the event stream.
pub(crate) struct Observer(pub(crate) EventMonitor);

impl DeviceObserver for Observer {
    fn observe(&self, id: &str, event: DeviceEvent) {
        let (source, name, key, value) = match event {
            DeviceEvent::Activated => ("virtio-device", "activated", "id", id),
            DeviceEvent::Reset => ("virtio-device", "reset", "id", id),
            // Carom's own event: Cloud Hypervisor has no event for a failed device.
            DeviceEvent::Failed => ("virtio-device", "failed", "id", id),
            DeviceEvent::WatchdogExpired => ("watchdog", "expired", "id", id),
            DeviceEvent::Panicked => ("guest", "panic", "event", "panic"),
            DeviceEvent::CrashLoaded => ("guest", "panic", "event", "crash_loaded"),
        };
        self.0.event_of_guest(source, name, Some(BTreeMap::from([(key, value)])));
    }
}
