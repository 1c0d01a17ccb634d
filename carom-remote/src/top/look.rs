// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Samples of the VM's state, and rates between samples.

use std::collections::VecDeque;
use std::time::Instant;

use carom_api::IommuBounceConfig;
use carom_api::types::{VmCounters, VmInfo};

/// Maximum number of samples that the history keeps. The view draws a curve of these samples.
const KEPT: usize = 120;

/// Requests whose rates are displayed. Each entry has the name of a counter, and the heading of its rate.
pub(crate) const RATES: [(&str, &str); 4] = [
    ("requests_map", "map/s"),
    ("requests_unmap", "unmap/s"),
    ("requests_window_add", "window add/s"),
    ("requests_window_del", "window del/s"),
];

/// End of the names of counters of MAP requests.
const MAP: &str = "requests_map";

/// ID of the virtio-iommu.
const IOMMU: &str = IommuBounceConfig::ID;

/// Sample of the VM's state.
pub(crate) struct Look {
    at: Instant,
    /// Answer of `vm.info`, if a VM exists.
    pub(crate) info: Option<VmInfo>,
    counters: VmCounters,
}

impl Look {
    pub(crate) fn new(at: Instant, info: Option<VmInfo>, counters: VmCounters) -> Self {
        Self { at, info, counters }
    }

    /// Returns a counter of the virtio-iommu, or 0 if the VM has no virtio-iommu.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.counter_of(IOMMU, name).unwrap_or(0)
    }

    /// Returns a counter of a device.
    pub(crate) fn counter_of(&self, device: &str, name: &str) -> Option<u64> {
        self.counters.get(device)?.get(name).copied()
    }
}

/// Latest samples, the newest last.
#[derive(Default)]
pub(crate) struct History(VecDeque<Look>);

impl History {
    pub(crate) fn add(&mut self, look: Look) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(look);
    }

    pub(crate) fn newest(&self) -> Option<&Look> {
        self.0.back()
    }

    /// Returns the increase per second of a virtio-iommu counter between the last two samples.
    pub(crate) fn rate(&self, name: &str) -> u64 {
        self.rates(name).last().unwrap_or(0)
    }

    /// Returns the increase per second of a virtio-iommu counter, for each pair of successive samples. The newest value is last.
    pub(crate) fn rates(&self, name: &str) -> impl DoubleEndedIterator<Item = u64> {
        self.rates_of(IOMMU, name).map(|rate| rate.unwrap_or(0))
    }

    /// Returns the increase per second of a device's counter between the last two samples, if the device has the counter.
    pub(crate) fn rate_of(&self, device: &str, name: &str) -> Option<u64> {
        self.rates_of(device, name).last().flatten()
    }

    /// Returns a counter's rate for each pair of successive samples. If the counter decreased, the newer sample is from another VM, or the
    /// device has another domain. In this case, the rate is 0. The rate of a counter of MAP requests includes MAP_LIST requests.
    fn rates_of(&self, device: &str, name: &str) -> impl DoubleEndedIterator<Item = Option<u64>> {
        self.0.iter().zip(self.0.iter().skip(1)).map(move |(before, after)| {
            let seconds = after.at.saturating_duration_since(before.at).as_secs_f64();
            let lists = name.ends_with(MAP).then(|| format!("{name}_list"));
            let count = |look: &Look| {
                let lists = lists.as_ref().and_then(|lists| look.counter_of(device, lists));
                Some(look.counter_of(device, name)? + lists.unwrap_or(0))
            };
            Some(per_second(count(after)?.saturating_sub(count(before).unwrap_or(0)), seconds))
        })
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "the rate is only displayed"
)]
fn per_second(grown: u64, seconds: f64) -> u64 {
    if seconds > 0.0 { (grown as f64 / seconds).round() as u64 } else { 0 }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    /// Returns a sample of a running VM with bounce windows and with a drive behind the virtio-iommu.
    pub(crate) fn running(at: Instant, maps: u64) -> Look {
        let info = json!({
            "config": {"payload": {"kernel": "/k"}, "cpus": {"boot_vcpus": 2, "max_vcpus": 2}},
            "state": "Running", "memory_actual_size": 2_u64 << 30, "device_tree": {
                "drive": {"id": "drive", "resources": [], "children": [], "pci_bdf": "0000:00:02.0"}},
            "iommu_bounce": {"budget": 64 << 20, "max": 1 << 30, "threshold": 65536, "threshold_write": 0, "max_mapped": 96 << 20, "chunk_size": 2 << 20, "hugepages": false,
                "held_bytes": 12 << 20, "counters": {}, "windows": [{"domain": 1, "endpoints": ["0000:00:02.0"], "read_chunks": 1,
                "write_chunks": 2, "read_write_chunks": 0, "bytes": 6 << 20}]}});
        let counters = json!({"_iommu": {"requests_map": maps, "mapped_bytes": 3 << 20, "window_bytes": 6 << 20,
            "peak_mapped_bytes": 5 << 20, "pinned_bytes": 9 << 20, "peak_pinned_bytes": 11 << 20},
            "drive": {"domain_requests_map": maps / 2, "domain_requests_unmap": 7, "pinned_bytes": 9 << 20, "requests_map": 0}});
        Look::new(at, Some(serde_json::from_value(info).unwrap()), serde_json::from_value(counters).unwrap())
    }

    #[test]
    fn rate_of_map_requests_includes_lists() {
        let (start, mut history) = (Instant::now(), History::default());
        for (seconds, count) in [(0, 10), (2, 20)] {
            let counters = json!({"_iommu": {"requests_map": count, "requests_map_list": count * 3},
                "drive": {"domain_requests_map": count, "domain_requests_map_list": count}});
            let counters = serde_json::from_value(counters).unwrap();
            history.add(Look::new(start + Duration::from_secs(seconds), None, counters));
        }
        assert_eq!((history.rate("requests_map"), history.rate_of("drive", "domain_requests_map")), (20, Some(10)));
    }

    #[test]
    fn rates_are_per_second_and_never_negative() {
        let start = Instant::now();
        let mut history = History::default();
        assert_eq!(history.rate("requests_map"), 0);
        for (seconds, maps) in [(0, 100), (2, 300), (4, 1300), (6, 5)] {
            history.add(running(start + Duration::from_secs(seconds), maps));
        }
        assert_eq!(history.rates("requests_map").collect::<Vec<_>>(), [100, 500, 0]);
        assert_eq!(history.rate("requests_unmap"), 0);
        assert_eq!(history.rate_of("drive", "domain_requests_unmap"), Some(0));
        assert_eq!(history.rate_of("drive", "nothing"), None);
        assert_eq!(history.rate_of("none", "domain_requests_unmap"), None);
    }

    #[test]
    fn only_the_newest_samples_are_kept() {
        let mut history = History::default();
        (0..500).for_each(|maps| history.add(running(Instant::now(), maps)));
        assert_eq!(history.0.len(), KEPT);
    }
}
