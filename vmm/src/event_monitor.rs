// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A stream of events as JSON, one a line, with Cloud Hypervisor's fields.

use std::fs::File;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;

/// Where events are written; clones write to the same place. Without a file, events are dropped.
#[derive(Clone)]
pub struct EventMonitor {
    file: Option<Arc<Mutex<File>>>,
    start: Instant,
}

#[derive(Serialize)]
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

impl EventMonitor {
    /// A monitor that writes to `file`.
    pub fn new(file: Option<File>) -> Self {
        Self { file: file.map(|file| Arc::new(Mutex::new(file))), start: Instant::now() }
    }

    /// Writes an event without properties.
    pub fn event(&self, source: &str, event: &str) {
        self.event_with(source, event, None::<()>);
    }

    /// Writes an event. A full disk or a closed pipe costs the event, not the VM.
    pub fn event_with<P: Serialize>(&self, source: &str, event: &str, properties: Option<P>) {
        let Some(file) = &self.file else { return };
        let elapsed = self.start.elapsed();
        let timestamp = Timestamp { secs: elapsed.as_secs(), nanos: elapsed.subsec_nanos() };
        let written = serde_json::to_vec(&Event { timestamp, source, event, properties })
            .map_err(std::io::Error::other)
            .and_then(|mut line| {
                line.push(b'\n');
                file.lock().unwrap_or_else(PoisonError::into_inner).write_all(&line)
            });
        if let Err(error) = written {
            log::warn!("event {source}:{event} is lost: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use super::*;

    #[test]
    fn events_are_lines_of_json_with_cloud_hypervisors_fields() {
        let mut file = tempfile::tempfile().unwrap();
        let monitor = EventMonitor::new(Some(file.try_clone().unwrap()));
        monitor.event("vm", "booted");
        monitor.event_with("virtio-iommu", "counters", Some([1, 2]));
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0]["source"], "vm");
        assert_eq!(lines[0]["event"], "booted");
        assert!(lines[0]["properties"].is_null());
        assert!(lines[0]["timestamp"]["secs"].is_u64());
        assert_eq!(lines[1]["properties"][1], 2);
    }
}
