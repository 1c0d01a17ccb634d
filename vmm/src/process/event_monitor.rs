// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Stream of events as JSON, one event per line, with Cloud Hypervisor's fields.
//!
//! A [`QueuedWriter`] writes the events, so that no thread of the VM waits for a reader.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl};
use serde::Serialize;

use crate::process::queued_writer::QueuedWriter;

/// Maximum bytes of queued events: about a thousand events. Further events are lost and counted.
const MAX_WAITING: u64 = 256 << 10;
/// Maximum bytes of an event, including its line break. The maximum is less than a page, because a reader may have a buffer of one page and
/// fail on longer lines.
const MAX_EVENT: usize = 4095;
/// Maximum number of events that a guest may cause in a burst: see [`EventMonitor::event_of_guest`].
const MAX_OF_GUEST: u32 = 64;
/// Time after which a guest may cause one more event.
const PACE_OF_GUEST: Duration = Duration::from_millis(125);

/// Writer of events. Clones write to the same file. Without a file, events are dropped.
#[derive(Clone)]
pub struct EventMonitor {
    queue: Option<Arc<QueuedWriter>>,
    /// True if the last event was lost. In this case, the log has reported the loss.
    losing: Arc<AtomicBool>,
    allowance: Arc<Mutex<Allowance>>,
    start: Instant,
}

/// Allowance for events that the guest causes: a token bucket, which refills with time.
struct Allowance {
    events: u32,
    /// Time of the last refill. The time since then counts towards the next token.
    filled: Instant,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Self { events: MAX_OF_GUEST, filled: now }
    }

    /// Takes the token of one event from the bucket. Returns false if the bucket is empty.
    fn take(&mut self, now: Instant) -> bool {
        while self.events < MAX_OF_GUEST && now.saturating_duration_since(self.filled) >= PACE_OF_GUEST {
            self.events += 1;
            self.filled += PACE_OF_GUEST;
        }
        if self.events == MAX_OF_GUEST {
            self.filled = now;
        }
        self.events.checked_sub(1).inspect(|left| self.events = *left).is_some()
    }
}

#[derive(Clone, Copy, Serialize)]
struct Timestamp {
    /// Seconds since the program started.
    secs: u64,
    nanos: u32,
}

#[derive(Serialize)]
struct Event<'a, P: Serialize> {
    timestamp: Timestamp,
    source: &'a str,
    event: &'a str,
    properties: Option<P>,
}

/// Replacement for properties that are too long.
#[derive(Serialize)]
struct Omitted {
    omitted_bytes: usize,
}

#[derive(Serialize)]
struct Lost {
    count: u64,
}

impl EventMonitor {
    /// Creates a monitor that drops events.
    pub fn none() -> Self {
        let start = Instant::now();
        Self { queue: None, losing: Arc::default(), allowance: Arc::new(Mutex::new(Allowance::new(start))), start }
    }

    /// Creates a monitor that writes to `file`.
    ///
    /// # Errors
    /// The file is not open for writing, or the process cannot start more threads.
    pub fn new(file: File) -> io::Result<Self> {
        if fcntl_getfl(&file)?.intersection(OFlags::RWMODE) == OFlags::RDONLY {
            return Err(io::Error::other("the file is not open for writing: open it for writing"));
        }
        let monitor = Self::none();
        let start = monitor.start;
        // Reports the number of lost events as soon as the queue has room.
        let notice = move |count| line(start, "event-monitor", "lost", Some(Lost { count })).unwrap_or_default();
        let queue = QueuedWriter::of_lines("--event-monitor", file, MAX_WAITING, notice)?;
        Ok(Self { queue: Some(Arc::new(queue)), ..monitor })
    }

    /// Writes an event without properties.
    pub fn event(&self, source: &str, event: &str) {
        self.event_with(source, event, None::<()>);
    }

    /// Writes an event. If the disk is full, or a pipe is closed or full, the event is lost, but the VM continues.
    pub fn event_with<P: Serialize>(&self, source: &str, event: &str, properties: Option<P>) {
        let Some(queue) = &self.queue else { return };
        let lost = match line(self.start, source, event, properties) {
            Some(line) => !queue.push_lines(&line),
            None => {
                queue.add_lost(1);
                true
            }
        };
        if lost && !self.losing.load(Ordering::Relaxed) {
            log::warn!(
                "event {source}:{event} is lost, and later events may be lost: the event stream was not read in time, or could not be written; check its reader, or the free space of its disk"
            );
        }
        self.losing.store(lost, Ordering::Relaxed);
    }

    /// Returns the number of events lost so far.
    pub fn lost(&self) -> u64 {
        self.queue.as_ref().map_or(0, |queue| queue.lost())
    }

    /// Writes an event that a guest can cause at any rate. A guest may cause a burst of 64 events, and then 8 events per second. Further
    /// events are lost. So the guest can neither fill the host's disk nor crowd out other events.
    pub fn event_of_guest<P: Serialize>(&self, source: &str, event: &str, properties: Option<P>) {
        let Some(queue) = &self.queue else { return };
        if self.allowance.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now()) {
            self.event_with(source, event, properties);
        } else {
            queue.add_lost(1);
        }
    }

    /// Waits until all queued events are written, but at most `limit`.
    pub fn flush(&self, limit: Duration) {
        let Some(queue) = &self.queue else { return };
        if !queue.drain(limit, limit) {
            log::warn!(
                "--event-monitor: the last events are lost: the event stream was not read in time, or could not be written; check its reader, or the free space of its disk"
            );
        }
    }
}

/// Returns the line of an event. Returns `None` if the event cannot be serialised.
fn line<P: Serialize>(start: Instant, source: &str, event: &str, properties: Option<P>) -> Option<Vec<u8>> {
    let elapsed = start.elapsed();
    let timestamp = Timestamp { secs: elapsed.as_secs(), nanos: elapsed.subsec_nanos() };
    let write = |line: Result<Vec<u8>, serde_json::Error>| {
        line.inspect_err(|error| log::warn!("event {source}:{event} is lost, because it cannot be converted to JSON: {error}; this is an error in Carom: report it")).ok()
    };
    let mut line = write(serde_json::to_vec(&Event { timestamp, source, event, properties }))?;
    if line.len() >= MAX_EVENT {
        log::warn!(
            "event {source}:{event}: its properties are omitted because the line has {} bytes, more than the maximum of {MAX_EVENT}",
            line.len()
        );
        let properties = Some(Omitted { omitted_bytes: line.len() });
        line = write(serde_json::to_vec(&Event { timestamp, source, event, properties }))?;
    }
    line.push(b'\n');
    Some(line)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Seek};
    use std::os::fd::OwnedFd;

    use serde_json::Value;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn properties_that_make_an_event_too_long_are_left_out() {
        let mut file = tempfile::tempfile().unwrap();
        let monitor = EventMonitor::new(file.try_clone().unwrap()).unwrap();
        for len in [4000, 4096, 100_000] {
            monitor.event_with("vm", "failed", Some("x".repeat(len)));
        }
        monitor.flush(TIMEOUT);
        file.rewind().unwrap();
        let lines: Vec<String> = BufReader::new(file).lines().map(Result::unwrap).collect();
        assert!(lines.iter().all(|line| line.len() < MAX_EVENT), "{lines:?}");
        let events: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(events[0]["properties"].as_str().unwrap().len(), 4000);
        for event in &events[1..] {
            assert_eq!((&event["source"], &event["event"]), (&"vm".into(), &"failed".into()));
            assert!(event["properties"]["omitted_bytes"].as_u64().unwrap() > 4096, "{event}");
        }
    }

    #[test]
    fn events_are_lines_of_json_with_cloud_hypervisors_fields() {
        let mut file = tempfile::tempfile().unwrap();
        let monitor = EventMonitor::new(file.try_clone().unwrap()).unwrap();
        monitor.event("vm", "booted");
        monitor.event_with("virtio-iommu", "counters", Some([1, 2]));
        monitor.flush(TIMEOUT);
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0]["source"], "vm");
        assert_eq!(lines[0]["event"], "booted");
        assert!(lines[0]["properties"].is_null());
        assert!(lines[0]["timestamp"]["secs"].is_u64());
        assert_eq!(lines[1]["properties"][1], 2);
    }

    #[test]
    fn reader_that_stops_loses_events_and_learns_how_many() {
        let (reader, writer) = io::pipe().unwrap();
        let monitor = EventMonitor::new(File::from(OwnedFd::from(writer))).unwrap();
        // The events are large, so that a pipe of 64 KiB holds only a few events.
        let big = "x".repeat(2_000);
        const SENT: u64 = 1_000;
        (0..SENT).for_each(|number| monitor.event_with("vm", "big", Some((number, &big))));
        let refused = monitor.lost();
        assert!((700..SENT).contains(&refused), "{refused}");

        // The reader now reads the queued events, and then the number of lost events. No further event is needed for the report of this
        // number.
        let mut lines =
            BufReader::new(reader).lines().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        let (mut seen, mut lost) = (0, 0);
        while seen + lost < SENT {
            let line = lines.next().unwrap();
            match line["event"].as_str().unwrap() {
                "lost" => lost += line["properties"]["count"].as_u64().unwrap(),
                event => {
                    assert_eq!((event, line["properties"][0].as_u64()), ("big", Some(seen + lost)));
                    seen += 1;
                }
            }
        }
        assert_eq!(lost, refused);
        monitor.event("vm", "after");
        assert_eq!(lines.next().unwrap()["event"], "after");
        assert_eq!(monitor.lost(), refused);
    }

    #[test]
    fn guest_events_are_limited_and_recover_with_time() {
        let start = Instant::now();
        let mut allowance = Allowance::new(start);
        let mut taken = |after: Duration| (0..1000).filter(|_| allowance.take(start + after)).count();
        assert_eq!(taken(Duration::ZERO), 64);
        assert_eq!((taken(Duration::from_millis(124)), taken(Duration::from_millis(126))), (0, 1));
        assert_eq!(taken(Duration::from_millis(1126)), 8);
        assert_eq!(taken(Duration::from_secs(3600)), 64, "the bucket never holds more than 64");
        assert_eq!(taken(Duration::from_millis(3_600_100)), 0);
    }

    #[test]
    fn excess_guest_events_are_dropped_and_counted() {
        let mut file = tempfile::tempfile().unwrap();
        let monitor = EventMonitor::new(file.try_clone().unwrap()).unwrap();
        const SENT: u64 = 500;
        (0..SENT).for_each(|number| monitor.event_of_guest("virtio-device", "reset", Some([number])));
        monitor.event("vm", "paused");
        monitor.flush(TIMEOUT);
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let of_guest = lines.iter().filter(|line| line["event"] == "reset").count() as u64;
        let lost: u64 = lines
            .iter()
            .filter(|line| line["event"] == "lost")
            .map(|line| line["properties"]["count"].as_u64().unwrap())
            .sum();
        assert!((64..SENT).contains(&of_guest), "{of_guest}");
        assert_eq!(of_guest + lost, SENT);
        assert_eq!(lines.last().unwrap()["event"], "paused");
    }

    #[test]
    fn closed_pipe_loses_only_the_events() {
        let (reader, writer) = io::pipe().unwrap();
        let monitor = EventMonitor::new(File::from(OwnedFd::from(writer))).unwrap();
        drop(reader);
        // After the first failure, the writer's thread still takes events from the queue.
        for count in 1..=3 {
            monitor.event("vm", "booted");
            assert!(monitor.queue.as_ref().unwrap().drain(TIMEOUT, TIMEOUT), "events wait for ever");
            assert_eq!(monitor.lost(), count);
        }
    }

    #[test]
    fn file_that_cannot_be_written_is_refused() {
        let (reader, _writer) = io::pipe().unwrap();
        let error = EventMonitor::new(File::from(OwnedFd::from(reader))).err().unwrap();
        assert!(error.to_string().contains("writing"), "{error}");
    }
}
