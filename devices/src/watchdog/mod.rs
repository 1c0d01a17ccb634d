// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! i6300esb, the watchdog of Intel's 6300ESB I/O controller hub (Intel's document 300641-004), as a PCI device. Linux
//! (`drivers/watchdog/i6300esb.c`) and BSDs have drivers for this device. These systems have no driver for a virtio watchdog.
//!
//! The driver starts a counter with two stages, and must reload the counter periodically. When both stages are over, the watchdog resets
//! the machine. The end of the first stage raises no interrupt, because drivers do not use such an interrupt. The counter stops while the
//! VM is paused. The module `registers` contains the registers that the driver sees. The module `timer` contains the thread that waits for
//! the end of a stage.

mod registers;
mod timer;

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use self::registers::{Registers, RegistersState, Timing};
pub use self::timer::ROLE;
use self::timer::Timer;
use crate::pci::{Bar, BarKind, ConfigSpace, ConfigState, FunctionConfig, Identity, PciDevice};
use crate::platform::{DeviceEvent, DeviceObserver};
use crate::state::{DeviceState, StateError};

/// Vendor and device ID and class of the 6300ESB's watchdog.
const IDENTITY: Identity = Identity {
    vendor: 0x8086,
    device: 0x25ab,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
    class: 0x08_8000,
    revision: 0,
};

/// BAR of the memory-mapped registers.
const BAR: Bar = Bar { index: 0, kind: BarKind::Memory32 { prefetchable: false }, size: 16 };

/// Kind and version of the saved state.
const STATE: (&str, u32) = ("watchdog", 1);

/// Saved state of the watchdog.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WatchdogState {
    config: ConfigState,
    registers: RegistersState,
    /// Nanoseconds until the current stage is over, if the counter runs.
    left_ns: Option<u64>,
}

/// Watchdog device.
pub struct Watchdog {
    id: String,
    config: FunctionConfig,
    timer: Timer,
}

impl Watchdog {
    /// Creates a watchdog. If the guest does not reload the watchdog in time, the watchdog notifies `observer` and calls `expired`.
    /// `expired` must start a reset of the machine and must not wait. `id` is the device's name in logs and the API, and the name of its
    /// thread.
    ///
    /// # Errors
    /// The host cannot create a thread.
    pub fn new(
        id: String,
        observer: Arc<dyn DeviceObserver>,
        expired: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let mut config = ConfigSpace::new(IDENTITY);
        config.add_bar(BAR);
        let name = id.clone();
        let expire = move || {
            observer.observe(&name, DeviceEvent::WatchdogExpired);
            expired();
        };
        let timer = Timer::start(id.clone(), Box::new(expire))?;
        Ok(Self { id, config: FunctionConfig::new(config), timer })
    }

    fn with_registers<T>(&self, act: impl FnOnce(&mut Registers) -> (T, Timing)) -> T {
        self.timer.with(act)
    }
}

impl PciDevice for Watchdog {
    fn id(&self) -> &str {
        &self.id
    }

    fn config(&self) -> Option<&FunctionConfig> {
        Some(&self.config)
    }

    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.config.read(offset, data);
        self.with_registers(|registers| (registers.read_config(offset, data), Timing::GoesOn));
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        self.config.write(offset, data);
        self.with_registers(|registers| ((), registers.write_config(offset, data)));
    }

    fn read_bar(&self, _: u8, offset: u64, data: &mut [u8]) {
        self.with_registers(|registers| (registers.read(offset, data), Timing::GoesOn));
    }

    fn write_bar(&self, _: u8, offset: u64, data: &[u8]) {
        self.with_registers(|registers| ((), registers.write(offset, data)));
    }

    /// Resets the device, except for the timeout flag, because the driver of the restarted guest reads this flag.
    fn reset(&self) -> io::Result<()> {
        self.config.reset();
        self.with_registers(|registers| ((), registers.reset()));
        Ok(())
    }

    fn pause(&self) {
        self.timer.pause();
    }

    fn resume(&self) {
        self.timer.resume();
    }

    fn save(&self) -> Result<DeviceState, StateError> {
        let (registers, left_ns) = self.timer.state();
        DeviceState::new(STATE.0, STATE.1, &WatchdogState { config: self.config.state(), registers, left_ns })
    }

    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let WatchdogState { config, registers, left_ns } = state.payload(STATE.0, STATE.1)?;
        self.config.restore(&config)?;
        self.timer.restore(&registers, left_ns)
    }
}
