// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saves and sets KVM's clock when a VM is paused, resumed or restored. Most guests use this clock to tell the time.

use std::time::{SystemTime, UNIX_EPOCH};

use kvm_bindings::{KVM_CLOCK_REALTIME, kvm_clock_data};
use kvm_ioctls::{Cap, VmFd};
use serde::{Deserialize, Serialize};

use crate::kvm::KvmError;

/// Number of readings of a clock. Only the shortest reading counts.
const READINGS: usize = 8;

/// Saved value of the guest's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
#[serde(deny_unknown_fields)]
pub struct ClockState {
    /// The guest's clock in nanoseconds.
    pub ns: u64,
    /// The host's time of day when the guest's clock was read, in nanoseconds since 1970.
    pub realtime_ns: u64,
}

/// Returns the host's time of day in nanoseconds since 1970.
pub fn realtime_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Reads a value that changes with time, and the host's time of day at that moment. Returns the shortest of several readings, because a
/// shorter reading is more precise. Precision matters, because a guest's clocks should differ by at most a fraction of a millisecond.
pub(super) fn timed<T, E>(read: impl FnMut() -> Result<T, E>) -> Result<(T, u64), E> {
    timed_by(realtime_ns, read)
}

/// Like [`timed`], but `now` returns the host's time of day.
fn timed_by<T, E>(now: impl Fn() -> u64, mut read: impl FnMut() -> Result<T, E>) -> Result<(T, u64), E> {
    let mut timed = || {
        let before = now();
        let value = read()?;
        let after = now();
        // If the host's clock is set back during the reading, the reading counts as the longest.
        let took = after.checked_sub(before).unwrap_or(u64::MAX);
        Ok((took, value, before.saturating_add(took / 2)))
    };
    let mut best = timed()?;
    for _ in 1..READINGS {
        let other = timed()?;
        if other.0 < best.0 {
            best = other;
        }
    }
    Ok((best.1, best.2))
}

impl ClockState {
    /// Reads the clock.
    pub fn save(vm: &VmFd) -> Result<Self, KvmError> {
        let (clock, realtime_ns) = timed(|| vm.get_clock()).map_err(KvmError::call("read the guest's clock"))?;
        let exact = clock.flags & KVM_CLOCK_REALTIME != 0;
        Ok(Self { ns: clock.clock, realtime_ns: if exact { clock.realtime } else { realtime_ns } })
    }

    /// Sets the clock to the saved value, so that the guest does not notice the time since the clock was saved.
    pub fn go_on(&self, vm: &VmFd) -> Result<(), KvmError> {
        set(vm, kvm_clock_data { clock: self.ns, ..Default::default() })
    }

    /// Advances the clock by the time that has passed since the clock was saved. If the host's time of day was set back in the meantime,
    /// the clock continues from the saved value.
    pub fn catch_up(&self, vm: &VmFd) -> Result<(), KvmError> {
        if vm.check_extension_int(Cap::AdjustClock).cast_unsigned() & KVM_CLOCK_REALTIME != 0 {
            // The kernel reads the host's clock and sets the guest's clock in this one call, so no time passes between these steps.
            let (flags, realtime) = (KVM_CLOCK_REALTIME, self.realtime_ns);
            return set(vm, kvm_clock_data { clock: self.ns, flags, realtime, ..Default::default() });
        }
        let passed = realtime_ns().saturating_sub(self.realtime_ns);
        set(vm, kvm_clock_data { clock: self.ns.saturating_add(passed), ..Default::default() })
    }
}

fn set(vm: &VmFd, clock: kvm_clock_data) -> Result<(), KvmError> {
    vm.set_clock(&clock).map_err(KvmError::call("set the guest's clock"))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::convert::Infallible;

    use super::*;

    /// Runs timed readings of these `durations`, with a clock that starts at 1000 ns. Returns the number of the reading that counts, and its
    /// time.
    fn timed_readings(durations: [i64; READINGS]) -> (usize, u64) {
        let (now, mut readings) = (Cell::new(1000u64), 0);
        let read = || {
            now.set(now.get().saturating_add_signed(durations[readings]));
            readings += 1;
            Ok::<_, Infallible>(readings)
        };
        let timed = timed_by(|| now.get(), read).unwrap();
        assert_eq!(readings, READINGS);
        timed
    }

    #[test]
    fn shortest_reading_counts() {
        assert_eq!(timed_readings([40, 30, 10, 20, 20, 20, 20, 20]), (3, 1075));
        // If several readings are equally short, the first of them counts.
        assert_eq!(timed_readings([20; READINGS]), (1, 1010));
    }

    #[test]
    fn reading_in_which_the_host_clock_is_set_back_counts_last() {
        assert_eq!(timed_readings([-500, 300, 200, 400, 400, 400, 400, 400]), (3, 900));
    }
}
