// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters in the form of `vm.counters`: a number for each name.

use std::collections::BTreeMap;

use devices::pci::PciAddress;
use devices::virtio::iommu::IommuStatus;
use iommu_bounce::{Counters, Report, RequestCounts};
use serde::Serialize;
use serde_json::Value;

/// Returns the same map as [`flatten`], but much faster. The speed matters, because `vm.info` includes these counters, and many clients may
/// ask for `vm.info` at the same time.
pub(super) fn of_engine(counters: &Counters) -> BTreeMap<String, u64> {
    let others = [
        ("faults", counters.faults),
        ("faults_dropped", counters.faults_dropped),
        ("host_errors", counters.host_errors),
        ("host_maps", counters.host_maps),
        ("host_unmaps", counters.host_unmaps),
        ("lost_chunks", counters.lost_chunks),
        ("mapped_bytes", counters.mapped_bytes),
        ("mappings", counters.mappings),
        ("merged_unmaps", counters.merged_unmaps),
        ("parked_chunks", counters.parked_chunks),
        ("peak_mapped_bytes", counters.peak_mapped_bytes),
        ("peak_pinned_bytes", counters.peak_pinned_bytes),
        ("peak_window_bytes", counters.peak_window_bytes),
        ("pinned_bytes", counters.pinned_bytes),
        ("stuck_ranges", counters.stuck_ranges),
        ("unparked_chunks", counters.unparked_chunks),
        ("window_bytes", counters.window_bytes),
    ];
    let requests = REQUESTS.into_iter().zip(in_order(&counters.requests));
    let failed = FAILED.into_iter().zip(in_order(&counters.failed));
    others.into_iter().chain(requests).chain(failed).map(|(name, number)| (name.to_string(), number)).collect()
}

fn in_order(of: &RequestCounts) -> [u64; 9] {
    [of.attach, of.detach, of.map, of.unmap, of.probe, of.window_add, of.window_del, of.map_list, of.invalid]
}

/// Names of the request counters, in the order of `in_order`.
const REQUESTS: [&str; 9] = [
    "requests_attach",
    "requests_detach",
    "requests_map",
    "requests_unmap",
    "requests_probe",
    "requests_window_add",
    "requests_window_del",
    "requests_map_list",
    "requests_invalid",
];
/// Names of the counters of failed requests, in the order of `in_order`.
const FAILED: [&str; 9] = [
    "failed_attach",
    "failed_detach",
    "failed_map",
    "failed_unmap",
    "failed_probe",
    "failed_window_add",
    "failed_window_del",
    "failed_map_list",
    "failed_invalid",
];

/// Key of the program's own counters in `vm.counters`. The other keys are device IDs.
pub(super) const VMM: &str = "_vmm";

/// Returns the program's own counters.
pub(super) fn of_vmm(lost_log_lines: u64, lost_events: u64) -> BTreeMap<String, u64> {
    [("lost_log_lines", lost_log_lines), ("lost_events", lost_events)].map(|(name, count)| (name.into(), count)).into()
}

/// Returns the counters of a virtio-iommu.
pub(super) fn of_iommu(status: &IommuStatus) -> BTreeMap<String, u64> {
    let mut named = of_engine(&status.counters);
    named.insert("window_budget_bytes".into(), status.budget);
    named.insert("window_held_bytes".into(), status.held_window_bytes);
    named.insert("poll_stalls".into(), status.poll_stalls.count);
    named.insert("poll_stalled_ns".into(), status.poll_stalls.sum_ns);
    named
}

/// Returns the counters of the device that the guest sees at `address`. The counters are the amount of memory that the device can access,
/// and the number of requests that named the device. The counters `domain_…` are the number of requests for the device's domain, and the
/// number of the domain's mappings. Returns `None` if the device is not behind the virtio-iommu.
pub(super) fn of_endpoint(engine: &Report, address: &str) -> Option<BTreeMap<String, u64>> {
    let endpoint =
        engine.endpoints.iter().find(|endpoint| PciAddress::of_endpoint(endpoint.endpoint).to_string() == address)?;
    let activity = flatten(&endpoint.activity);
    let mut named: BTreeMap<_, _> = activity.into_iter().filter(|(name, _)| !name.starts_with("latency")).collect();
    named.insert("mapped_bytes".into(), endpoint.mapped_bytes);
    named.insert("window_bytes".into(), endpoint.window_bytes);
    named.insert("parked_bytes".into(), endpoint.parked_bytes);
    named.insert("pinned_bytes".into(), endpoint.pinned_bytes);
    let domain = engine.domains.iter().find(|domain| Some(domain.domain) == endpoint.domain);
    if let Some(domain) = domain {
        for (name, of) in [("requests", &domain.activity.requests), ("failed", &domain.activity.failed)] {
            named.extend(flatten(of).into_iter().map(|(kind, count)| (format!("domain_{name}_{kind}"), count)));
        }
        named.insert("domain_mappings".into(), domain.mappings);
    }
    Some(named)
}

/// Returns all numbers in `counters`. The name of a nested number starts with its parent's name, such as `requests_map`.
pub(super) fn flatten<T: Serialize>(counters: &T) -> BTreeMap<String, u64> {
    let mut flat = BTreeMap::new();
    if let Ok(value) = serde_json::to_value(counters) {
        collect(String::new(), &value, &mut flat);
    }
    flat
}

fn collect(name: String, value: &Value, flat: &mut BTreeMap<String, u64>) {
    match value {
        Value::Object(fields) => {
            for (field, value) in fields {
                let name = if name.is_empty() { field.clone() } else { format!("{name}_{field}") };
                collect(name, value, flat);
            }
        }
        value => flat.extend(value.as_u64().map(|number| (name, number))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_counter_of_an_engine_is_named() {
        let requests = |first: u64| RequestCounts {
            attach: first,
            detach: first + 1,
            map: first + 2,
            unmap: first + 3,
            probe: first + 4,
            window_add: first + 5,
            window_del: first + 6,
            map_list: first + 7,
            invalid: first + 8,
        };
        let mut counters = IommuStatus::default().counters;
        counters.requests = requests(100);
        counters.failed = requests(200);
        counters.mappings = 1;
        counters.mapped_bytes = 2;
        counters.peak_mapped_bytes = 3;
        counters.window_bytes = 4;
        counters.peak_window_bytes = 5;
        counters.parked_chunks = 6;
        counters.unparked_chunks = 7;
        counters.host_maps = 8;
        counters.host_unmaps = 9;
        counters.host_errors = 10;
        counters.stuck_ranges = 11;
        counters.lost_chunks = 12;
        counters.faults = 13;
        counters.faults_dropped = 14;
        counters.merged_unmaps = 15;
        counters.pinned_bytes = 16;
        counters.peak_pinned_bytes = 17;
        assert_eq!(of_engine(&counters), flatten(&counters));
    }

    #[test]
    fn stalls_of_the_polling_thread_are_counted() {
        let mut status = IommuStatus::default();
        status.poll_stalls.record(std::time::Duration::from_micros(300));
        status.poll_stalls.record(std::time::Duration::from_micros(500));
        let named = of_iommu(&status);
        assert_eq!((named["poll_stalls"], named["poll_stalled_ns"]), (2, 800_000));
    }

    #[test]
    fn numbers_are_named_after_their_place() {
        let flat = flatten(&json!({"requests": {"map": 3, "unmap": 4}, "mappings": 5, "name": "x", "list": [1]}));
        let expected = [("mappings", 5), ("requests_map", 3), ("requests_unmap", 4)];
        assert_eq!(flat.into_iter().collect::<Vec<_>>(), expected.map(|(name, value)| (name.to_string(), value)));
    }
}
