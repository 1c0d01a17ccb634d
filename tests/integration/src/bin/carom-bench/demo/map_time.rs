// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The demo with `--map-time`: the time that the guest spends on mapping and unmapping, per GiB that fio reads from the drive. The
//! function profiler of the guest's kernel measures this time. Unlike `dma_map_benchmark`, the profiler measures the real mappings
//! of drivers.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use carom_integration::measure::machine::Machine;
use carom_integration::measure::markdown::NONE;
use carom_integration::measure::mode::Mode;
use carom_integration::measure::statistics::median;
use carom_integration::workload::{self, MapTime, ProfilerTime};
use carom_integration::{Outcome, Site};
use serde::{Deserialize, Serialize};

use crate::demo::config::{self, find};
use crate::demo::form::Form;
use crate::demo::plan::Step;
use crate::demo::tables;

/// Configurations that are measured by default.
const CONFIGS: [&str; 3] = ["qemu-strict", "strict", "bounce"];

/// Configuration that the other configurations are compared with.
const PEER: &str = "qemu-strict";

/// Figures of one guest, or medians over the rounds. The median of each figure is calculated separately.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct MapTimes {
    /// Times by block size.
    times: BTreeMap<String, MapTime>,
}

type Config = config::Config<MapTimes>;

impl Form for MapTimes {
    type Summary = Self;

    const ESTIMATE: Duration = Duration::from_secs(45);
    const TIME_LIMIT: Duration = Duration::from_secs(300);
    const VCPUS_APART: bool = true;
    const FIO: &'static str = "read, direct, libaio, depth 64, 1 job on 1 vCPU";

    fn is_usual(mode: &Mode, _: &Site) -> bool {
        CONFIGS.contains(&mode.name)
    }

    fn job(_: &Step, quick: bool) -> String {
        workload::fio_profiled(if quick { 8 } else { 48 })
    }

    fn read(_: &Step, outcome: &Outcome) -> Result<Self> {
        Ok(Self { times: workload::map_times(outcome)? })
    }

    fn summary(guests: &[&Self], _: &[&Self]) -> Option<Self> {
        let of = |size: &str, figure: fn(&MapTime) -> f64| {
            median(guests.iter().filter_map(|one| one.times.get(size)).map(figure))
        };
        // The median of the profiler's overhead is calculated separately, so a time without overhead is the difference of two
        // medians.
        let profiler = |size: &str| {
            let of = |figure: fn(&ProfilerTime) -> f64| {
                median(guests.iter().filter_map(|one| one.times.get(size)?.profiler.as_ref()).map(figure))
            };
            Some(ProfilerTime { map_s: of(|time| time.map_s)?, unmap_s: of(|time| time.unmap_s)? })
        };
        let time = |size: &str| {
            let (map_s, unmap_s) = (of(size, |time| time.map_s)?, of(size, |time| time.unmap_s)?);
            Some(MapTime { map_s, unmap_s, profiler: profiler(size) })
        };
        Some(Self { times: config::by_size(time) })
    }

    fn tables(configs: &[Config], _: &Machine) -> String {
        let table = |what, net: fn(&MapTime) -> f64, profiler: fn(&ProfilerTime) -> f64| {
            let profiler = times_alone(configs, |time| time.profiler.as_ref().map(profiler));
            let net = times(configs, net);
            format!(
                "\nSeconds of {what} per GiB, by the kernel's function profiler (difference to {PEER}):\n\n{net}\n\
                 Profiler overhead in seconds, already subtracted from the times above. It is the time of as many calls of\n\
                 an empty function as there were calls for {what}:\n\n\
                 {profiler}"
            )
        };
        table("mapping", MapTime::net_map_s, |time| time.map_s)
            + &table("unmapping", MapTime::net_unmap_s, |time| time.unmap_s)
            + "\n"
    }
}

/// Returns a table of `figure`.
fn times_alone(configs: &[Config], figure: impl Fn(&MapTime) -> Option<f64>) -> String {
    tables::table_by_size(configs.iter().map(|config| (&config.name, config)), |config, size| {
        config.figures.times.get(size).and_then(&figure).map_or_else(|| NONE.into(), |time| format!("{time:.3}"))
    })
}

/// Returns a table of `figure`, with the difference from [`PEER`].
fn times(configs: &[Config], figure: fn(&MapTime) -> f64) -> String {
    let of = |config: &Config, size: &str| config.figures.times.get(size).map(figure);
    let peer = find(configs, PEER);
    tables::table_by_size(configs.iter().map(|config| (&config.name, config)), |config, size| {
        let peer = peer.filter(|peer| peer.name != config.name);
        match (of(config, size), peer.and_then(|peer| of(peer, size))) {
            (None, _) => NONE.into(),
            (Some(own), None) => format!("{own:.3}"),
            (Some(own), Some(peer)) => format!("{own:.3} ({:+.1} %)", (own / peer - 1.0) * 100.0),
        }
    })
}

#[cfg(test)]
mod tests;
