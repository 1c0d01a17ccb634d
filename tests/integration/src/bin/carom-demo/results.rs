// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The demo's results, as `--json` writes them.

use std::collections::BTreeMap;

use carom_integration::events::Requests;
use carom_integration::workload::{BLOCK_SIZES, DmaMap, Fio};
use serde::{Deserialize, Serialize};

use crate::samples::{Measured, Sample};

/// All results of one run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    pub(crate) versions: BTreeMap<String, String>,
    /// Whether this was the short form.
    pub(crate) quick: bool,
    /// How often each configuration was measured; the rounds are interleaved.
    pub(crate) rounds: u32,
    pub(crate) configs: Vec<Config>,
    /// What went wrong: one line for each guest that failed.
    pub(crate) failures: Vec<String>,
}

/// Where it ran.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// The physical machine.
    pub(crate) host: String,
    /// `tcg` or `kvm`: how the rig's machine was run; `direct`: no rig.
    pub(crate) rig: String,
    /// Kernel that KVM and VFIO are of.
    pub(crate) kernel: String,
    /// RAM of each guest.
    pub(crate) guest_ram_bytes: u64,
}

/// Figures of one configuration: medians over the rounds, each figure's for itself.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Config {
    pub(crate) name: String,
    /// `carom` or `qemu`.
    pub(crate) vmm: String,
    /// By block size: 1 job on 1 vCPU.
    pub(crate) fio: BTreeMap<String, Fio>,
    /// `fio` round by round, where there were several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) fio_rounds: Vec<BTreeMap<String, Fio>>,
    /// By block size: 2 jobs on 2 vCPUs; full run only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fio_2_jobs: Option<BTreeMap<String, Fio>>,
    pub(crate) dma_map: DmaMap,
    /// Of the first round: requests from the guest's start to the end of fio's reads; null where there is no virtio-iommu or it does not count.
    pub(crate) requests: Option<Requests>,
    /// Most memory that the VMM had pinned in any round, in bytes.
    pub(crate) pinned_bytes: u64,
    /// Bytes that were written and verified in each round; only where the configuration has that pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) verified_bytes: Option<u64>,
    /// How often a guest of this configuration hung and was started again.
    pub(crate) retries: u32,
}

impl Results {
    /// Puts `samples` together.
    pub(crate) fn new(
        machine: Machine,
        mut versions: BTreeMap<String, String>,
        quick: bool,
        rounds: u32,
        samples: &[Sample],
    ) -> Self {
        let mut names: Vec<&str> = Vec::new();
        let mut failures = Vec::new();
        for sample in samples {
            if !names.contains(&sample.name.as_str()) {
                names.push(&sample.name);
            }
            match &sample.measured {
                Ok(measured) => versions.extend(measured.versions.clone()),
                Err(error) => failures.push(format!("{}: {error}", sample.name)),
            }
        }
        let configs = names.into_iter().filter_map(|name| Config::new(name, samples)).collect();
        Self { machine, versions, quick, rounds, configs, failures }
    }
}

impl Config {
    /// `None` where no guest with one job ended well.
    fn new(name: &str, samples: &[Sample]) -> Option<Self> {
        let select = |two_jobs: bool| -> Vec<&Measured> {
            let of_it = samples.iter().filter(|sample| sample.name == name && sample.two_jobs == two_jobs);
            of_it.filter_map(|sample| sample.measured.as_ref().ok()).collect()
        };
        let (single, double) = (select(false), select(true));
        let first = single.first()?;
        let dma_map =
            |figure: fn(&DmaMap) -> f64| median(single.iter().filter_map(|one| Some(figure(one.dma_map.as_ref()?))));
        Some(Self {
            name: name.into(),
            vmm: first.vmm.clone(),
            fio: medians(&single),
            fio_rounds: if single.len() > 1 { single.iter().map(|one| one.fio.clone()).collect() } else { Vec::new() },
            fio_2_jobs: (!double.is_empty()).then(|| medians(&double)),
            dma_map: DmaMap { map_us: dma_map(|one| one.map_us)?, unmap_us: dma_map(|one| one.unmap_us)? },
            requests: first.requests,
            pinned_bytes: single.iter().map(|one| one.pinned_bytes).max()?,
            verified_bytes: single.iter().filter_map(|one| one.verified_bytes).min(),
            retries: single.iter().chain(&double).map(|one| one.retries).sum(),
        })
    }
}

fn medians(samples: &[&Measured]) -> BTreeMap<String, Fio> {
    let of =
        |size: &str, figure: fn(&Fio) -> f64| median(samples.iter().filter_map(|one| Some(figure(one.fio.get(size)?))));
    BLOCK_SIZES
        .iter()
        .filter_map(|size| {
            Some(((*size).to_owned(), Fio { iops: of(size, |f| f.iops)?, mib_s: of(size, |f| f.mib_s)? }))
        })
        .collect()
}

/// The middle one; of an even number, the mean of the two in the middle.
pub(crate) fn median(figures: impl Iterator<Item = f64>) -> Option<f64> {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    let (low, high) = (figures.get(figures.len().checked_sub(1)? / 2)?, figures.get(figures.len() / 2)?);
    Some(f64::midpoint(*low, *high))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_middle_or_between_the_two_there() {
        assert_eq!(median([3.0, 1.0, 9.0].into_iter()), Some(3.0));
        assert_eq!(median([4.0, 1.0, 2.0, 9.0].into_iter()), Some(3.0));
        assert_eq!(median([].into_iter()), None);
    }

    #[test]
    fn failed_guest_is_a_failure_and_the_others_count() {
        let sample = |round: u32, iops: Option<f64>| {
            let measured = iops.ok_or_else(|| "it failed".to_owned()).map(|iops| Measured {
                vmm: "carom".into(),
                versions: BTreeMap::new(),
                fio: BLOCK_SIZES.map(|size| (size.into(), Fio { iops, mib_s: 1.0 })).into(),
                dma_map: Some(DmaMap { map_us: iops, unmap_us: 1.0 }),
                requests: None,
                pinned_bytes: u64::from(round),
                verified_bytes: None,
                retries: 0,
            });
            Sample { name: "lazy".into(), round, two_jobs: false, measured }
        };
        let samples = [sample(0, Some(10.0)), sample(1, None), sample(2, Some(30.0)), sample(3, Some(11.0))];
        let machine = Machine { host: "h".into(), rig: "tcg".into(), kernel: "k".into(), guest_ram_bytes: 1 };
        let results = Results::new(machine, BTreeMap::new(), false, 4, &samples);
        assert_eq!(results.failures, ["lazy: it failed"]);
        let [config] = &results.configs[..] else { panic!("one configuration wanted") };
        assert_eq!((config.fio["4k"].iops, config.fio_rounds.len(), config.pinned_bytes), (11.0, 3, 3));
        assert!(config.fio_2_jobs.is_none());
    }
}
