// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM's clock, by which most guests tell the time, while a VM is paused or saved.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvm_bindings::kvm_clock_data;
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};

use crate::kvm::KvmError;

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

/// How long ago the host's time of day was that; nothing if it was set back since.
pub fn since(realtime: u64) -> Duration {
    Duration::from_nanos(realtime_ns().saturating_sub(realtime))
}

impl ClockState {
    /// Reads the clock.
    pub fn save(vm: &VmFd) -> Result<Self, KvmError> {
        let clock = vm.get_clock().map_err(KvmError::call("reading the guest's clock"))?;
        Ok(Self { ns: clock.clock, realtime_ns: realtime_ns() })
    }

    /// Has the clock go on where it stood: the guest does not learn of the time since.
    pub fn go_on(&self, vm: &VmFd) -> Result<(), KvmError> {
        set(vm, self.ns)
    }

    /// Has the clock go on where it would be had it never stopped.
    pub fn catch_up(&self, vm: &VmFd) -> Result<(), KvmError> {
        let passed = u64::try_from(since(self.realtime_ns).as_nanos()).unwrap_or(u64::MAX);
        set(vm, self.ns.saturating_add(passed))
    }
}

fn set(vm: &VmFd, clock: u64) -> Result<(), KvmError> {
    vm.set_clock(&kvm_clock_data { clock, ..Default::default() }).map_err(KvmError::call("setting the guest's clock"))
}
