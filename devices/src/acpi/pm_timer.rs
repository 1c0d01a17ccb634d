// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! ACPI power management timer (ACPI 6.5, section 4.8.3.3): a 32-bit counter that never stops. Firmware measures delays with the timer.
//! Carom's ACPI tables do not describe the timer, because the guest's kernel has better clocks.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::platform::BusDevice;
use crate::state::{DeviceState, StateError};

/// Size of the register in bytes.
pub const REGISTERS_LEN: u64 = 4;

/// Ticks per second.
const HERTZ: u128 = 3_579_545;

/// Kind and version of the timer's saved state.
const STATE: (&str, u32) = ("pm-timer", 1);

/// Saved state of the timer.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PmTimerState {
    /// Value of the counter.
    ticks: u32,
}

/// Value of the counter at a point in time.
#[derive(Clone, Copy)]
struct Since {
    start: Instant,
    ticks: u32,
}

impl Since {
    fn ticks(self) -> u32 {
        self.ticks.wrapping_add(ticks(self.start.elapsed()))
    }
}

/// Returns the number of ticks in a duration, modulo 2^32.
fn ticks(time: Duration) -> u32 {
    let [low, ..] = split(time.as_nanos() * HERTZ / 1_000_000_000);
    low
}

/// Returns the 32-bit words of a number, lowest first.
fn split(number: u128) -> [u32; 4] {
    let bytes = number.to_le_bytes();
    std::array::from_fn(|at| u32::from_le_bytes(std::array::from_fn(|byte| bytes[4 * at + byte])))
}

/// Power management timer. Its counter starts at 0 when the timer is created.
pub struct PmTimer(Mutex<Since>);

impl Default for PmTimer {
    fn default() -> Self {
        Self(Mutex::new(Since { start: Instant::now(), ticks: 0 }))
    }
}

impl PmTimer {
    /// Returns the state of the timer. Call this function while all vCPUs are stopped.
    ///
    /// # Errors
    /// This function never fails today.
    pub fn save(&self) -> Result<DeviceState, StateError> {
        DeviceState::new(STATE.0, STATE.1, &PmTimerState { ticks: self.since().ticks() })
    }

    /// Restores `state`. The counter continues from the saved value.
    ///
    /// # Errors
    /// The saved state is invalid. In this case nothing has changed.
    pub fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let PmTimerState { ticks } = state.payload(STATE.0, STATE.1)?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Since { start: Instant::now(), ticks };
        Ok(())
    }

    fn since(&self) -> Since {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BusDevice for PmTimer {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let bytes = self.since().ticks().to_le_bytes();
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        data.iter_mut().zip(bytes.iter().skip(from)).for_each(|(byte, value)| *byte = *value);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(timer: &PmTimer) -> u32 {
        let mut data = [0; 4];
        timer.read(0, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn second_has_3579545_ticks_and_the_counter_wraps() {
        assert_eq!(ticks(Duration::from_secs(1)), 3_579_545);
        assert_eq!(ticks(Duration::from_micros(50)), 178);
        // 1200 s are 2^32 + 486,704 ticks, and only the lower 32 bits are returned.
        assert_eq!(ticks(Duration::from_secs(1200)), 486_704);
        assert_eq!(ticks(Duration::MAX), split(Duration::MAX.as_nanos() * HERTZ / 1_000_000_000)[0]);
    }

    #[test]
    fn counter_continues_after_any_write() {
        let timer = PmTimer::default();
        let first = read(&timer);
        timer.write(0, &[0; 4]);
        std::thread::sleep(Duration::from_millis(2));
        let passed = read(&timer).wrapping_sub(first);
        assert!(passed >= 7_159, "{passed} ticks in 2 ms or more");
    }

    #[test]
    fn accesses_of_any_length_are_accepted() {
        let timer = PmTimer::default();
        timer.restore(&DeviceState::new(STATE.0, STATE.1, &PmTimerState { ticks: 0x1200_0000 }).unwrap()).unwrap();
        let mut data = [0xff; 4];
        timer.read(3, &mut data);
        assert_eq!(data, [0x12, 0xff, 0xff, 0xff]);
        timer.read(u64::MAX, &mut data);
        timer.read(0, &mut []);
    }

    #[test]
    fn restored_timer_continues_and_bad_states_are_refused() {
        let (old, new) = (PmTimer::default(), PmTimer::default());
        old.restore(&DeviceState::new(STATE.0, STATE.1, &PmTimerState { ticks: u32::MAX - 10 }).unwrap()).unwrap();
        let state = old.save().unwrap();
        new.restore(&state).unwrap();
        let saved: PmTimerState = state.payload(STATE.0, STATE.1).unwrap();
        assert!(read(&new).wrapping_sub(saved.ticks) < 1 << 31, "the counter continues from {}", saved.ticks);
        let mut state = old.save().unwrap();
        state.payload = serde_json::json!({ "ticks": 1u64 << 32 });
        assert!(new.restore(&state).is_err());
    }
}
