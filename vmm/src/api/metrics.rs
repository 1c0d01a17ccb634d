// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Metrics in Prometheus' text form, with its conventions for names: base units, `_total` for what only grows.

use prometheus::core::Collector;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder};

use crate::control::Snapshot;

/// Media type of the text form.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The metrics of one scrape: made of a snapshot, rendered, and dropped.
struct Scrape(Registry);

impl Scrape {
    fn add(&self, metric: Box<dyn Collector>) -> Result<(), prometheus::Error> {
        self.0.register(metric)
    }

    fn gauge(&self, name: &str, help: &str, value: u64) -> Result<(), prometheus::Error> {
        let gauge = IntGauge::new(name, help)?;
        gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        self.add(Box::new(gauge))
    }

    fn total(&self, name: &str, help: &str, value: u64) -> Result<(), prometheus::Error> {
        let counter = IntCounter::new(name, help)?;
        counter.inc_by(value);
        self.add(Box::new(counter))
    }

    fn totals(&self, name: &str, help: &str, label: &str, values: &[(&str, u64)]) -> Result<(), prometheus::Error> {
        let counters = IntCounterVec::new(Opts::new(name, help), &[label])?;
        values.iter().for_each(|(of, value)| counters.with_label_values(&[*of]).inc_by(*value));
        self.add(Box::new(counters))
    }
}

/// Renders a snapshot.
pub fn render(snapshot: &Snapshot) -> Result<String, prometheus::Error> {
    let scrape = Scrape(Registry::new());
    vmm(&scrape)?;
    vm(&scrape, snapshot)?;
    iommu(&scrape, snapshot)?;
    TextEncoder::new().encode_to_string(&scrape.0.gather())
}

fn vmm(scrape: &Scrape) -> Result<(), prometheus::Error> {
    let build = IntGaugeVec::new(Opts::new("carom_build_info", "The program; always 1."), &["version"])?;
    build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
    scrape.add(Box::new(build))
}

fn vm(scrape: &Scrape, snapshot: &Snapshot) -> Result<(), prometheus::Error> {
    let states = IntGaugeVec::new(Opts::new("carom_vm_state", "1 for the state that the VM is in."), &["state"])?;
    for name in ["none", "created", "running", "paused", "shutdown"] {
        states.with_label_values(&[name]).set(i64::from(name == snapshot.state_name()));
    }
    scrape.add(Box::new(states))?;
    scrape.gauge("carom_vm_vcpus", "vCPUs of the VM.", snapshot.vcpus.into())?;
    scrape.gauge("carom_vm_memory_bytes", "RAM of the VM.", snapshot.memory_bytes)
}

fn iommu(scrape: &Scrape, snapshot: &Snapshot) -> Result<(), prometheus::Error> {
    let Some(report) = &snapshot.iommu else { return Ok(()) };
    let counters = &report.counters;
    let kinds = |counts: &iommu_bounce::RequestCounts| {
        [
            ("attach", counts.attach),
            ("detach", counts.detach),
            ("map", counts.map),
            ("unmap", counts.unmap),
            ("probe", counts.probe),
            ("window_add", counts.window_add),
            ("window_del", counts.window_del),
            ("invalid", counts.invalid),
        ]
    };
    let name = "carom_iommu_requests_total";
    scrape.totals(name, "Requests to the virtio-iommu.", "kind", &kinds(&counters.requests))?;
    let name = "carom_iommu_requests_failed_total";
    scrape.totals(
        name,
        "Requests to the virtio-iommu that were not answered with OK.",
        "kind",
        &kinds(&counters.failed),
    )?;
    scrape.gauge("carom_iommu_mappings", "Mappings that exist.", counters.mappings)?;
    let help = "Guest RAM that is mapped, and so pinned, counted once for each address space of the host.";
    scrape.gauge("carom_iommu_mapped_bytes", help, counters.mapped_bytes)?;
    scrape.gauge("carom_iommu_mapped_bytes_peak", "The most that it has been.", counters.peak_mapped_bytes)?;
    let calls = [("map", counters.host_maps), ("unmap", counters.host_unmaps)];
    scrape.totals("carom_iommu_host_calls_total", "Calls to the host's IOMMU that succeeded.", "call", &calls)?;
    scrape.total("carom_iommu_host_errors_total", "Calls to the host that failed.", counters.host_errors)?;
    scrape.gauge("carom_iommu_stuck_ranges", "Ranges that the host would not unmap.", counters.stuck_ranges)?;
    scrape.gauge("carom_iommu_window_budget_bytes", "What all bounce windows may use.", report.budget)?;
    scrape.gauge("carom_iommu_window_bytes", "Backed chunks of bounce windows.", counters.window_bytes)?;
    scrape.gauge("carom_iommu_window_bytes_peak", "The most that it has been.", counters.peak_window_bytes)?;
    let help = "Window memory that the host has allocated, with what is kept ready.";
    scrape.gauge("carom_iommu_window_held_bytes", help, report.held_window_bytes)?;
    let help = "Chunks that stay mapped for when the guest asks again after a reset of the VM.";
    scrape.gauge("carom_iommu_window_parked_chunks", help, counters.parked_chunks)?;
    let help = "Parked chunks that the guest took up again, without a call to the host.";
    scrape.total("carom_iommu_window_unparked_chunks_total", help, counters.unparked_chunks)?;
    scrape.gauge("carom_iommu_window_lost_chunks", "Chunks that can never be used again.", counters.lost_chunks)?;
    scrape.gauge(
        "carom_iommu_bounce_threshold_bytes",
        "DMA up to this size is to bounce; 0: the guest decides.",
        report.threshold.into(),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use devices::virtio::iommu::IommuReport;

    use super::*;
    use crate::control::State;

    fn parse(text: &str) -> BTreeMap<&str, u64> {
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        samples.map(|line| line.rsplit_once(' ').unwrap()).map(|(name, value)| (name, value.parse().unwrap())).collect()
    }

    #[test]
    fn figures_arrive_under_prometheus_names() {
        let mut report = IommuReport { budget: 64 << 20, ..Default::default() };
        report.counters.requests.map = 7;
        report.counters.failed.map = 2;
        report.counters.mapped_bytes = 4096;
        let snapshot = Snapshot { state: Some(State::Running), vcpus: 2, memory_bytes: 1 << 30, iommu: Some(report) };
        let text = render(&snapshot).unwrap();
        let samples = parse(&text);
        assert_eq!(samples["carom_vm_state{state=\"running\"}"], 1);
        assert_eq!(samples["carom_vm_state{state=\"paused\"}"], 0);
        assert_eq!(samples["carom_iommu_requests_total{kind=\"map\"}"], 7);
        assert_eq!(samples["carom_iommu_requests_failed_total{kind=\"map\"}"], 2);
        assert_eq!(samples["carom_iommu_mapped_bytes"], 4096);
        assert_eq!(samples["carom_iommu_window_budget_bytes"], 64 << 20);
        // Every metric has its help and type, and what only grows is named so.
        for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
            let (name, kind) = line.split_once(' ').unwrap();
            assert_eq!(name.ends_with("_total"), kind == "counter", "{line}");
            assert!(text.contains(&format!("# HELP {name} ")), "{line}");
        }
    }

    #[test]
    fn without_a_vm_there_is_little_to_tell() {
        let text = render(&Snapshot::default()).unwrap();
        assert_eq!(parse(&text)["carom_vm_state{state=\"none\"}"], 1);
        assert!(!text.contains("carom_iommu"));
    }
}
