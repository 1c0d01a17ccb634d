// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The latencies of the virtio-iommu's engine, and its values for each domain and endpoint, in the form of the API's answers.

use carom_api::types::{DomainFigures, EndpointFigures, Latency, LatencyBucket};
use devices::pci::PciAddress;
use iommu_bounce::{DomainReport, EndpointReport, Histogram, HostLatency, RequestLatency};

use super::counters::flatten;

/// Returns the latency histogram of each kind of request, with the kind's name.
pub(crate) fn of_requests(latency: &RequestLatency) -> [(&'static str, &Histogram); 8] {
    let RequestLatency { attach, detach, map, unmap, probe, window_add, window_del, map_list } = latency;
    [
        ("attach", attach),
        ("detach", detach),
        ("map", map),
        ("unmap", unmap),
        ("probe", probe),
        ("window_add", window_add),
        ("window_del", window_del),
        ("map_list", map_list),
    ]
}

/// Returns the latency histogram of each host call, with the call's name.
pub(crate) fn of_host(latency: &HostLatency) -> [(&'static str, &Histogram); 2] {
    let HostLatency { map, unmap } = latency;
    [("map", map), ("unmap", unmap)]
}

/// Returns the classes of a histogram: for each class, the maximum latency in nanoseconds and the number of samples.
pub(crate) fn classes(histogram: &Histogram) -> impl Iterator<Item = (u64, u64)> {
    let last = histogram.buckets.len() - 1;
    let end = move |class: usize| if class == last { u64::MAX } else { (2 << class) - 1 };
    histogram.buckets.iter().enumerate().map(move |(class, count)| (end(class), *count))
}

/// Converts named histograms to the form of the API's answers.
pub(super) fn latencies<const N: usize>(named: [(&str, &Histogram); N]) -> std::collections::BTreeMap<String, Latency> {
    named.into_iter().map(|(name, histogram)| (name.to_string(), latency(histogram))).collect()
}

fn latency(histogram: &Histogram) -> Latency {
    let filled = classes(histogram).filter(|(_, count)| *count != 0);
    Latency {
        count: histogram.count,
        sum_ns: histogram.sum_ns,
        max_ns: histogram.max_ns,
        buckets: filled.map(|(end, count)| LatencyBucket { up_to_ns: end.min(histogram.max_ns), count }).collect(),
    }
}

pub(super) fn domain(report: &DomainReport) -> DomainFigures {
    DomainFigures {
        domain: report.domain,
        bypass: report.bypass,
        endpoints: report.endpoints.iter().map(|id| PciAddress::of_endpoint(*id).to_string()).collect(),
        address_spaces: report.address_spaces as u64,
        mappings: report.mappings,
        mapped_bytes: report.mapped_bytes,
        window_bytes: report.window_bytes,
        requests: flatten(&report.activity.requests),
        failed: flatten(&report.activity.failed),
        latency: latency(&report.activity.latency),
    }
}

pub(super) fn endpoint(report: &EndpointReport) -> EndpointFigures {
    EndpointFigures {
        address: PciAddress::of_endpoint(report.endpoint).to_string(),
        domain: report.domain,
        bypass: report.bypass,
        mapped_bytes: report.mapped_bytes,
        window_bytes: report.window_bytes,
        parked_bytes: report.parked_bytes,
        pinned_bytes: report.pinned_bytes,
        requests: flatten(&report.activity.requests),
        failed: flatten(&report.activity.failed),
        latency: latency(&report.activity.latency),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn latency_contains_only_the_classes_with_samples() {
        let mut histogram = Histogram::default();
        for ns in [0, 1, 700, 1000, 5_000_000_000] {
            histogram.record(Duration::from_nanos(ns));
        }
        let latency = latency(&histogram);
        assert_eq!((latency.count, latency.sum_ns, latency.max_ns), (5, 5_000_001_701, 5_000_000_000));
        let buckets: Vec<_> = latency.buckets.iter().map(|bucket| (bucket.up_to_ns, bucket.count)).collect();
        assert_eq!(buckets, [(1, 2), (1023, 2), (5_000_000_000, 1)]);
    }

    #[test]
    fn classes_end_where_the_next_begins() {
        let ends: Vec<_> = classes(&Histogram::default()).map(|(end, _)| end).collect();
        assert_eq!((ends[0], ends[1], ends[9], *ends.last().unwrap()), (1, 3, 1023, u64::MAX));
        assert!(ends.is_sorted());
    }
}
