// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rate limits of requests. The limits are token buckets, which queues of one or several devices can share.
//!
//! A bucket holds tokens, one per byte or per request, and regains them at a fixed rate until it is full. A request passes if at least one
//! token is left. The request then takes one token, or one token for each of its bytes. If too few tokens are left, the bucket goes into
//! debt, and all further requests wait until the debt is paid. This scheme has three advantages:
//!
//! - A request that is larger than the bucket also passes.
//! - The average rate is exact.
//! - Small requests cannot block a large request for ever.
//!
//! Existing crates for rate limits have no one-time burst (`governor`), or use their own timers and clock.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::sync::lock;

/// Parameters of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketParams {
    /// Capacity in tokens, at least 1.
    pub size: u64,
    /// Additional tokens at the start, which are never refilled.
    pub one_time_burst: u64,
    /// Time in which an empty bucket becomes full, 1 ns to 2^32 ms.
    pub refill_time: Duration,
}

/// Limits of a [`RateLimiter`]. `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Limit on bytes.
    pub bandwidth: Option<BucketParams>,
    /// Limit on requests.
    pub ops: Option<BucketParams>,
}

/// Maximum time that a caller waits before it tries a request again.
const MOST_WAIT: Duration = Duration::from_secs(3600);

/// Token bucket. A token has as many parts as the refill time has nanoseconds. So each nanosecond adds exactly `size` parts, and nothing
/// is rounded.
#[derive(Debug)]
struct Bucket {
    size: i128,
    /// Time in which an empty bucket becomes full, in nanoseconds.
    refill_time: i128,
    /// Tokens left, in parts. A negative value is a debt.
    parts: i128,
    /// Burst tokens left.
    burst: u64,
    seen: Instant,
}

impl Bucket {
    fn new(params: BucketParams, now: Instant) -> Self {
        let size = i128::from(params.size.max(1));
        let most = u128::from(u32::MAX) * 1_000_000;
        let refill_time = i128::try_from(params.refill_time.as_nanos().clamp(1, most)).unwrap_or(1);
        // The product fits, because there are at most 2^64 tokens with less than 2^52 parts each.
        Self { size, refill_time, parts: size * refill_time, burst: params.one_time_burst, seen: now }
    }

    /// Adds the parts for the time that has passed.
    fn refill(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.seen).as_nanos();
        self.seen = self.seen.max(now);
        let come = self.size.saturating_mul(i128::try_from(elapsed).unwrap_or(i128::MAX));
        self.parts = self.parts.saturating_add(come).min(self.size * self.refill_time);
    }

    /// Returns the time until a token is available, or `None` if a token is available now.
    fn wait(&self) -> Option<Duration> {
        if self.burst != 0 || self.parts >= self.refill_time {
            return None;
        }
        let missing = self.refill_time.saturating_sub(self.parts);
        let nanoseconds = missing / self.size + i128::from(missing % self.size != 0);
        Some(u64::try_from(nanoseconds).map_or(MOST_WAIT, Duration::from_nanos).min(MOST_WAIT))
    }

    fn take(&mut self, tokens: u64) {
        let of_burst = tokens.min(self.burst);
        self.burst -= of_burst;
        let parts = i128::from(tokens - of_burst).saturating_mul(self.refill_time);
        self.parts = self.parts.saturating_sub(parts);
    }
}

#[derive(Debug)]
struct Buckets {
    bandwidth: Option<Bucket>,
    ops: Option<Bucket>,
}

/// Rate limit that queues can share.
#[derive(Debug)]
pub struct RateLimiter(Mutex<Buckets>);

impl RateLimiter {
    /// Creates a limiter with full buckets.
    pub fn new(limits: RateLimits, now: Instant) -> Self {
        let bucket = |params: Option<BucketParams>| params.map(|params| Bucket::new(params, now));
        Self(Mutex::new(Buckets { bandwidth: bucket(limits.bandwidth), ops: bucket(limits.ops) }))
    }

    /// Lets a request of `bytes` bytes pass if the limits allow it, and takes the request's tokens.
    ///
    /// # Errors
    /// The request does not pass now, and no tokens were taken. The error is the time, at most an hour, after which the caller should try
    /// again. After this time the request passes, unless other requests have passed first or the full wait exceeds an hour.
    pub fn pass(&self, bytes: u64, now: Instant) -> Result<(), Duration> {
        let Buckets { bandwidth, ops } = &mut *lock(&self.0);
        let mut both = [bandwidth.as_mut().map(|bucket| (bucket, bytes)), ops.as_mut().map(|bucket| (bucket, 1))];
        let mut wait = None;
        for (bucket, _) in both.iter_mut().flatten() {
            bucket.refill(now);
            wait = wait.max(bucket.wait());
        }
        if let Some(wait) = wait {
            return Err(wait);
        }
        both.iter_mut().flatten().for_each(|(bucket, tokens)| bucket.take(*tokens));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn bucket(size: u64, one_time_burst: u64, refill_time: Duration) -> Option<BucketParams> {
        Some(BucketParams { size, one_time_burst, refill_time })
    }

    /// Creates a limiter, and returns the time at which its buckets are full.
    fn made(bandwidth: Option<BucketParams>, ops: Option<BucketParams>) -> (RateLimiter, Instant) {
        let now = Instant::now();
        (RateLimiter::new(RateLimits { bandwidth, ops }, now), now)
    }

    #[test]
    fn requests_pass_until_the_bucket_is_empty_and_then_at_its_rate() {
        let (limiter, start) = made(None, bucket(10, 0, SECOND));
        assert!((0..10).all(|_| limiter.pass(4096, start).is_ok()));
        assert_eq!(limiter.pass(4096, start), Err(Duration::from_millis(100)));
        assert_eq!(limiter.pass(4096, start + Duration::from_millis(99)), Err(Duration::from_millis(1)));
        assert_eq!(limiter.pass(4096, start + Duration::from_millis(100)), Ok(()));
        assert!(limiter.pass(4096, start + Duration::from_millis(100)).is_err());
        // The bucket never holds more than its capacity.
        let later = start + 100 * SECOND;
        assert_eq!((0..100).filter(|_| limiter.pass(0, later).is_ok()).count(), 10);
    }

    #[test]
    fn burst_comes_once() {
        let (limiter, start) = made(bucket(1000, 500, SECOND), None);
        assert_eq!([limiter.pass(500, start), limiter.pass(1000, start)], [Ok(()), Ok(())]);
        assert!(limiter.pass(1, start).is_err());
        let later = start + 10 * SECOND;
        assert_eq!(limiter.pass(1000, later), Ok(()));
        assert!(limiter.pass(1, later).is_err());
    }

    #[test]
    fn oversized_request_passes_and_later_ones_wait_for_debt() {
        let (limiter, start) = made(bucket(1000, 0, SECOND), None);
        assert_eq!(limiter.pass(5000, start), Ok(()));
        // The debt is 4000 tokens, and one more token is needed.
        assert_eq!(limiter.pass(1, start), Err(Duration::from_millis(4001)));
        assert_eq!(limiter.pass(1, start + Duration::from_millis(4001)), Ok(()));
    }

    #[test]
    fn request_held_by_one_bucket_takes_nothing_from_the_other() {
        let (limiter, start) = made(bucket(1000, 0, SECOND), bucket(1, 0, SECOND));
        assert_eq!(limiter.pass(100, start), Ok(()));
        for _ in 0..100 {
            assert_eq!(limiter.pass(100, start), Err(SECOND));
        }
        // If each failed request had been charged, the debt would be 9,100 bytes.
        assert_eq!(limiter.pass(900, start + SECOND), Ok(()));
    }

    #[test]
    fn extreme_numbers_and_a_stopped_clock_are_harmless() {
        let (limiter, start) = made(bucket(u64::MAX, u64::MAX, Duration::MAX), bucket(1, 0, Duration::MAX));
        assert_eq!(limiter.pass(u64::MAX, start), Ok(()));
        assert_eq!(limiter.pass(u64::MAX, start), Err(MOST_WAIT));
        // If two threads call `pass`, the thread that reads the clock first may call `pass` last. So `now` may go backwards.
        assert!(limiter.pass(1, start.checked_sub(SECOND).unwrap_or(start)).is_err());
        assert_eq!(limiter.pass(1, start + Duration::from_millis(u32::MAX.into())), Ok(()));
        let (none, start) = made(None, None);
        assert_eq!(none.pass(u64::MAX, start), Ok(()));
    }

    proptest! {
        /// Checks the bytes that pass in any period. They are at most the bucket's size, its burst, the tokens that it regains in the
        /// period, and one request. Also checks that a request passes after the reported wait.
        #[test]
        fn rate_is_kept_and_reported_waits_suffice(
            size in 1u64..10_000,
            burst in 0u64..10_000,
            refill_ms in 1u64..5_000,
            requests in prop::collection::vec((0u64..20_000, 0u64..50_000), 1..200),
        ) {
            let refill_time = Duration::from_millis(refill_ms);
            let (limiter, start) = made(bucket(size, burst, refill_time), None);
            let mut passed: Vec<(Duration, u64)> = Vec::new();
            let mut at = Duration::ZERO;
            for (bytes, pause) in requests {
                at += Duration::from_micros(pause);
                while let Err(wait) = limiter.pass(bytes, start + at) {
                    prop_assert!(limiter.pass(bytes, start + at + wait - Duration::from_nanos(1)).is_err());
                    at += wait;
                    // After the maximum wait, the request is tried again.
                    if wait < MOST_WAIT {
                        prop_assert_eq!(limiter.pass(bytes, start + at), Ok(()));
                        break;
                    }
                }
                passed.push((at, bytes));
            }
            for (first, (from, _)) in passed.iter().enumerate() {
                let mut sum = 0u128;
                for (to, bytes) in &passed[first..] {
                    let come = u128::from(size) * (*to - *from).as_nanos() / refill_time.as_nanos();
                    // `sum` does not include the last request, because this request needs only one token.
                    prop_assert!(sum <= u128::from(size) + u128::from(burst) + come, "{} bytes", sum);
                    sum += u128::from(*bytes);
                }
            }
        }
    }
}
