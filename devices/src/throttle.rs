// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Limit on log lines that a guest can cause.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::sync::lock;

/// Limit that allows one line every ten seconds.
#[derive(Debug, Default)]
pub(crate) struct Throttle {
    last: Mutex<Option<Instant>>,
}

impl Throttle {
    const PAUSE: Duration = Duration::from_secs(10);

    /// True if a line may be written now.
    pub(crate) fn pass(&self) -> bool {
        let mut last = lock(&self.last);
        let pass = last.is_none_or(|last| last.elapsed() >= Self::PAUSE);
        if pass {
            *last = Some(Instant::now());
        }
        pass
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_line_within_the_interval_is_suppressed() {
        let throttle = Throttle::default();
        assert!(throttle.pass());
        assert!(!throttle.pass());
    }
}
