// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The time stamp counter of a vCPU in a snapshot.
//!
//! It counts on while a VM is saved, as on a machine that sleeps, so that a guest which tells the time by it is right
//! afterwards. What the counters of the vCPUs differ by stays what it was: their offsets from the host's counter are set, not
//! their values, which would grow apart while they are set (Documentation/virt/kvm/devices/vcpu.rst, section 4.1).

use std::time::Duration;

use devices::state::StateError;
use kvm_bindings::kvm_msr_entry;
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use super::{clock, ioctl, msr};
use crate::kvm::KvmError;

/// By how many millionths frequencies may differ and still count as one: what the host's own measurement of its counter
/// differs by from one boot to the next, and what NTP corrects.
const TOLERANCE: u64 = 250;

/// The counter of one vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
#[serde(deny_unknown_fields)]
pub(super) struct TscState {
    /// Frequency in kHz; 0 where KVM does not tell it.
    pub(super) khz: u32,
    /// What it stood at.
    pub(super) value: u64,
    /// What it is ahead of the host's, where KVM tells that.
    pub(super) offset: Option<u64>,
}

impl TscState {
    /// Reads the counter of a vCPU that is not running, and the host's time of day then in nanoseconds since 1970.
    pub(super) fn save(vcpu: &VcpuFd) -> Result<(Self, u64), KvmError> {
        let (value, realtime) = read(vcpu)?;
        Ok((Self { khz: vcpu.get_tsc_khz().unwrap_or(0), value, offset: ioctl::tsc_offset(vcpu).ok() }, realtime))
    }

    /// The same counter, read at `at`, as it was at `then`.
    pub(super) fn back(self, at: u64, then: u64) -> Self {
        let ticks = |from: u64, to: u64| ticks(Duration::from_nanos(to.saturating_sub(from)), self.khz);
        Self { value: self.value.wrapping_sub(ticks(then, at)).wrapping_add(ticks(at, then)), ..self }
    }

    /// Sets the counter of a vCPU that has not run, and that was saved when the host's time of day was `saved_at`. `first` is what
    /// was saved of the first vCPU, and what its offset was set to; `None` for the first one itself. Returns what the offset was
    /// set to.
    pub(super) fn restore(
        &self,
        kvm: &Kvm,
        vcpu: &VcpuFd,
        saved_at: u64,
        first: Option<(Self, Option<u64>)>,
    ) -> Result<Option<u64>, KvmError> {
        set_frequency(self.khz, kvm, vcpu)?;
        let at = |realtime: u64| {
            let elapsed = Duration::from_nanos(realtime.saturating_sub(saved_at));
            self.value.wrapping_add(ticks(elapsed, self.khz))
        };
        let Ok(now) = ioctl::tsc_offset(vcpu) else {
            // KVM keeps the counters of vCPUs in step that are set to nearly the same within a second.
            let data = at(clock::realtime_ns());
            msr::write(vcpu, kvm_msr_entry { index: msr::TSC, data, ..Default::default() })?;
            return Ok(None);
        };
        let offset = match (first, self.offset) {
            (Some((TscState { offset: Some(first), .. }, Some(set))), Some(own)) => {
                set.wrapping_add(own.wrapping_sub(first))
            }
            _ => {
                let (value, realtime) = read(vcpu)?;
                now.wrapping_add(at(realtime).wrapping_sub(value))
            }
        };
        set_offset(vcpu, offset)?;
        Ok(Some(offset))
    }
}

/// The counter of the first vCPU as it was restored, which those of vCPUs follow that come later.
#[derive(Clone, Copy, Debug)]
pub struct LeadingCounter {
    khz: u32,
    /// What its offset was set to, where KVM has that.
    offset: Option<u64>,
}

impl LeadingCounter {
    pub(super) fn new(first: TscState, offset: Option<u64>) -> Self {
        Self { khz: first.khz, offset }
    }

    /// Sets the counter of a vCPU that was just made. Where KVM tells no offsets, it has it in step with the others.
    pub fn lead(&self, kvm: &Kvm, vcpu: &VcpuFd) -> Result<(), KvmError> {
        set_frequency(self.khz, kvm, vcpu)?;
        self.offset.map_or(Ok(()), |offset| set_offset(vcpu, offset))
    }
}

/// Sets the frequency, unless it is that already.
fn set_frequency(khz: u32, kvm: &Kvm, vcpu: &VcpuFd) -> Result<(), KvmError> {
    let host = vcpu.get_tsc_khz().unwrap_or(0);
    if is_one(khz, host) {
        return Ok(());
    }
    if !kvm.check_extension(Cap::TscControl) {
        let rule = format!("is {khz}: this host's counter runs at {host}, and its CPU cannot scale it");
        return Err(StateError::rule("tsc.khz", rule).into());
    }
    vcpu.set_tsc_khz(khz).map_err(KvmError::call(format!("set the frequency of the counter to {khz} kHz")))
}

fn set_offset(vcpu: &VcpuFd, offset: u64) -> Result<(), KvmError> {
    ioctl::set_tsc_offset(vcpu, offset)
        .map_err(|source| KvmError::Call { what: "set the offset of the time stamp counter".into(), source })
}

/// The counter, and the host's time of day then.
fn read(vcpu: &VcpuFd) -> Result<(u64, u64), KvmError> {
    let (value, realtime) = clock::timed(|| msr::read(vcpu, msr::TSC))?;
    Ok((value.ok_or(KvmError::Missing("time stamp counter"))?, realtime))
}

/// Whether two frequencies count as one; 0 is not known.
fn is_one(wanted: u32, host: u32) -> bool {
    wanted == 0 || host == 0 || u64::from(wanted.abs_diff(host)) * 1_000_000 <= u64::from(wanted) * TOLERANCE
}

/// How far a counter of `khz` comes in that time.
fn ticks(elapsed: Duration, khz: u32) -> u64 {
    let ticks = elapsed.as_nanos().saturating_mul(khz.into()) / 1_000_000;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_goes_on_at_its_own_frequency() {
        assert_eq!(ticks(Duration::from_millis(1500), 2_000_000), 3_000_000_000);
        assert_eq!(ticks(Duration::from_secs(1), 0), 0);
        assert_eq!(ticks(Duration::MAX, u32::MAX), u64::MAX);
    }

    #[test]
    fn tsc_values_read_in_turn_are_moved_to_one_moment() {
        let counter = |value| TscState { khz: 2_000_000, value, offset: None };
        assert_eq!(counter(9_000).back(5_000, 4_000), counter(7_000));
        assert_eq!(counter(9_000).back(4_000, 5_000), counter(11_000));
    }

    #[test]
    fn frequencies_that_two_measurements_give_are_one() {
        assert!(is_one(2_000_000, 2_000_400) && is_one(2_000_400, 2_000_000) && is_one(0, 5) && is_one(5, 0));
        assert!(!is_one(2_000_000, 2_001_000) && !is_one(2_000_000, 3_000_000));
    }
}
