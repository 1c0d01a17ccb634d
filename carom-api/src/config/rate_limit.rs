// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rate limits of disks and network devices.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::{ConfigError, ensure};
use crate::field::Field;
use crate::object;
use crate::option_list::{OptionList, Special};

/// Maximum refill time of a bucket in ms.
const MAX_REFILL_TIME: u64 = u32::MAX as u64;

/// Token bucket with a capacity of `size` tokens. An empty bucket is full again after `refill_time`. If `size` or `refill_time` is 0, the
/// bucket sets no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenBucket {
    /// Capacity in tokens. A token stands for one byte, request or packet.
    pub size: u64,
    /// Additional tokens at the start, which are never refilled.
    pub one_time_burst: Option<u64>,
    /// Time to refill the bucket completely, in ms.
    #[schema(maximum = 4_294_967_295u64)]
    pub refill_time: u64,
}

/// Limits on the rate of bytes, and on the rate of requests or packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RateLimiterConfig {
    /// Limit on bytes.
    #[serde(default, deserialize_with = "object::or_null")]
    pub bandwidth: Option<TokenBucket>,
    /// Limit on requests or packets.
    #[serde(default, deserialize_with = "object::or_null")]
    pub ops: Option<TokenBucket>,
}

/// Keys of a rate limit, which all options share.
const RATE_KEYS: [&str; 6] =
    ["bw_size", "bw_one_time_burst", "bw_refill_time", "ops_size", "ops_one_time_burst", "ops_refill_time"];

impl TokenBucket {
    fn parse(list: &OptionList, option: Field, keys: &[&'static str]) -> Result<Option<Self>, ConfigError> {
        let [size_key, burst_key, refill_key] = *keys else { return Ok(None) };
        let (size, one_time_burst, refill_time) =
            (list.read(size_key)?, list.read(burst_key)?, list.number(refill_key)?);
        match (size, refill_time) {
            (Some(size), Some(refill_time)) => Ok(Some(Self { size, one_time_burst, refill_time })),
            (None, None) if one_time_burst.is_none() => Ok(None),
            (None, _) => {
                Err(ConfigError::new(option.key(size_key), "is required: a rate limit needs a size and a refill time"))
            }
            (_, None) => Err(ConfigError::new(
                option.key(refill_key),
                "is required: a rate limit needs a size and a refill time",
            )),
        }
    }

    fn check(&self, refill_time: Field) -> Result<(), ConfigError> {
        let (time, most) = (self.refill_time, MAX_REFILL_TIME);
        ensure(time <= most, refill_time, || format!("{time} ms are more than the maximum of {most} ms"))
    }
}

impl RateLimiterConfig {
    /// Keys of a device's rate limit.
    pub(crate) const KEYS: Special = Special::By("rate_limiter_config", &RATE_KEYS);

    /// Reads the keys of a rate limit. Returns `None` if no such key is given.
    pub(crate) fn parse(list: &OptionList, option: Field) -> Result<Option<Self>, ConfigError> {
        let (bandwidth, ops) = RATE_KEYS.split_at(3);
        let limit = Self {
            bandwidth: TokenBucket::parse(list, option, bandwidth)?,
            ops: TokenBucket::parse(list, option, ops)?,
        };
        Ok((limit != Self::default()).then_some(limit))
    }

    /// Checks the rate limit of `option`.
    ///
    /// # Errors
    /// A refill time is too long.
    pub(crate) fn check(&self, option: Field) -> Result<(), ConfigError> {
        let bandwidth = option.keys("bw_refill_time", "rate_limiter_config.bandwidth.refill_time");
        let ops = option.keys("ops_refill_time", "rate_limiter_config.ops.refill_time");
        self.bandwidth.map_or(Ok(()), |bucket| bucket.check(bandwidth))?;
        self.ops.map_or(Ok(()), |bucket| bucket.check(ops))
    }
}

/// Rate limit that several disks share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RateLimitGroupConfig {
    /// Name that disks refer to (`rate_limit_group`).
    pub id: String,
    /// Limit for all disks of the group together.
    #[serde(deserialize_with = "object::required")]
    pub rate_limiter_config: RateLimiterConfig,
}

impl RateLimitGroupConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--rate-limit-group", "rate_limit_groups");
    /// [`Self::id`].
    pub const ID: Field = Self::OPTION.key("id");

    /// Checks the rate limit groups of a VM.
    ///
    /// # Errors
    /// A group has no name, two groups have the same name, or a refill time is too long.
    pub(crate) fn check_all(groups: &[Self]) -> Result<(), ConfigError> {
        for (place, group) in groups.iter().enumerate() {
            ensure(!group.id.is_empty(), Self::ID, || "must not be empty")?;
            let is_first = groups[..place].iter().all(|other| other.id != group.id);
            ensure(is_first, Self::ID, || format!("'{}' is given twice: every group needs its own id", group.id))?;
            group.rate_limiter_config.check(Self::OPTION)?;
        }
        Ok(())
    }
}

impl FromStr for RateLimitGroupConfig {
    type Err = ConfigError;

    /// Parses `id=NAME` with the keys of a rate limit.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = OptionList::parse(Self::OPTION, text, &[&["id"], &RATE_KEYS[..]].concat())?;
        let id = list.required("id")?.to_string();
        let limit = RateLimiterConfig::parse(&list, Self::OPTION)?;
        let rule = "has no limit: give bw_size and bw_refill_time, or ops_size and ops_refill_time";
        Ok(Self { id, rate_limiter_config: limit.ok_or_else(|| ConfigError::new(Self::OPTION, rule))? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Explain;
    use crate::field::Terms;

    fn group(text: &str) -> Result<RateLimitGroupConfig, String> {
        text.parse().map_err(|error: ConfigError| error.to_string())
    }

    #[test]
    fn names_and_times_are_checked() {
        let check = |texts: &[&str]| {
            let groups: Vec<_> = texts.iter().map(|text| group(text).unwrap()).collect();
            RateLimitGroupConfig::check_all(&groups).map_err(|error| error.explain(Terms::Json))
        };
        let (one, two) = ("id=a,ops_size=1,ops_refill_time=1", "id=b,ops_size=0,ops_refill_time=0");
        assert_eq!(check(&[one, two]), Ok(()));
        assert_eq!(
            check(&[one, two, one]),
            Err("rate_limit_groups.id: 'a' is given twice: every group needs its own id".into())
        );
        let field = "rate_limit_groups.rate_limiter_config.bandwidth.refill_time";
        let refused = check(&["id=a,bw_size=1,bw_refill_time=4294967296"]);
        assert_eq!(refused, Err(format!("{field}: 4294967296 ms are more than the maximum of 4294967295 ms")));
    }
}
