// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counters of KVM and of Carom's virtio-iommu, and the names of their figures in the results.

use carom_integration::Probe;
use carom_integration::measure::fio::Done;
use serde_json::Value;

use crate::table::figure;

/// Counters of KVM that the results contain, each with the name of its figure.
pub(crate) const OF_KVM: [(&str, &str); 6] = [
    ("exits", "exits"),
    ("mmio_exits", "mmio_exits"),
    ("io_exits", "io_exits"),
    ("halt_exits", "halt_exits"),
    ("irq_exits", "irq_exits"),
    ("irq_window_exits", "irq_window_exits"),
];

/// Counters of Carom's virtio-iommu that the results contain, each with the name of its figure. A figure is the sum of its counters.
/// Builds before MAP_LIST do not have the counter of these requests.
pub(crate) const OF_IOMMU: [(&[&str], &str); 4] = [
    (&["requests_map", "requests_map_list"], "map_requests"),
    (&["requests_unmap"], "unmap_requests"),
    (&["requests_window_add"], "window_add_requests"),
    (&["host_maps"], "host_maps"),
];

/// Returns the sum of counters of Carom's virtio-iommu, or `None` if none of the counters exists.
pub(crate) fn sum(iommu: &Value, counters: &[&str]) -> Option<f64> {
    counters.iter().filter_map(|counter| iommu[*counter].as_f64()).reduce(|sum, count| sum + count)
}

/// Returns the exits and IOMMU requests that the VMM counted between the start and the end of a cell.
pub(crate) fn in_cell(done: &Done) -> impl Iterator<Item = (&'static str, f64)> {
    let exits = OF_KVM.iter().filter_map(|(counter, name)| {
        let of = |probe: &Probe| probe.kvm.get(*counter).copied().map(figure);
        Some((*name, of(&done.after)? - of(&done.before)?))
    });
    let requests = OF_IOMMU.iter().filter_map(|(counters, name)| {
        let of = |probe: &Probe| sum(&probe.iommu, counters);
        Some((*name, of(&done.after)? - of(&done.before)?))
    });
    exits.chain(requests)
}
