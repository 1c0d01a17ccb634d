// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Time stamp counter of a vCPU in a snapshot.
//!
//! The counter advances while a VM is saved, as on a machine that sleeps. So a guest that uses the counter as its clock has the correct
//! time after a restore. The differences between the vCPUs' counters must not change. Therefore a restore sets each counter's offset from
//! the host's counter, not its value. If the values were set one after the other, the time between two calls would change the differences
//! (Documentation/virt/kvm/devices/vcpu.rst, section 4.1).

use std::time::Duration;

use devices::state::StateError;
use kvm_bindings::kvm_msr_entry;
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use super::{clock, ioctl, msr};
use crate::kvm::KvmError;

/// Maximum difference, in millionths, of frequencies that count as equal. The frequency that the host measures for its own counter can
/// differ by this much from one boot to the next. A guest's NTP client can correct a difference of this size.
const TOLERANCE: u64 = 250;

/// Saved time stamp counter of one vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
#[serde(deny_unknown_fields)]
pub(super) struct TscState {
    /// Frequency in kHz, or 0 if KVM does not report it.
    pub(super) khz: u32,
    /// Value of the counter.
    pub(super) value: u64,
    /// Offset from the host's counter, if KVM reports it.
    pub(super) offset: Option<u64>,
}

impl TscState {
    /// Reads the counter of a vCPU that is not running, and the host's time of day at that moment in nanoseconds since 1970.
    pub(super) fn save(vcpu: &VcpuFd) -> Result<(Self, u64), KvmError> {
        let (value, realtime) = read(vcpu)?;
        Ok((Self { khz: vcpu.get_tsc_khz().unwrap_or(0), value, offset: ioctl::tsc_offset(vcpu).ok() }, realtime))
    }

    /// Returns the counter's value at time `then`, computed from its value at time `at`. Both times are in nanoseconds.
    pub(super) fn back(self, at: u64, then: u64) -> Self {
        let ticks = |from: u64, to: u64| ticks(Duration::from_nanos(to.saturating_sub(from)), self.khz);
        Self { value: self.value.wrapping_sub(ticks(then, at)).wrapping_add(ticks(at, then)), ..self }
    }

    /// Sets the counter of a vCPU that has not run. The counter was saved at the host's time of day `saved_at`. `first` contains the saved
    /// counter of the first vCPU, and the offset that was set for that vCPU. For the first vCPU itself, `first` is `None`. Returns the
    /// offset that was set.
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
            // KVM supports no offsets, so the value is set. If the value is within a second of the other vCPUs' counters, KVM synchronises
            // all these counters.
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

/// Restored counter of the first vCPU. The counters of vCPUs that are added later follow this counter.
#[derive(Clone, Copy, Debug)]
pub struct LeadingCounter {
    khz: u32,
    /// Offset that was set, if KVM supports offsets.
    offset: Option<u64>,
}

impl LeadingCounter {
    pub(super) fn new(first: TscState, offset: Option<u64>) -> Self {
        Self { khz: first.khz, offset }
    }

    /// Sets the counter of a new vCPU. If KVM supports no offsets, KVM synchronises the counter itself.
    pub fn lead(&self, kvm: &Kvm, vcpu: &VcpuFd) -> Result<(), KvmError> {
        set_frequency(self.khz, kvm, vcpu)?;
        self.offset.map_or(Ok(()), |offset| set_offset(vcpu, offset))
    }
}

/// Sets the frequency, unless it already matches.
fn set_frequency(khz: u32, kvm: &Kvm, vcpu: &VcpuFd) -> Result<(), KvmError> {
    let host = vcpu.get_tsc_khz().unwrap_or(0);
    if is_one(khz, host) {
        return Ok(());
    }
    if !kvm.check_extension(Cap::TscControl) {
        let rule = format!(
            "the guest's time stamp counter runs at {khz} kHz, but this host's runs at {host} kHz, and its CPU cannot scale the counter: restore the VM on a host with the same frequency"
        );
        return Err(StateError::rule("tsc.khz", rule).into());
    }
    vcpu.set_tsc_khz(khz).map_err(KvmError::call(format!(
        "set a vCPU's time stamp counter to {khz} kHz (the host's runs at {host} kHz)"
    )))
}

fn set_offset(vcpu: &VcpuFd, offset: u64) -> Result<(), KvmError> {
    ioctl::set_tsc_offset(vcpu, offset)
        .map_err(|source| KvmError::Call { what: "set the offset of a vCPU's time stamp counter".into(), source })
}

/// Reads the counter, and the host's time of day at that moment.
fn read(vcpu: &VcpuFd) -> Result<(u64, u64), KvmError> {
    let (value, realtime) = clock::timed(|| msr::read(vcpu, msr::TSC))?;
    let missing = || KvmError::other("read the time stamp counter of a vCPU", "KVM does not report MSR 0x10");
    Ok((value.ok_or_else(missing)?, realtime))
}

/// True if two frequencies count as equal. An unknown frequency (0) counts as equal to every frequency.
fn is_one(wanted: u32, host: u32) -> bool {
    wanted == 0 || host == 0 || u64::from(wanted.abs_diff(host)) * 1_000_000 <= u64::from(wanted) * TOLERANCE
}

/// Returns the number of ticks that a counter of `khz` kHz makes in the time `elapsed`.
fn ticks(elapsed: Duration, khz: u32) -> u64 {
    let ticks = elapsed.as_nanos().saturating_mul(khz.into()) / 1_000_000;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_advances_at_its_own_frequency() {
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
    fn frequencies_within_tolerance_count_as_equal() {
        assert!(is_one(2_000_000, 2_000_400) && is_one(2_000_400, 2_000_000) && is_one(0, 5) && is_one(5, 0));
        assert!(!is_one(2_000_000, 2_001_000) && !is_one(2_000_000, 3_000_000));
    }
}
