// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Faults that are pending for the driver (virtio 1.3, section 5.13.6.9).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::EndpointId;
use crate::backend::Permissions;
use crate::spec::fault;

/// Maximum number of pending faults, which wait for a buffer of the driver. Also the maximum number of faults that are accepted in a burst.
const BURST: u32 = 64;
/// Interval after which one more fault is accepted.
const INTERVAL: Duration = Duration::from_millis(10);

/// Reason why an access was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FaultReason {
    /// Any other reason. For example, the host failed and left the endpoint without its domain.
    Unknown,
    /// The endpoint is attached to no domain.
    Domain,
    /// Nothing is mapped at the address, or the mapping does not allow the access.
    Mapping,
}

/// Stopped access, or another event of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Reason of the fault.
    pub reason: FaultReason,
    /// Endpoint that made the access.
    pub endpoint: EndpointId,
    /// IOVA of the access, if known.
    pub address: Option<u64>,
    /// Kind of access, if known.
    #[serde(with = "access")]
    pub access: Permissions,
}

impl Fault {
    /// Returns the report in the format that the driver reads.
    pub fn encode(&self) -> [u8; fault::SIZE] {
        let mut bytes = [0; fault::SIZE];
        bytes[0] = match self.reason {
            FaultReason::Unknown => fault::REASON_UNKNOWN,
            FaultReason::Domain => fault::REASON_DOMAIN,
            FaultReason::Mapping => fault::REASON_MAPPING,
        };
        let mut flags = 0;
        for (permission, flag) in [(Permissions::READ, fault::F_READ), (Permissions::WRITE, fault::F_WRITE)] {
            flags |= if self.access.contains(permission) { flag } else { 0 };
        }
        if let Some(address) = self.address {
            flags |= fault::F_ADDRESS;
            bytes[16..24].copy_from_slice(&address.to_le_bytes());
        }
        bytes[4..8].copy_from_slice(&flags.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.endpoint.to_le_bytes());
        bytes
    }
}

/// Permissions in a saved state, as a number. Unknown bits are rejected.
mod access {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::Permissions;

    pub(super) fn serialize<S: Serializer>(access: &Permissions, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(access.bits())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Permissions, D::Error> {
        let bits = u32::deserialize(deserializer)?;
        Permissions::from_bits(bits)
            .ok_or_else(|| D::Error::custom(format!("a saved fault has unknown permission bits: {bits:#x}")))
    }
}

/// Faults that are pending for the driver. A device that faults continuously must neither fill memory nor keep the driver busy.
pub(crate) struct FaultQueue {
    pending: VecDeque<Fault>,
    /// Number of further faults that can be accepted without waiting.
    allowed: u32,
    /// Time when `allowed` last grew.
    grown: Instant,
}

impl FaultQueue {
    pub(crate) fn new(now: Instant) -> Self {
        Self { pending: VecDeque::new(), allowed: BURST, grown: now }
    }

    /// Queues a fault. Returns `false` if too many faults are pending, or if too many were queued in a short time.
    pub(crate) fn push(&mut self, fault: Fault, now: Instant) -> bool {
        let ticks = now.saturating_duration_since(self.grown).as_nanos() / INTERVAL.as_nanos();
        if ticks > 0 {
            let more = u32::try_from(ticks).unwrap_or(u32::MAX);
            self.allowed = self.allowed.saturating_add(more).min(BURST);
            self.grown = now;
        }
        if self.allowed == 0 || self.pending.len() >= BURST as usize {
            return false;
        }
        self.allowed -= 1;
        self.pending.push_back(fault);
        true
    }

    pub(crate) fn pop(&mut self) -> Option<Fault> {
        self.pending.pop_front()
    }

    /// Returns all pending faults, oldest first.
    pub(crate) fn waiting(&self) -> Vec<Fault> {
        self.pending.iter().copied().collect()
    }

    /// Replaces the pending faults. If `faults` has too many, changes nothing and returns `false`.
    pub(crate) fn restore(&mut self, faults: &[Fault]) -> bool {
        let fit = faults.len() <= BURST as usize;
        if fit {
            self.pending = faults.iter().copied().collect();
        }
        fit
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Drops the faults of an endpoint that is being removed. Returns the number of dropped faults.
    pub(crate) fn forget(&mut self, endpoint: EndpointId) -> u64 {
        let before = self.pending.len();
        self.pending.retain(|fault| fault.endpoint != endpoint);
        (before - self.pending.len()) as u64
    }

    /// Drops all pending faults. Returns the number of dropped faults.
    pub(crate) fn clear(&mut self) -> u64 {
        let count = self.pending.len() as u64;
        self.pending.clear();
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAULT: Fault = Fault {
        reason: FaultReason::Mapping,
        endpoint: 0x0102_0304,
        address: Some(0x1122_3344_5566_7788),
        access: Permissions::WRITE,
    };

    #[test]
    fn report_has_the_layout_of_the_specification() {
        let bytes = FAULT.encode();
        assert_eq!(bytes[..8], [2, 0, 0, 0, 2, 1, 0, 0]);
        assert_eq!(bytes[8..16], [4, 3, 2, 1, 0, 0, 0, 0]);
        assert_eq!(bytes[16..], 0x1122_3344_5566_7788u64.to_le_bytes());
        let access = Permissions::READ | Permissions::WRITE;
        let bytes = Fault { reason: FaultReason::Domain, address: None, access, ..FAULT }.encode();
        assert_eq!((bytes[0], &bytes[4..8], &bytes[16..]), (1, &[3, 0, 0, 0][..], &[0; 8][..]));
        assert_eq!(Fault { reason: FaultReason::Unknown, ..FAULT }.encode()[0], 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "ten thousand faults take Miri half a minute")]
    fn continuous_faults_are_rate_limited() {
        let start = Instant::now();
        let mut queue = FaultQueue::new(start);
        let mut passed = 0;
        for n in 0..10_000u32 {
            // The device faults 10 times per millisecond for a second. Each fault is removed as soon as it is queued.
            passed += u32::from(queue.push(FAULT, start + Duration::from_micros(100) * n));
            assert!(queue.pop().is_none_or(|fault| fault == FAULT));
        }
        assert!((BURST..=BURST + 101).contains(&passed), "{passed}");
        // After a long time, exactly one burst is accepted again.
        let later = start + Duration::from_secs(100);
        assert_eq!((0..1000).filter(|_| queue.push(FAULT, later)).count(), BURST as usize);
        assert_eq!(queue.clear(), u64::from(BURST));
        assert!(queue.is_empty());
    }

    #[test]
    #[cfg_attr(miri, ignore = "ten thousand faults take Miri half a minute")]
    fn pending_faults_are_bounded() {
        let start = Instant::now();
        let mut queue = FaultQueue::new(start);
        let passed = (0..10_000u32).filter(|n| queue.push(FAULT, start + Duration::from_secs(1) * *n));
        assert_eq!(passed.count(), BURST as usize);
    }
}
