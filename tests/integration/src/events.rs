// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM's event stream (`--event-monitor path=FILE`): a sequence of JSON objects in Cloud Hypervisor's format.

use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Event of the VMM.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Event {
    /// Part of the VMM that reports the event, such as `vm` or `virtio-iommu`.
    pub source: String,
    /// Name of the event, such as `booted` or `counters`.
    pub event: String,
    /// Additional data, or null.
    #[serde(default)]
    pub properties: Value,
}

/// Number of requests of each kind that the virtio-iommu device has served.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requests {
    /// MAP requests.
    pub map: u64,
    /// MAP_LIST requests. Results of earlier builds do not contain this count.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub map_list: u64,
    /// UNMAP requests.
    pub unmap: u64,
    /// WINDOW_ADD requests.
    pub window_add: u64,
    /// WINDOW_DEL requests.
    pub window_del: u64,
    /// ATTACH requests.
    pub attach: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Requests {
    /// Returns the number of requests that map memory.
    #[must_use]
    pub fn maps(self) -> u64 {
        self.map + self.map_list
    }

    /// Returns the number of requests of each kind since `other` was counted.
    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self {
            map: self.map - other.map,
            map_list: self.map_list - other.map_list,
            unmap: self.unmap - other.unmap,
            window_add: self.window_add - other.window_add,
            window_del: self.window_del - other.window_del,
            attach: self.attach - other.attach,
        }
    }
}

/// The properties of the event `counters` of the source `virtio-iommu`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Requests received.
    pub requests: Requests,
    /// Requests that failed.
    pub failed: Requests,
    /// Bytes that MAP requests have mapped and that are still mapped.
    pub mapped_bytes: u64,
    /// Maximum of `mapped_bytes` so far.
    pub peak_mapped_bytes: u64,
    /// Bytes of window memory that chunks back now.
    pub window_bytes: u64,
    /// Maximum of `window_bytes` so far.
    pub peak_window_bytes: u64,
    /// Number of parked chunks that a guest reused after a reset of the VM.
    #[serde(default)]
    pub unparked_chunks: u64,
    /// Number of calls to the host's kernel that mapped memory.
    pub host_maps: u64,
    /// Number of stopped device accesses that the virtio-iommu has reported or will report to the guest's driver.
    #[serde(default)]
    pub faults: u64,
    /// Number of stopped device accesses that the virtio-iommu does not report, because there were too many.
    #[serde(default)]
    pub faults_dropped: u64,
}

/// Reads an event file. If the file does not exist, returns no events.
///
/// # Errors
/// Fails if the file cannot be read, or if it contains anything that is not an event.
pub fn read(path: &Path) -> Result<Vec<Event>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&text).with_context(|| format!("cannot parse the events in {}", path.display()))
}

fn parse(text: &str) -> Result<Vec<Event>> {
    Ok(serde_json::Deserializer::from_str(text).into_iter().collect::<Result<_, _>>()?)
}

/// Returns all counters among the events, in order.
///
/// # Errors
/// Fails if a counters event lacks a counter.
pub fn counters(events: &[Event]) -> Result<Vec<Counters>> {
    events
        .iter()
        .filter(|event| event.source == "virtio-iommu" && event.event == "counters")
        .map(|event| Counters::deserialize(&event.properties).context("invalid `counters` event"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_follow_one_another_with_any_white_space() {
        let events = parse(
            r#"{"timestamp":{"secs":1,"nanos":2},"source":"vm","event":"booted","properties":null}

            {"timestamp":{"secs":1,"nanos":2},"source":"virtio-iommu","event":"counters","properties":{"requests":
            {"map":1,"unmap":2,"window_add":3,"window_del":4,"attach":5,"probe":6},"mapped_bytes":7,"peak_mapped_bytes":8,
            "failed":{"map":0,"unmap":0,"window_add":1,"window_del":0,"attach":0},"window_bytes":9,
            "peak_window_bytes":10,"host_maps":11}}"#,
        )
        .unwrap();
        assert_eq!(events.len(), 2);
        let counters = counters(&events).unwrap();
        assert_eq!(
            counters[0].requests,
            Requests { map: 1, map_list: 0, unmap: 2, window_add: 3, window_del: 4, attach: 5 }
        );
        assert_eq!(counters[0].requests.minus(counters[0].failed).window_add, 2);
        assert_eq!((counters[0].mapped_bytes, counters[0].peak_mapped_bytes, counters[0].window_bytes), (7, 8, 9));
        assert_eq!((counters[0].peak_window_bytes, counters[0].host_maps), (10, 11));
    }

    #[test]
    fn missing_counter_is_an_error() {
        let events =
            parse(r#"{"source":"virtio-iommu","event":"counters","properties":{"requests":{"map":1}}}"#).unwrap();
        assert!(counters(&events).is_err());
    }
}
