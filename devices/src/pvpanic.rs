// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! pvpanic, a PCI device that a guest's kernel uses to report that it has panicked (QEMU, `docs/specs/pvpanic`).
//!
//! The device has one register of one byte. A read returns the supported events, and a write reports events. The third event of the
//! specification, a regular shutdown, is not supported, because ACPI already reports a shutdown.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use serde::{Deserialize, Serialize};

use crate::pci::{Bar, BarKind, ConfigSpace, ConfigState, FunctionConfig, Identity, PciDevice};
use crate::platform::{DeviceEvent, DeviceObserver};
use crate::state::{DeviceState, StateError};

/// Vendor and device ID, class and revision, as in the specification and in QEMU.
const IDENTITY: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0011,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
    class: 0x08_8000,
    revision: 1,
};

/// BAR of the register. The specification defines a size of 2 bytes, but a memory BAR has at least 16 bytes.
const BAR: Bar = Bar { index: 0, kind: BarKind::Memory32 { prefetchable: false }, size: 16 };

/// Supported events, and their bits in the register.
const EVENTS: [(u8, DeviceEvent); 2] = [(1 << 0, DeviceEvent::Panicked), (1 << 1, DeviceEvent::CrashLoaded)];

/// Kind and version of the saved state.
const STATE: (&str, u32) = ("pvpanic", 1);

/// Saved state of the device.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PvPanicState {
    config: ConfigState,
    /// Bits of events that were reported.
    #[serde(rename = "told")]
    reported: u8,
}

/// pvpanic device.
pub struct PvPanic {
    id: String,
    config: FunctionConfig,
    observer: Arc<dyn DeviceObserver>,
    /// Events that were reported since the last reset. Each event is reported only once, because a kernel panics only once, and a kernel
    /// that writes in a loop must not flood the observer.
    reported: AtomicU8,
}

impl PvPanic {
    /// Creates a device that reports each event to `observer` only once until the next reset. `id` is the device's name in logs and the
    /// API.
    pub fn new(id: String, observer: Arc<dyn DeviceObserver>) -> Self {
        let mut config = ConfigSpace::new(IDENTITY);
        config.add_bar(BAR);
        Self { id, config: FunctionConfig::new(config), observer, reported: AtomicU8::new(0) }
    }
}

impl PciDevice for PvPanic {
    fn id(&self) -> &str {
        &self.id
    }

    fn config(&self) -> Option<&FunctionConfig> {
        Some(&self.config)
    }

    fn read_bar(&self, _: u8, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (0, Some(register)) = (offset, data.first_mut()) {
            *register = EVENTS.iter().fold(0, |all, (bit, _)| all | bit);
        }
    }

    fn write_bar(&self, _: u8, offset: u64, data: &[u8]) {
        let (0, Some(written)) = (offset, data.first()) else { return };
        let reported = self.reported.fetch_or(*written, Ordering::Relaxed);
        for (_, event) in EVENTS.iter().filter(|(bit, _)| written & !reported & bit != 0) {
            self.observer.observe(&self.id, *event);
        }
    }

    fn reset(&self) -> io::Result<()> {
        self.reported.store(0, Ordering::Relaxed);
        self.config.reset();
        Ok(())
    }

    fn save(&self) -> Result<DeviceState, StateError> {
        let state = PvPanicState { config: self.config.state(), reported: self.reported.load(Ordering::Relaxed) };
        DeviceState::new(STATE.0, STATE.1, &state)
    }

    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let state: PvPanicState = state.payload(STATE.0, STATE.1)?;
        self.config.restore(&state.config)?;
        self.reported.store(state.reported, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pci::regs::{COMMAND, COMMAND_MEMORY};
    use crate::platform::test_support::EventRecorder;

    fn device() -> (PvPanic, Arc<EventRecorder>) {
        let recorder = Arc::new(EventRecorder::default());
        (PvPanic::new("_pvpanic".into(), recorder.clone()), recorder)
    }

    #[test]
    fn restored_device_matches_saved_and_repeats_no_report() {
        let (old, _) = device();
        old.assign_bar(0, 0xe000_0000);
        old.write_config(COMMAND, &COMMAND_MEMORY.to_le_bytes());
        old.write_bar(0, 0, &[1]);
        let state = old.save().unwrap();
        let (new, recorder) = device();
        new.restore(&state).unwrap();
        assert_eq!(new.save().unwrap(), state);
        assert_eq!(new.bar_address(0), Some(0xe000_0000));
        new.write_bar(0, 0, &[1]);
        assert!(recorder.take().is_empty());
        let mut other = state.clone();
        other.kind = "serial".into();
        assert!(new.restore(&other).is_err());
        assert_eq!(new.save().unwrap(), state);
    }

    #[test]
    fn driver_finds_the_device_and_its_supported_events() {
        let (device, _) = device();
        let mut id = [0; 4];
        device.read_config(0, &mut id);
        assert_eq!(u32::from_le_bytes(id), 0x0011_1b36);
        let mut register = [0xff; 2];
        device.read_bar(0, 0, &mut register);
        assert_eq!(register, [3, 0]);
        device.read_bar(0, 1, &mut register);
        assert_eq!(register, [0, 0]);
    }

    #[test]
    fn each_event_is_reported_once_until_a_reset() {
        let (device, recorder) = device();
        for written in [0, 1, 1, 0xfc, 3, 2] {
            device.write_bar(0, 0, &[written]);
        }
        assert_eq!(recorder.take(), [DeviceEvent::Panicked, DeviceEvent::CrashLoaded]);
        device.reset().unwrap();
        device.write_bar(0, 0, &[2, 0]);
        device.write_bar(0, 0, &[1]);
        assert_eq!(recorder.take(), [DeviceEvent::CrashLoaded, DeviceEvent::Panicked]);
    }

    #[test]
    fn reset_keeps_the_assigned_address_and_turns_decoding_off() {
        let (device, _) = device();
        device.assign_bar(0, 0xe000_1000);
        device.write_config(COMMAND, &COMMAND_MEMORY.to_le_bytes());
        assert_eq!(device.bar_address(0), Some(0xe000_1000));
        device.reset().unwrap();
        assert_eq!(device.bar_address(0), None);
        device.write_config(COMMAND, &COMMAND_MEMORY.to_le_bytes());
        assert_eq!(device.bar_address(0), Some(0xe000_1000));
    }

    proptest! {
        /// Checks that any sequence of accesses reports each event at most once.
        #[test]
        fn random_accesses_report_each_event_at_most_once(
            accesses in prop::collection::vec((any::<bool>(), 0u64..16, prop::collection::vec(any::<u8>(), 0..9)), 0..40),
        ) {
            let (device, recorder) = device();
            for (write, offset, mut data) in accesses {
                if write {
                    device.write_bar(0, offset, &data);
                } else {
                    device.read_bar(0, offset, &mut data);
                }
            }
            let seen = recorder.take();
            prop_assert!(seen.iter().all(|event| seen.iter().filter(|other| *other == event).count() == 1));
        }
    }
}
