// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rate limits of devices, created from the configuration.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use carom_api::DiskConfig;
use carom_api::config::{RateLimitGroupConfig, RateLimiterConfig, TokenBucket};
use devices::rate_limit::{BucketParams, RateLimiter, RateLimits};

/// Rate limits that disks share, by name.
pub struct RateLimitGroups(BTreeMap<String, Arc<RateLimiter>>);

impl RateLimitGroups {
    /// Creates the groups of a VM.
    pub fn new(groups: &[RateLimitGroupConfig]) -> Self {
        Self(groups.iter().map(|group| (group.id.clone(), limiter(group.rate_limiter_config))).collect())
    }

    /// Returns a new limiter for the disk's own limits. If the disk has no limits of its own, returns the shared limiter of its group, if
    /// any.
    pub(super) fn of_disk(&self, disk: &DiskConfig) -> Option<Arc<RateLimiter>> {
        let of_group = disk.rate_limit_group.as_ref().and_then(|name| self.0.get(name)).cloned();
        disk.rate_limiter_config.map(limiter).or(of_group)
    }
}

fn limiter(config: RateLimiterConfig) -> Arc<RateLimiter> {
    Arc::new(RateLimiter::new(limits(config), Instant::now()))
}

/// Converts the configured limits of a device.
pub(super) fn limits(config: RateLimiterConfig) -> RateLimits {
    let bucket = |bucket: TokenBucket| {
        let TokenBucket { size, one_time_burst, refill_time } = bucket;
        // As in Cloud Hypervisor, a size or a refill time of 0 means no limit.
        (size != 0 && refill_time != 0).then(|| BucketParams {
            size,
            one_time_burst: one_time_burst.unwrap_or(0),
            refill_time: Duration::from_millis(refill_time),
        })
    };
    RateLimits { bandwidth: config.bandwidth.and_then(bucket), ops: config.ops.and_then(bucket) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_of_a_group_share_its_limit_and_others_have_their_own() {
        let groups = RateLimitGroups::new(&["id=g,ops_size=1,ops_refill_time=1000000".parse().unwrap()]);
        let of = |text: &str| groups.of_disk(&text.parse().unwrap());
        let (one, two) = (of("path=/a,rate_limit_group=g").unwrap(), of("path=/b,rate_limit_group=g").unwrap());
        let now = Instant::now();
        assert!(one.pass(512, now).is_ok() && two.pass(512, now).is_err());
        let (one, two) = ("path=/a,ops_size=1,ops_refill_time=1000000", "path=/b,ops_size=1,ops_refill_time=1000000");
        assert!(of(one).unwrap().pass(512, now).is_ok() && of(two).unwrap().pass(512, now).is_ok());
        assert!(of("path=/a").is_none());
        let free = of("path=/a,ops_size=0,ops_refill_time=1,bw_size=1,bw_refill_time=0").unwrap();
        assert!((0..100).all(|_| free.pass(1 << 30, now).is_ok()));
    }
}
