// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Metrics in the text format of Prometheus. The names of metrics follow the conventions of Prometheus: base units, and `_total` for
//! counters.

use std::collections::BTreeMap;

use carom_api::types::DeviceNode;
use devices::pci::PciAddress;
use iommu_bounce::{EndpointReport, Histogram, Report};
use prometheus::core::Collector;
use prometheus::proto::{self, Bucket, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder};

use crate::control::{Figures, figures};

/// Prometheus registry of one scrape, which is dropped after its metrics were rendered as text.
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

/// Renders the values in `all` as the text of one scrape.
pub fn render(all: &Figures) -> Result<String, prometheus::Error> {
    let scrape = Scrape(Registry::new());
    vmm(&scrape)?;
    vm(&scrape, all)?;
    devices(&scrape, all)?;
    lost(&scrape, all)?;
    parts(&scrape, all)?;
    iommu(&scrape, all)?;
    all.engine.as_ref().map_or(Ok(()), |engine| endpoints(&scrape, engine, &all.devices))?;
    let mut families = scrape.0.gather();
    families.extend(all.engine.iter().flat_map(latencies));
    families.extend(all.iommu.iter().map(|iommu| stalls(&iommu.poll_stalls)));
    TextEncoder::new().encode_to_string(&families)
}

fn vmm(scrape: &Scrape) -> Result<(), prometheus::Error> {
    let build = IntGaugeVec::new(Opts::new("carom_build_info", "Version of the program as a label."), &["version"])?;
    build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
    scrape.add(Box::new(build))
}

fn vm(scrape: &Scrape, all: &Figures) -> Result<(), prometheus::Error> {
    let states = IntGaugeVec::new(Opts::new("carom_vm_state", "1 for the current state of the VM."), &["state"])?;
    for name in ["none", "created", "running", "paused", "shutdown"] {
        states.with_label_values(&[name]).set(i64::from(name == all.state_name()));
    }
    scrape.add(Box::new(states))?;
    scrape.gauge("carom_vm_vcpus", "vCPUs of the VM.", all.vcpus.into())?;
    scrape.gauge("carom_vm_memory_bytes", "RAM of the VM.", all.memory_bytes)
}

/// Adds the counts of the host's notices about passed-through devices.
fn devices(scrape: &Scrape, all: &Figures) -> Result<(), prometheus::Error> {
    let help = "Uncorrectable errors of passed-through devices that the host reported.";
    scrape.total("carom_device_errors_total", help, all.device_errors)?;
    let help = "Passed-through devices that the host asked the VMM to release.";
    scrape.total("carom_device_requests_total", help, all.device_requests)
}

/// Adds the counts of lost log lines and events. A line or event is lost if its reader is too slow, or if the host cannot write it.
fn lost(scrape: &Scrape, all: &Figures) -> Result<(), prometheus::Error> {
    let help = "Lines of the log and of standard error that were dropped.";
    scrape.total("carom_lost_log_lines_total", help, all.lost_log_lines)?;
    scrape.total("carom_lost_events_total", "Events that were lost.", all.lost_events)
}

/// Returns the name of the metric for a counter of a device kind.
pub(crate) fn name_of(kind: &str, counter: &str) -> String {
    format!("carom_{}_{counter}_total", kind.replace('-', "_"))
}

/// Adds the counters that devices keep. Each counter of a device kind is one metric. The metric's label names the device.
fn parts(scrape: &Scrape, all: &Figures) -> Result<(), prometheus::Error> {
    let mut metrics = BTreeMap::new();
    for part in &all.parts {
        for counter in &part.counters {
            let name = name_of(part.kind, counter.name);
            let (_, values) = metrics.entry(name).or_insert_with(|| (counter.help, Vec::new()));
            values.push((part.id.as_str(), counter.value));
        }
    }
    metrics.iter().try_for_each(|(name, (help, values))| scrape.totals(name, help, "device", values))
}

fn iommu(scrape: &Scrape, all: &Figures) -> Result<(), prometheus::Error> {
    let Some(report) = &all.iommu else { return Ok(()) };
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
            ("map_list", counts.map_list),
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
    scrape.gauge("carom_iommu_mappings", "Current mappings.", counters.mappings)?;
    let help = "Mapped guest RAM, counted once for each address space of the host.";
    scrape.gauge("carom_iommu_mapped_bytes", help, counters.mapped_bytes)?;
    scrape.gauge("carom_iommu_mapped_bytes_peak", "Maximum mapped guest RAM so far.", counters.peak_mapped_bytes)?;
    if let Some(limit) = report.max_mapped_bytes {
        scrape.gauge("carom_iommu_mapped_bytes_limit", "Limit of mapped guest RAM.", limit)?;
    }
    let help = "Memory that the host has pinned for devices behind the virtio-iommu: mapped RAM and windows.";
    scrape.gauge("carom_iommu_pinned_bytes", help, counters.pinned_bytes)?;
    scrape.gauge("carom_iommu_pinned_bytes_peak", "Maximum pinned memory so far.", counters.peak_pinned_bytes)?;
    let calls = [("map", counters.host_maps), ("unmap", counters.host_unmaps)];
    scrape.totals("carom_iommu_host_calls_total", "Calls to the host's IOMMU that succeeded.", "call", &calls)?;
    let help = "Number of times that the polling thread had no host CPU while requests arrived.";
    scrape.total("carom_iommu_poll_stalls_total", help, report.poll_stalls.count)?;
    let help = "Calls to the host that were saved because one call served several neighbouring UNMAP requests.";
    scrape.total("carom_iommu_merged_unmaps_total", help, counters.merged_unmaps)?;
    scrape.total("carom_iommu_host_errors_total", "Calls to the host that failed.", counters.host_errors)?;
    scrape.gauge("carom_iommu_stuck_ranges", "Ranges that the host failed to unmap.", counters.stuck_ranges)?;
    scrape.gauge("carom_iommu_window_budget_bytes", "Maximum memory of all bounce windows together.", report.budget)?;
    scrape.gauge("carom_iommu_window_bytes", "Memory of backed chunks of bounce windows.", counters.window_bytes)?;
    scrape.gauge("carom_iommu_window_bytes_peak", "Maximum window memory so far.", counters.peak_window_bytes)?;
    let help = "Window memory that the host has allocated, including memory kept ready.";
    scrape.gauge("carom_iommu_window_held_bytes", help, report.held_window_bytes)?;
    let help = "Chunks that stay mapped over a reset of the VM, until the guest asks for them again.";
    scrape.gauge("carom_iommu_window_parked_chunks", help, counters.parked_chunks)?;
    let help = "Parked chunks that the guest reused without a call to the host.";
    scrape.total("carom_iommu_window_unparked_chunks_total", help, counters.unparked_chunks)?;
    scrape.gauge("carom_iommu_window_lost_chunks", "Chunks that could not be freed yet.", counters.lost_chunks)?;
    scrape.gauge(
        "carom_iommu_bounce_threshold_bytes",
        "Maximum size of DMA that bounces; 0: the guest decides.",
        report.threshold.into(),
    )?;
    scrape.gauge(
        "carom_iommu_bounce_threshold_write_bytes",
        "Maximum size of DMA that bounces if the device writes the memory; 0: carom_iommu_bounce_threshold_bytes.",
        report.threshold_write.into(),
    )
}

/// Adds the mapped, window, parked and pinned bytes of each device behind the virtio-iommu.
fn endpoints(scrape: &Scrape, engine: &Report, devices: &[DeviceNode]) -> Result<(), prometheus::Error> {
    type Figure = fn(&EndpointReport) -> u64;
    let metrics: [(&str, &str, Figure); 4] = [
        ("carom_iommu_endpoint_mapped_bytes", "RAM that the device can access.", |of| of.mapped_bytes),
        ("carom_iommu_endpoint_window_bytes", "Window memory of the device, including parked chunks.", |of| {
            of.window_bytes
        }),
        ("carom_iommu_endpoint_parked_bytes", "Window memory that stays mapped for the device over a reset.", |of| {
            of.parked_bytes
        }),
        ("carom_iommu_endpoint_pinned_bytes", "Memory that the host has pinned for the device.", |of| of.pinned_bytes),
    ];
    for (name, help, figure) in metrics {
        let gauges = IntGaugeVec::new(Opts::new(name, help), &["device", "address"])?;
        for endpoint in &engine.endpoints {
            let address = PciAddress::of_endpoint(endpoint.endpoint).to_string();
            let id = devices.iter().find(|device| device.pci_bdf == address).map_or("", |device| device.id.as_str());
            let value = i64::try_from(figure(endpoint)).unwrap_or(i64::MAX);
            gauges.with_label_values(&[id, address.as_str()]).set(value);
        }
        scrape.add(Box::new(gauges))?;
    }
    Ok(())
}

/// Returns the latency histograms of requests and of calls to the host.
fn latencies(engine: &Report) -> [MetricFamily; 2] {
    [
        histogram(
            "carom_iommu_request_duration_seconds",
            "Duration of requests to the virtio-iommu, including calls to the host.",
            "kind",
            &figures::of_requests(&engine.latency),
        ),
        histogram(
            "carom_iommu_host_call_duration_seconds",
            "Duration of calls to the host's IOMMU, including failed calls. One call in eight is timed.",
            "call",
            &figures::of_host(&engine.host),
        ),
    ]
}

/// Returns the histogram of stalls of the polling thread.
fn stalls(times: &Histogram) -> MetricFamily {
    let help =
        "Time that the polling thread had no host CPU while requests arrived: the maximum wait of these requests.";
    histogram("carom_iommu_poll_stall_duration_seconds", help, "thread", &[("iommu_poll", times)])
}

/// Upper bounds, in nanoseconds, of the histogram classes that are rendered as buckets. The other classes have few samples, and each bucket
/// is a separate time series. So these classes get no buckets.
const CLASSES: std::ops::RangeInclusive<u64> = 255..=(1 << 30);

/// Returns a metric family with a histogram for each of `named`. `prometheus::Histogram` counts samples one by one, but `named` contains
/// finished counts. So this function builds the family from the types in `prometheus::proto`.
fn histogram(name: &str, help: &str, label: &str, named: &[(&str, &Histogram)]) -> MetricFamily {
    let metrics = named.iter().map(|(of, histogram)| {
        let mut pair = LabelPair::default();
        pair.set_name(label.into());
        pair.set_value((*of).into());
        let mut metric = Metric::from_label(vec![pair]);
        metric.set_histogram(counted(histogram));
        metric
    });
    let mut family = MetricFamily::default();
    family.set_name(name.into());
    family.set_help(help.into());
    family.set_field_type(MetricType::HISTOGRAM);
    family.set_metric(metrics.collect());
    family
}

/// Converts a histogram to Prometheus' form: seconds, and cumulative buckets.
fn counted(histogram: &Histogram) -> proto::Histogram {
    let mut seen = 0;
    let all = figures::classes(histogram).map(|(end, count)| {
        seen += count;
        (end, seen)
    });
    let buckets = all.filter(|(end, _)| CLASSES.contains(end)).map(|(end, seen)| {
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(seconds(end));
        bucket.set_cumulative_count(seen);
        bucket
    });
    let mut counted = proto::Histogram::default();
    counted.set_bucket(buckets.collect());
    counted.set_sample_count(histogram.count);
    counted.set_sample_sum(seconds(histogram.sum_ns));
    counted
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus counts in floating point")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::time::Duration;

    use carom_api::kinds::KINDS;
    use devices::counters::Counter;
    use devices::virtio::iommu::IommuStatus;
    use iommu_bounce::test_utils::{RecordingMapper, TestRam};
    use iommu_bounce::{Engine, EngineConfig};

    use super::*;
    use crate::control::State;
    use crate::machine::PartCounters;

    fn parse(text: &str) -> BTreeMap<&str, u64> {
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        samples.map(|line| line.rsplit_once(' ').unwrap()).map(|(name, value)| (name, value.parse().unwrap())).collect()
    }

    #[test]
    fn counters_of_all_parts_are_in_the_pages_table() {
        let page = include_str!("../../../docs/api.md");
        for (kind, counters) in crate::parts::counters() {
            for counter in counters {
                let name = name_of(kind, counter.name);
                assert!(page.contains(&format!("`{name}{{device}}`")), "{name} is not in docs/api.md");
            }
        }
    }

    #[test]
    fn figures_arrive_under_prometheus_names() {
        let mut report = IommuStatus { budget: 64 << 20, max_mapped_bytes: Some(96 << 20), ..Default::default() };
        (report.counters.pinned_bytes, report.counters.peak_pinned_bytes) = (8192, 12288);
        report.counters.requests.map = 7;
        report.counters.failed.map = 2;
        report.counters.mapped_bytes = 4096;
        let all = Figures {
            state: Some(State::Running),
            vcpus: 2,
            memory_bytes: 1 << 30,
            iommu: Some(report),
            device_errors: 3,
            device_requests: 5,
            ..Figures::default()
        };
        let text = render(&all).unwrap();
        let samples = parse(&text);
        assert_eq!(samples["carom_vm_state{state=\"running\"}"], 1);
        assert_eq!(samples["carom_vm_state{state=\"paused\"}"], 0);
        assert_eq!(samples["carom_iommu_requests_total{kind=\"map\"}"], 7);
        assert_eq!(samples["carom_iommu_requests_failed_total{kind=\"map\"}"], 2);
        assert_eq!(samples["carom_iommu_mapped_bytes"], 4096);
        assert_eq!(samples["carom_iommu_mapped_bytes_limit"], 96 << 20);
        assert_eq!((samples["carom_iommu_pinned_bytes"], samples["carom_iommu_pinned_bytes_peak"]), (8192, 12288));
        assert_eq!((samples["carom_device_errors_total"], samples["carom_device_requests_total"]), (3, 5));
        assert_eq!(samples["carom_iommu_window_budget_bytes"], 64 << 20);
        // Every metric has its help and type, and the names of counters end in `_total`.
        for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
            let (name, kind) = line.split_once(' ').unwrap();
            assert_eq!(name.ends_with("_total"), kind == "counter", "{line}");
            assert!(text.contains(&format!("# HELP {name} ")), "{line}");
        }
    }

    #[test]
    fn counters_of_devices_are_metrics_of_their_kind() {
        let count = |value| vec![Counter { name: "requests", help: "Requests served.", value }];
        let part = |id: &str, value| PartCounters { id: id.into(), kind: "rng", counters: count(value) };
        let all = Figures { parts: vec![part("_rng", 3), part("other", 4)], ..Figures::default() };
        let text = render(&all).unwrap();
        let samples = parse(&text);
        assert_eq!(samples["carom_rng_requests_total{device=\"_rng\"}"], 3);
        assert_eq!(samples["carom_rng_requests_total{device=\"other\"}"], 4);
        assert!(text.contains("# HELP carom_rng_requests_total Requests served."), "{text}");
    }

    /// Returns the report of an engine with one device.
    fn engine() -> Report {
        let mut engine = Engine::new(EngineConfig::default(), Arc::new(TestRam::new(&[(0, 1 << 20)])), None).unwrap();
        engine.add_endpoint(16, Box::new(RecordingMapper::new())).unwrap();
        let mut report = engine.report();
        report.endpoints[0].pinned_bytes = 8192;
        for ns in [100, 300, 1000, 3_000_000, 5_000_000_000] {
            report.latency.map.record(Duration::from_nanos(ns));
        }
        report
    }

    #[test]
    fn latencies_are_histograms_in_seconds() {
        let node = DeviceNode {
            id: "drive".into(),
            resources: Vec::new(),
            children: Vec::new(),
            pci_bdf: "0000:00:02.0".into(),
        };
        let text = render(&Figures { engine: Some(engine()), devices: vec![node], ..Figures::default() }).unwrap();
        let value = |name: &str| -> f64 {
            let line = text.lines().find(|line| line.starts_with(&format!("{name} ")));
            line.unwrap_or_else(|| panic!("no {name} in\n{text}")).rsplit_once(' ').unwrap().1.parse().unwrap()
        };
        let name = "carom_iommu_request_duration_seconds";
        for (end, count) in [("0.000000255", 1.0), ("0.000001023", 3.0), ("0.004194303", 4.0), ("+Inf", 5.0)] {
            assert_eq!(value(&format!("{name}_bucket{{kind=\"map\",le=\"{end}\"}}")), count, "{end}");
        }
        assert_eq!(value(&format!("{name}_count{{kind=\"map\"}}")), 5.0);
        assert_eq!(value(&format!("{name}_sum{{kind=\"map\"}}")), 5.0030014);
        assert_eq!(value("carom_iommu_host_call_duration_seconds_count{call=\"unmap\"}"), 0.0);
        // Each kind of request has the same number of buckets, and the buckets are cumulative.
        let buckets = |kind: &str| {
            let start = format!("{name}_bucket{{kind=\"{kind}\"");
            let lines = text.lines().filter(|line| line.starts_with(&start));
            lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).collect::<Vec<_>>()
        };
        assert!(buckets("map").is_sorted());
        assert_eq!(buckets("map").len(), buckets("attach").len());
        let pinned = "carom_iommu_endpoint_pinned_bytes{address=\"0000:00:02.0\",device=\"drive\"}";
        assert_eq!(value(pinned), 8192.0);
    }

    #[test]
    fn documents_table_has_each_metric_and_no_other() {
        let iommu = IommuStatus { max_mapped_bytes: Some(4096), ..IommuStatus::default() };
        let all = Figures { iommu: Some(iommu), engine: Some(engine()), ..Figures::default() };
        let text = render(&all).unwrap();
        let rendered: BTreeSet<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
            .map(|(name, _)| name)
            .collect();
        let rows = include_str!("../../../docs/api.md").lines().filter(|line| line.starts_with("| `carom_"));
        let names = rows.flat_map(|row| row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2));
        let names = names.map(|name| name.split('{').next().unwrap()).filter(|name| name.starts_with("carom_"));
        // The metrics of devices are left out here, because `counters_of_all_parts_are_in_the_pages_table` checks them.
        let of_part = |name: &str| {
            let kinds = KINDS.iter().map(|kind| kind.name).filter(|kind| *kind != "iommu").chain(["serial"]);
            kinds.map(|kind| name_of(kind, "")).any(|of_kind| name.starts_with(of_kind.trim_end_matches("_total")))
        };
        let documented: BTreeSet<&str> = names.filter(|name| !of_part(name)).collect();
        assert_eq!(documented, rendered);
    }

    #[test]
    fn without_a_vm_few_metrics_are_rendered() {
        let text = render(&Figures::default()).unwrap();
        assert_eq!(parse(&text)["carom_vm_state{state=\"none\"}"], 1);
        assert!(!text.contains("carom_iommu"));
    }
}
