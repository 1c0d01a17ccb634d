// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Limit on the rate of log lines. Without this limit, a guest, a device, or a library that logs each mistake of a driver could flood the
//! log.
//!
//! Each place in the code has an allowance of lines, which refills with time. Lines beyond the allowance are omitted. The next line that
//! the place writes reports the number of omitted lines. Debugging lines (`-vv`, `-vvv`) are never omitted.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use log::{Level, Log, Metadata, Record};

/// Maximum number of lines that one place in the code may write in a burst.
const AT_ONCE: u32 = 20;
/// Time after which a place may write one more line.
const PACE: Duration = Duration::from_secs(2);

/// Place in the code: source file or module, and line.
type Place = (Option<&'static str>, Option<u32>);

/// Allowance of a place.
struct Allowance {
    lines: u32,
    /// Time of the last refill. The time since then counts towards the next line.
    filled: Instant,
    left_out: u64,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Self { lines: AT_ONCE, filled: now, left_out: 0 }
    }

    /// Returns the number of lines that were omitted since the last written line. Returns `None` if this line must be omitted.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let more = now.saturating_duration_since(self.filled).as_millis() / PACE.as_millis();
        let more = u32::try_from(more).unwrap_or(u32::MAX);
        if more > 0 {
            self.lines = self.lines.saturating_add(more).min(AT_ONCE);
            self.filled += PACE.saturating_mul(more);
        }
        match self.lines.checked_sub(1) {
            Some(lines) => {
                self.lines = lines;
                Some(std::mem::take(&mut self.left_out))
            }
            None => {
                self.left_out += 1;
                None
            }
        }
    }
}

/// Log that limits each place in the code to its allowance.
pub struct LogFlood<L> {
    log: L,
    /// Allowance of each place. The code has a fixed number of places, so the map cannot grow without limit.
    places: Mutex<HashMap<Place, Allowance>>,
}

impl<L: Log> LogFlood<L> {
    /// Wraps `log`.
    pub fn new(log: L) -> Self {
        Self { log, places: Mutex::default() }
    }
}

impl<L: Log> Log for LogFlood<L> {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.log.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        if record.level() > Level::Info {
            return self.log.log(record);
        }
        let place = (record.file_static().or(record.module_path_static()), record.line());
        let now = Instant::now();
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let passes = places.entry(place).or_insert_with(|| Allowance::new(now)).take(now);
        drop(places);
        match passes {
            None => {}
            Some(0) => self.log.log(record),
            Some(left_out) => {
                let args = record.args();
                let mut copy = Record::builder();
                copy.metadata(record.metadata().clone()).file(record.file()).line(record.line());
                copy.module_path(record.module_path());
                self.log.log(&copy.args(format_args!("{args} ({left_out} lines like this were omitted)")).build());
            }
        }
    }

    fn flush(&self) {
        self.log.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Lines(Mutex<Vec<String>>);

    impl Log for Lines {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() != "quiet"
        }
        fn log(&self, record: &Record<'_>) {
            self.0.lock().unwrap().push(record.args().to_string());
        }
        fn flush(&self) {}
    }

    fn write(log: &LogFlood<Lines>, level: Level, target: &str, line: u32, text: &str) {
        let mut record = Record::builder();
        record.level(level).target(target).file_static(Some("x.rs")).line(Some(line));
        log.log(&record.args(format_args!("{text}")).build());
    }

    fn take(log: &LogFlood<Lines>) -> Vec<String> {
        std::mem::take(&mut log.log.0.lock().unwrap())
    }

    #[test]
    fn each_place_writes_only_its_allowance_of_lines() {
        let log = LogFlood::new(Lines::default());
        let start = Instant::now();
        for number in 0..1000 {
            write(&log, Level::Error, "x", 1, &number.to_string());
        }
        let more = usize::try_from(start.elapsed().as_millis() / PACE.as_millis()).unwrap();
        let lines = take(&log);
        assert!((20..=20 + more).contains(&lines.len()), "{} lines, {more} of them later", lines.len());
        write(&log, Level::Warn, "x", 2, "another place");
        write(&log, Level::Warn, "quiet", 3, "filtered");
        assert_eq!(take(&log), ["another place"]);
        (0..100).for_each(|_| write(&log, Level::Debug, "x", 4, "closely"));
        assert_eq!(take(&log).len(), 100);
    }

    #[test]
    fn allowance_refills_and_omitted_lines_are_reported() {
        let start = Instant::now();
        let mut allowance = Allowance::new(start);
        let taken = (0..1000).filter(|_| allowance.take(start).is_some()).count();
        assert_eq!(taken, 20);
        assert_eq!(allowance.take(start + PACE - Duration::from_millis(1)), None);
        assert_eq!(allowance.take(start + PACE), Some(981));
        assert_eq!(allowance.take(start + PACE), None);
        let later = start + PACE * 100_000;
        assert_eq!((0..1000).filter(|_| allowance.take(later).is_some()).count(), 20);
        assert_eq!(allowance.take(later + PACE), Some(980));
    }
}
