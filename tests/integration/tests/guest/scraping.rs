// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Metrics of a guest that does I/O. The test checks their values, and measures how much slower the guest's I/O is if a client
//! reads the metrics once per second.

use carom_integration::harness::guest_test;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::workload::WAIT_FOR_NVME;
use serde_json::{Value, json};

use crate::hotplug::put;
use crate::support::{MIB, SITE};

/// Maximum time for a boot under emulation, and maximum time for a round.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns the number of rounds: `CAROM_SCRAPING_ROUNDS`, or `few` by default. By default, there are too few rounds for useful
/// measurements.
pub(crate) fn rounds(few: usize) -> usize {
    let asked = env::var("CAROM_SCRAPING_ROUNDS").ok();
    asked.map_or(few, |rounds| rounds.parse().expect("CAROM_SCRAPING_ROUNDS is a number"))
}

/// Returns a job that reads 4k blocks for some seconds, repeatedly. The job runs `rounds` rounds after a first round that does
/// not count. If `rounds` is at most 2, the rounds are shorter, because they only test the metrics.
fn job(rounds: usize) -> String {
    let seconds = if rounds > 2 { 4 } else { 2 };
    format!(
        "{WAIT_FOR_NVME}
i=0
while [ $i -le {rounds} ]; do
    echo \"CAROM-START $i\"
    fio --name=read --filename=/dev/nvme0n1 --direct=1 --rw=read --ioengine=libaio --iodepth=64 --bs=4k --size=256M \\
        --time_based --ramp_time=1 --runtime={seconds} --output-format=terse --terse-version=3 >/tmp/fio || exit 91
    awk -F';' -v round=$i '/^3;/ {{ print \"CAROM-IOPS\", round, $8 }}' /tmp/fio
    i=$((i + 1))
done
echo CAROM-DONE
while :; do sleep 1; done
"
    )
}

/// Returns the IOPS of the rounds so far, in order.
fn iops(console: &str) -> Vec<f64> {
    let lines = console.lines().filter_map(|line| line.strip_prefix("CAROM-IOPS "));
    lines.map(|line| line.split(' ').nth(1).and_then(|text| text.parse().ok()).expect("a number")).collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns the value of the metric `name`, which may include labels.
fn sample(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find(|line| line.starts_with(&format!("{name} ")));
    line.and_then(|line| line.rsplit_once(' ')).unwrap_or_else(|| panic!("no {name} in\n{metrics}")).1.parse().unwrap()
}

#[guest_test(slow = "windows:: compares counters with the guest's")]
fn metrics_scraped_from_a_working_guest_match_its_counters() {
    // A client reads the metrics in every second round.
    let count = rounds(2);
    let mut vmm = ApiVmm::start(&SITE, &job(count)).unwrap();
    let config = json!({
        "payload": {"kernel": vmm.kernel(), "initramfs": vmm.initramfs(),
            "cmdline": "console=ttyS0 quiet panic=-1 oops=panic mitigations=off iommu.strict=1 nmi_watchdog=0"},
        "serial": {"mode": "File", "file": vmm.console_file()},
        "devices": [{"path": Site::sysfs(&SITE.nvme[0]), "iommu": true, "id": "drive"}],
        "iommu_bounce": {"size": 64 * MIB},
    });
    put(&vmm, "vm.create", &config);
    put(&vmm, "vm.boot", &Value::Null);

    // Read the metrics while a round with an odd number runs.
    let (wanted, done, scrapes) = (AtomicBool::new(false), AtomicBool::new(false), AtomicUsize::new(0));
    let longest = thread::scope(|scope| {
        let scraper = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !done.load(Ordering::Relaxed) {
                if wanted.load(Ordering::Relaxed) {
                    let start = Instant::now();
                    vmm.text("/metrics").unwrap();
                    longest = longest.max(start.elapsed());
                    scrapes.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(Duration::from_secs(1));
                } else {
                    thread::sleep(Duration::from_millis(20));
                }
            }
            longest
        });
        let ended = (0..=count)
            .try_for_each(|round| {
                vmm.wait_for(&format!("CAROM-START {round}\n"), 1, LIMIT)?;
                wanted.store(round % 2 == 1, Ordering::Relaxed);
                Ok::<_, anyhow::Error>(())
            })
            .and_then(|()| vmm.wait_for("CAROM-DONE", 1, LIMIT));
        // End the scraper before any panic, because the scope waits for its threads.
        done.store(true, Ordering::Relaxed);
        ended.unwrap();
        scraper.join().unwrap()
    });
    let rounds = iops(&vmm.console());
    assert_eq!(rounds.len(), count + 1, "{rounds:?}");
    let of = |rest: usize| median(rounds.iter().skip(1).skip((rest + 1) % 2).step_by(2).copied().collect());
    let (with, without) = (of(1), of(0));
    // `scripts/test --keep DIR` keeps these figures for the documentation.
    let figures = format!(
        "IOPS scraped {with:.0}, not scraped {without:.0}, ratio {:.3}, all rounds {rounds:.0?}; {} scrapes, the longest took {} ms\n",
        with / without,
        scrapes.load(Ordering::Relaxed),
        longest.as_millis()
    );
    fs::write(SITE.out.join("scraping"), &figures).unwrap();
    println!("{figures}");
    assert!(scrapes.load(Ordering::Relaxed) > 0);

    // The guest is idle now, so the three answers contain the same values.
    let bounce = vmm.call("GET", "/api/v1/vm.iommu-bounce", None).unwrap().1;
    let counters = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1;
    let metrics = vmm.text("/metrics").unwrap();
    let latency = &bounce["request_latency"]["window_add"];
    assert!(latency["count"].as_u64().unwrap() > 0, "{bounce}");
    assert_eq!(latency["count"], counters["_iommu"]["requests_window_add"], "{bounce}");
    let in_buckets =
        latency["buckets"].as_array().unwrap().iter().map(|bucket| bucket["count"].as_u64().unwrap()).sum();
    assert_eq!(latency["count"].as_u64(), Some(in_buckets), "{bounce}");
    assert!(bounce["host_latency"]["map"]["sum_ns"].as_u64().unwrap() > 0, "{bounce}");
    let drive = &bounce["endpoints"][0];
    assert_eq!((&drive["address"], &drive["domain"]), (&json!("0000:00:02.0"), &bounce["domains"][0]["domain"]));
    assert_eq!(drive["pinned_bytes"], counters["drive"]["pinned_bytes"], "{bounce}");
    assert_eq!(drive["window_bytes"], bounce["windows"][0]["bytes"], "{bounce}");
    assert_eq!(bounce["domains"][0]["requests"]["map"], counters["drive"]["domain_requests_map"]);
    let requests = sample(&metrics, "carom_iommu_request_duration_seconds_count{kind=\"window_add\"}");
    assert_eq!(Some(requests), latency["count"].as_f64());
    let pinned = sample(&metrics, "carom_iommu_endpoint_pinned_bytes{address=\"0000:00:02.0\",device=\"drive\"}");
    assert_eq!(Some(pinned), drive["pinned_bytes"].as_f64());

    put(&vmm, "vmm.shutdown", &Value::Null);
    assert!(vmm.wait(LIMIT).unwrap().success());
}
