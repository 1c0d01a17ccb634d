// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM's clock, by which most guests tell the time, while a VM is paused or saved.

use std::time::{SystemTime, UNIX_EPOCH};

use kvm_bindings::{KVM_CLOCK_REALTIME, kvm_clock_data};
use kvm_ioctls::{Cap, VmFd};
use serde::{Deserialize, Serialize};

use crate::kvm::KvmError;

/// How often something is read to learn when it was what it was.
const READINGS: usize = 8;

/// What the clock stood at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
#[serde(deny_unknown_fields)]
pub struct ClockState {
    /// The guest's clock in nanoseconds.
    pub ns: u64,
    /// The host's time of day at that moment, in nanoseconds since 1970.
    pub realtime_ns: u64,
}

/// The host's time of day in nanoseconds since 1970.
pub fn realtime_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Reads something that goes on with time, and the host's time of day at that moment: of several readings, the one that took
/// least time tells best when it was. The clocks of a guest must agree to a fraction of a millisecond.
pub(super) fn timed<T, E>(mut read: impl FnMut() -> Result<T, E>) -> Result<(T, u64), E> {
    let mut timed = || {
        let before = realtime_ns();
        let value = read()?;
        let after = realtime_ns();
        // The host's clock may be set back meanwhile.
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
        let (clock, realtime_ns) = timed(|| vm.get_clock()).map_err(KvmError::call("reading the guest's clock"))?;
        let exact = clock.flags & KVM_CLOCK_REALTIME != 0;
        Ok(Self { ns: clock.clock, realtime_ns: if exact { clock.realtime } else { realtime_ns } })
    }

    /// Has the clock go on where it stood: the guest does not learn of the time since.
    pub fn go_on(&self, vm: &VmFd) -> Result<(), KvmError> {
        set(vm, kvm_clock_data { clock: self.ns, ..Default::default() })
    }

    /// Has the clock go on where it would be had it never stopped; where it stood, if the host's time of day was set back since.
    pub fn catch_up(&self, vm: &VmFd) -> Result<(), KvmError> {
        if vm.check_extension_int(Cap::AdjustClock).cast_unsigned() & KVM_CLOCK_REALTIME != 0 {
            // The kernel does it, with no time between the look at the host's clock and the change.
            let (flags, realtime) = (KVM_CLOCK_REALTIME, self.realtime_ns);
            return set(vm, kvm_clock_data { clock: self.ns, flags, realtime, ..Default::default() });
        }
        let passed = realtime_ns().saturating_sub(self.realtime_ns);
        set(vm, kvm_clock_data { clock: self.ns.saturating_add(passed), ..Default::default() })
    }
}

fn set(vm: &VmFd, clock: kvm_clock_data) -> Result<(), KvmError> {
    vm.set_clock(&clock).map_err(KvmError::call("setting the guest's clock"))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn reading_that_took_least_tells_the_time() {
        let mut readings = 0;
        let before = realtime_ns();
        let (reading, at) = timed(|| {
            readings += 1;
            if readings != 3 {
                thread::sleep(Duration::from_millis(20));
            }
            Ok::<_, Infallible>(readings)
        })
        .unwrap();
        assert_eq!((reading, readings), (3, READINGS));
        let since = Duration::from_nanos(at - before);
        assert!(since >= Duration::from_millis(40) && since < Duration::from_millis(120), "{since:?}");
    }
}
