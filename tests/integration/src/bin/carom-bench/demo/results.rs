// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results of the demo, in the format of `--json`.

use std::collections::BTreeMap;

use carom_integration::measure::machine::Machine;
use serde::{Deserialize, Serialize};

use crate::demo::config::Config;
use crate::demo::form::Form;
use crate::demo::samples::{Measured, Sample};
use crate::demo::{map_time, patterns, plain};

/// Results of one run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    pub(crate) versions: BTreeMap<String, String>,
    /// True for a quick run. Only the plain form sets this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) quick: Option<bool>,
    /// Number of rounds. All configurations finish a round before the next round starts.
    pub(crate) rounds: u32,
    #[serde(flatten)]
    pub(crate) configs: Configs,
    /// Failures, one line per failed guest.
    pub(crate) failures: Vec<String>,
}

/// Figures of the configurations. The name of the variant's JSON field identifies the form of the demo.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Configs {
    #[serde(rename = "configs")]
    Plain(Vec<Config<plain::Summary>>),
    #[serde(rename = "patterns")]
    Patterns(Vec<Config<patterns::Summary>>),
    #[serde(rename = "map_times")]
    MapTimes(Vec<Config<map_time::MapTimes>>),
}

impl Results {
    /// Summarizes `samples`.
    pub(crate) fn new<F: Form>(
        machine: Machine,
        mut versions: BTreeMap<String, String>,
        quick: bool,
        rounds: u32,
        samples: &[Sample<F>],
    ) -> Self
    where
        Configs: From<Vec<Config<F::Summary>>>,
    {
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
        let configs = names.into_iter().filter_map(|name| summarize(name, samples)).collect::<Vec<_>>().into();
        let quick = matches!(configs, Configs::Plain(_)).then_some(quick);
        Self { machine, versions, quick, rounds, configs, failures }
    }
}

/// Returns the figures of one configuration, or `None` if no guest with one job succeeded.
fn summarize<F: Form>(name: &str, samples: &[Sample<F>]) -> Option<Config<F::Summary>> {
    let select = |two_jobs: bool| -> Vec<&Measured<F>> {
        let of_it = samples.iter().filter(|sample| sample.name == name && sample.two_jobs == two_jobs);
        of_it.filter_map(|sample| sample.measured.as_ref().ok()).collect()
    };
    let (single, double) = (select(false), select(true));
    if single.is_empty() {
        return None;
    }
    let figures = [&single, &double].map(|guests| guests.iter().map(|one| &one.figures).collect::<Vec<_>>());
    Some(Config {
        name: name.into(),
        figures: F::summary(&figures[0], &figures[1])?,
        retries: single.iter().chain(&double).map(|one| one.retries).sum(),
    })
}

impl From<Vec<Config<plain::Summary>>> for Configs {
    fn from(configs: Vec<Config<plain::Summary>>) -> Self {
        Self::Plain(configs)
    }
}

impl From<Vec<Config<patterns::Summary>>> for Configs {
    fn from(configs: Vec<Config<patterns::Summary>>) -> Self {
        Self::Patterns(configs)
    }
}

impl From<Vec<Config<map_time::MapTimes>>> for Configs {
    fn from(configs: Vec<Config<map_time::MapTimes>>) -> Self {
        Self::MapTimes(configs)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::Value;

    use super::*;
    use crate::results::tests::machine;

    /// Returns the sample of a guest with one job. `figures` contains the guest's figures, or the reason why the guest failed.
    /// The guest was restarted once.
    pub(crate) fn sample<F>(name: &str, round: u32, figures: Result<F, &str>) -> Sample<F> {
        let measured = figures.map(|figures| Measured { figures, versions: BTreeMap::new(), retries: 1 });
        Sample { name: name.into(), round, two_jobs: false, measured: measured.map_err(str::to_owned) }
    }

    /// Returns the results of a full run.
    pub(crate) fn results<F: Form>(rounds: u32, samples: &[Sample<F>]) -> Results
    where
        Configs: From<Vec<Config<F::Summary>>>,
    {
        Results::new(machine(), BTreeMap::new(), false, rounds, samples)
    }

    /// Result files that earlier versions wrote must stay readable, for each form of the demo.
    #[test]
    fn stored_results_are_read_and_written_as_they_were() {
        let fio = r#"{"4k":{"iops":1.5,"mib_s":2.5}}"#;
        let plain = format!(
            r#""quick":false,"rounds":2,"configs":[{{"name":"bounce","vmm":"carom","fio":{fio},"fio_rounds":[{fio},{fio}],
            "fio_2_jobs":{fio},"dma_map":{{"map_us":1.25,"unmap_us":2.5}},
            "dma_map_to_device":{{"map_us":1.5,"unmap_us":0.5}},"dma_map_2_threads":{{"map_us":1.75,"unmap_us":2.5}},
            "requests":{{"map":11,"unmap":12,"window_add":13,"window_del":0,"attach":1}},"pinned_bytes":104857600,
            "verified_bytes":50331648,"retries":1}},{{"name":"qemu-strict","vmm":"qemu","fio":{fio},
            "dma_map":{{"map_us":1.25,"unmap_us":2.5}},"requests":null,"pinned_bytes":1,"retries":0}}]"#
        );
        let one = r#"{"iops":{"randwrite":{"4k":1.5},"randrw":{"4k":2.5}},"read_latency_us":99.5}"#;
        let patterns =
            format!(r#""rounds":1,"patterns":[{{"name":"lazy","fio":{one},"fio_rounds":[{one}],"retries":0}}]"#);
        let map_times = r#""rounds":1,"map_times":[{"name":"strict","times":{"4k":{"map_s":0.5,"unmap_s":1.5,
            "profiler":{"map_s":0.25,"unmap_s":0.25}}},"retries":2}]"#;
        let without_profiler =
            r#""rounds":1,"map_times":[{"name":"strict","times":{"4k":{"map_s":0.5,"unmap_s":1.5}},"retries":2}]"#;
        for form in [&plain, &patterns, map_times, without_profiler] {
            let text = format!(
                r#"{{"machine":{{"host":"h","rig":"tcg","kernel":"k","guest_ram_bytes":2147483648}},
                "versions":{{"carom":"1"}},{form},"failures":["lazy: it failed"]}}"#
            );
            let results: Results = serde_json::from_str(&text).unwrap();
            let again = serde_json::to_value(&results).unwrap();
            assert_eq!(again, serde_json::from_str::<Value>(&text).unwrap());
        }
    }
}
