// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The demo's plain form: sequential reads, the cost of a single map and unmap, requests and pinned memory, and a verified pass
//! with bouncing.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use carom_integration::events::Requests;
use carom_integration::measure::machine::Machine;
use carom_integration::measure::markdown::{self, NONE};
use carom_integration::measure::mode::Mode;
use carom_integration::measure::statistics::median;
use carom_integration::workload::{
    self, BLOCK_SIZES, DmaMap, FROM_DEVICE, FROM_DEVICE_TWO_THREADS, Fio, Mapping, TO_DEVICE,
};
use carom_integration::{Outcome, Site};
use serde::{Deserialize, Serialize};

use crate::demo::config::{self, find};
use crate::demo::form::Form;
use crate::demo::plan::Step;
use crate::demo::tables;

/// Amount of data that a guest with windows writes and verifies, in MiB.
const VERIFY_MIB: u32 = 48;

/// Figures of fio by block size.
type BySize = BTreeMap<String, Fio>;

/// Figures of one guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Plain {
    vmm: String,
    fio: BySize,
    /// Times of mapping and unmapping one page that the device writes. If the guest has two jobs, two threads map at the same time.
    dma_map: DmaMap,
    dma_map_to_device: Option<DmaMap>,
    requests: Option<Requests>,
    pinned_bytes: u64,
    verified_bytes: Option<u64>,
}

/// Figures of one configuration. Unless a field says otherwise, a figure is a median over the rounds, calculated separately from
/// other figures.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// `carom` or `qemu`.
    vmm: String,
    /// Figures of fio by block size, for 1 job on 1 vCPU.
    fio: BySize,
    /// The figures `fio` of each round. Empty if the run had only one round.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    fio_rounds: Vec<BySize>,
    /// Figures of fio by block size, for 2 jobs on 2 vCPUs. Only a full run measures these figures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fio_2_jobs: Option<BySize>,
    /// Times of mapping and unmapping one page that the device writes.
    dma_map: DmaMap,
    /// Times of mapping and unmapping one page that the device reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dma_map_to_device: Option<DmaMap>,
    /// Times of mapping and unmapping one page that the device writes, in each of two threads on 2 vCPUs. Only a full run measures
    /// these times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dma_map_2_threads: Option<DmaMap>,
    /// Requests to the virtio-iommu in the first round, from the guest's start to the end of fio's reads. `None` without a
    /// virtio-iommu, or if the VMM does not count requests.
    requests: Option<Requests>,
    /// Maximum of the memory that the VMM had pinned at any time in any round, in bytes.
    pinned_bytes: u64,
    /// Number of bytes that a round wrote and verified: the minimum over the rounds. `None` for configurations without a
    /// verified pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    verified_bytes: Option<u64>,
}

type Config = config::Config<Summary>;

impl Form for Plain {
    type Summary = Summary;

    const ESTIMATE: Duration = Duration::from_secs(30);
    const TIME_LIMIT: Duration = Duration::from_secs(180);
    const TWO_JOBS: bool = true;
    const FIO: &'static str = "read, direct, libaio, depth 64, 1 job on 1 vCPU";

    /// A configuration is measured by default if the site has its VMM and kernel.
    fn is_usual(mode: &Mode, site: &Site) -> bool {
        mode.is_at(site)
    }

    fn job(step: &Step, quick: bool) -> String {
        let mut job = workload::fio_reads(if quick { 2 } else { 3 }, if step.two_jobs { 2 } else { 1 });
        if !step.two_jobs {
            job += "echo CAROM-MARK reads\nsleep 0.5\n";
            if step.mode.windows {
                job += &workload::fio_verify(VERIFY_MIB, 64);
            }
        }
        job + &workload::dma_map_benchmark(if quick { 1 } else { 3 }, mappings(step))
    }

    fn read(step: &Step, outcome: &Outcome) -> Result<Self> {
        let mode = step.mode;
        let requests = outcome.counters.first().map(|counters| counters.requests);
        ensure!(
            requests.is_some() == (mode.iommu && mode.vmm.is_carom()),
            "the VMM reports counters without a virtio-iommu, or no counters with a virtio-iommu"
        );
        Ok(Self {
            vmm: mode.vmm.name().into(),
            fio: workload::fio_results(outcome)?,
            dma_map: workload::dma_map_result(outcome, mappings(step)[0])?,
            dma_map_to_device: match mappings(step).get(1) {
                Some(&mapping) => Some(workload::dma_map_result(outcome, mapping)?),
                None => None,
            },
            requests,
            pinned_bytes: outcome.peak_pinned_bytes,
            verified_bytes: if mode.windows && !step.two_jobs { Some(verified(outcome)?) } else { None },
        })
    }

    fn summary(one_job: &[&Self], two_jobs: &[&Self]) -> Option<Summary> {
        let first = one_job.first()?;
        let several = one_job.len() > 1;
        Some(Summary {
            vmm: first.vmm.clone(),
            fio: medians(one_job),
            fio_rounds: if several { one_job.iter().map(|one| one.fio.clone()).collect() } else { Vec::new() },
            fio_2_jobs: (!two_jobs.is_empty()).then(|| medians(two_jobs)),
            dma_map: median_map(one_job.iter().map(|one| one.dma_map))?,
            dma_map_to_device: median_map(one_job.iter().filter_map(|one| one.dma_map_to_device)),
            dma_map_2_threads: median_map(two_jobs.iter().map(|two| two.dma_map)),
            requests: first.requests,
            pinned_bytes: one_job.iter().map(|one| one.pinned_bytes).max()?,
            verified_bytes: one_job.iter().filter_map(|one| one.verified_bytes).min(),
        })
    }

    fn tables(configs: &[Config], machine: &Machine) -> String {
        let mut text = "\nIOPS (ratio to strict, ratio to no-viommu):\n\n".to_owned();
        text += &speeds(configs, |figures| Some(&figures.fio));
        text += "\nCost:\n\n";
        text += &costs(configs, machine);
        text += "\nMapping and unmapping one page, in µs:\n\n";
        text += &maps(configs);
        if configs.iter().any(|config| config.figures.fio_2_jobs.is_some()) {
            text += "\nIOPS with 2 jobs on 2 vCPUs (ratio to strict):\n\n";
            text += &speeds(configs, |figures| figures.fio_2_jobs.as_ref());
        }
        text.push('\n');
        for config in configs {
            if let Some(bytes) = config.figures.verified_bytes {
                // Writing to a String does not fail.
                let _ = writeln!(
                    text,
                    "{}: {:.1} MiB written in mixed sizes and verified (crc32c), no error",
                    config.name,
                    mib(bytes)
                );
            }
        }
        for (carom, mode) in [("bounce", "strict"), ("strict", "strict"), ("lazy", "lazy")] {
            for vmm in ["qemu", "ch"] {
                if let (Some(carom), Some(peer)) = (find(configs, carom), find(configs, &format!("{vmm}-{mode}"))) {
                    text += &ratios(carom, peer);
                }
            }
        }
        text
    }
}

/// Returns the mappings that `dma_map_benchmark` measures in a guest. The result of the first mapping becomes the figure `dma_map`.
fn mappings(step: &Step) -> &'static [Mapping] {
    if step.two_jobs { &[FROM_DEVICE_TWO_THREADS] } else { &[FROM_DEVICE, TO_DEVICE] }
}

fn median_map(maps: impl Iterator<Item = DmaMap> + Clone) -> Option<DmaMap> {
    let of = |figure: fn(DmaMap) -> f64| median(maps.clone().map(figure));
    Some(DmaMap { map_us: of(|map| map.map_us)?, unmap_us: of(|map| map.unmap_us)? })
}

fn verified(outcome: &Outcome) -> Result<u64> {
    workload::check_verified(outcome, 1)?;
    let result = outcome.value("CAROM-VERIFY")?;
    result
        .split(' ')
        .next_back()
        .unwrap_or_default()
        .parse()
        .with_context(|| format!("cannot parse the number of bytes in CAROM-VERIFY {result:?}"))
}

fn medians(guests: &[&Plain]) -> BySize {
    let of =
        |size: &str, figure: fn(&Fio) -> f64| median(guests.iter().filter_map(|one| Some(figure(one.fio.get(size)?))));
    config::by_size(|size| Some(Fio { iops: of(size, |f| f.iops)?, mib_s: of(size, |f| f.mib_s)? }))
}

fn speeds<'configs>(
    configs: &'configs [Config],
    select: impl Fn(&'configs Summary) -> Option<&'configs BySize>,
) -> String {
    let base = |name| find(configs, name).and_then(|config| select(&config.figures));
    let (strict, none) = (base("strict"), base("no-viommu"));
    let rows = configs.iter().filter_map(|config| Some((&config.name, select(&config.figures)?)));
    tables::table_by_size(rows, |fio, size| {
        let iops = fio.get(size).map_or(NONE.into(), |fio| format!("{:.0}", fio.iops));
        let mut ratios = vec![ratio(fio, strict, size)];
        ratios.extend(none.map(|base| ratio(fio, Some(base), size)));
        format!("{iops} ({})", ratios.join(", "))
    })
}

fn costs(configs: &[Config], machine: &Machine) -> String {
    let mut table = markdown::new_table(["configuration", "MAP", "UNMAP", "WINDOW_ADD", "pinned MiB", "of RAM"]);
    for config::Config { name, figures, .. } in configs {
        let count = |value: Option<u64>| value.map_or(NONE.to_owned(), |value| value.to_string());
        #[expect(clippy::cast_precision_loss, reason = "shown to a tenth of a per cent")]
        let share = 100.0 * figures.pinned_bytes as f64 / machine.guest_ram_bytes as f64;
        table.add_row([
            name.clone(),
            count(figures.requests.map(Requests::maps)),
            count(figures.requests.map(|requests| requests.unmap)),
            count(figures.requests.map(|requests| requests.window_add)),
            format!("{:.1}", mib(figures.pinned_bytes)),
            format!("{share:.1} %"),
        ]);
    }
    markdown::finish(&table)
}

fn maps(configs: &[Config]) -> String {
    let mut table =
        markdown::new_table(["configuration", "from the device", "to the device", "from, 2 threads on 2 vCPUs"]);
    for config::Config { name, figures, .. } in configs {
        let both =
            |map: Option<DmaMap>| map.map_or(NONE.into(), |map| format!("{:.1} + {:.1}", map.map_us, map.unmap_us));
        let Summary { dma_map, dma_map_to_device, dma_map_2_threads, .. } = *figures;
        table.add_row([name.clone(), both(Some(dma_map)), both(dma_map_to_device), both(dma_map_2_threads)]);
    }
    markdown::finish(&table)
}

fn ratios(config: &Config, peer: &Config) -> String {
    let ratio = |size| ratio(&config.figures.fio, Some(&peer.figures.fio), size);
    let ratios = BLOCK_SIZES.map(|size| format!("{} at {size}", ratio(size)));
    format!("{} ÷ {}: {}\n", config.name, peer.name, ratios.join(", "))
}

fn ratio(fio: &BySize, base: Option<&BySize>, size: &str) -> String {
    let iops = |fio: &BySize| fio.get(size).map(|fio| fio.iops);
    iops(fio).map_or(NONE.into(), |own| markdown::ratio(own, base.and_then(iops)))
}

#[expect(clippy::cast_precision_loss, reason = "shown to a tenth of a MiB")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests;
