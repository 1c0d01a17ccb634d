// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cost of mapping and unmapping, measured by the kernel's `dma_map_benchmark` on the drive.

use std::time::Duration;

use anyhow::Result;
use carom_integration::measure::mode::{MODES, Mode};
use carom_integration::workload::{self, FROM_DEVICE, Mapping};
use carom_integration::{Outcome, Site};

use crate::table::{self, LITTLE_RAM_MIB, Measured, Row, Scope, Shown, Table, Work};
use crate::throughput::{self, AROUND, QUICK};

const SHOWN: &[Shown] = &[
    Shown::new("map_us", "mapping, copies included, in µs", 1),
    Shown::new("unmap_us", "unmapping, copies included, in µs", 1),
];

pub(crate) const TABLE: Table = Table::new("map_time", "mode", SHOWN, work);

/// Duration of each measurement, in seconds.
const SECONDS: u32 = 1;

fn work(scope: Scope, site: &Site) -> Vec<Work> {
    let modes = MODES.iter().filter(|mode| mode.is_at(site));
    let modes: Vec<_> = modes.filter(|mode| scope != Scope::Quick || QUICK.contains(&mode.name)).collect();
    let (alone, others) = mappings(scope).into_iter().partition(|mapping: &Mapping| mapping.threads == 1);
    let all: [(u8, Vec<Mapping>); 2] = [(1, alone), (2, others)];
    let guests = all.iter().filter(|(_, mappings)| !mappings.is_empty());
    guests.flat_map(|(vcpus, mappings)| modes.iter().map(|mode| in_a_guest(mode, *vcpus, mappings.clone()))).collect()
}

/// Returns the mappings that a round measures in every mode.
fn mappings(scope: Scope) -> Vec<Mapping> {
    let sizes: &[(u16, &[u8])] = match scope {
        Scope::Quick => &[(1, &[1])],
        Scope::Plain => &[(1, &[1, 2, 4, 8]), (16, &[1, 2])],
        Scope::All => &[(1, &[1, 2, 4, 8]), (4, &[1, 2, 4, 8]), (16, &[1, 2, 4, 8]), (64, &[1, 2, 4, 8])],
    };
    let mut mappings = Vec::new();
    for (pages, threads) in sizes {
        for threads in *threads {
            let mapping = Mapping { threads: *threads, pages: *pages, ..FROM_DEVICE };
            mappings.extend([mapping, Mapping { to_device: true, ..mapping }]);
        }
    }
    mappings
}

/// Returns the work of a guest. In a guest with one vCPU, one thread maps memory. In a guest with two vCPUs, several threads
/// map memory at the same time.
fn in_a_guest(mode: &'static Mode, vcpus: u8, mappings: Vec<Mapping>) -> Work {
    // The estimate adds a second to each measurement, because the benchmark program checks its counts after each measurement.
    let each = Duration::from_secs(u64::from(SECONDS) + 1);
    let estimate = AROUND + each * u32::try_from(mappings.len()).unwrap_or(u32::MAX);
    let run = move |site: &Site, name: &str| {
        let guest = mode.guest(site, name).memory_mib(LITTLE_RAM_MIB).cpus(vcpus);
        let job = throughput::job(&workload::dma_map_benchmark(SECONDS, &mappings));
        let outcome = table::run(guest.job(&job), estimate, site)?;
        measured(&outcome, mode, &mappings)
    };
    Work { name: format!("{} with {vcpus} vCPUs", mode.name), estimate, run: Box::new(run) }
}

fn measured(outcome: &Outcome, mode: &Mode, mappings: &[Mapping]) -> Result<Measured> {
    let rows = mappings.iter().map(|mapping| {
        let times = workload::dma_map_result(outcome, *mapping)?;
        let of = [
            ("mode", mode.name.into()),
            ("direction", if mapping.to_device { "to-device" } else { "from-device" }.into()),
            ("size", format!("{}k", u32::from(mapping.pages) * 4).into()),
            ("threads", mapping.threads.into()),
        ];
        Ok(Row::new(of, [("map_us", times.map_us), ("unmap_us", times.unmap_us)]))
    });
    Measured::of(outcome, rows.collect::<Result<_>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_per_mapping_and_missing_ones_fail() {
        let console = "CAROM-FIO-VERSION fio-3.33\nCAROM-KERNEL 6.12\n\
                       CAROM-MAP-US-FROM-2-16 3.5\nCAROM-UNMAP-US-FROM-2-16 0.5\n";
        let outcome = Outcome { console: console.into(), ..Outcome::default() };
        let mapping = Mapping { threads: 2, pages: 16, ..FROM_DEVICE };
        let found = measured(&outcome, &MODES[1], &[mapping]).unwrap();
        let row = &found.rows[0];
        assert_eq!((row.figures["map_us"], row.figures["unmap_us"]), (3.5, 0.5));
        assert_eq!((row.key("size").unwrap(), row.key("threads").unwrap()), (&"64k".into(), &2.into()));
        assert!(measured(&outcome, &MODES[1], &[FROM_DEVICE]).is_err());
    }

    #[test]
    fn one_thread_has_one_vcpu_and_several_threads_have_two() {
        let names = |scope| work(scope, &Site::default()).into_iter().map(|work| work.name).collect::<Vec<_>>();
        assert_eq!(names(Scope::Quick).iter().filter(|name| name.ends_with("with 1 vCPUs")).count(), 6);
        let plain = names(Scope::Plain);
        assert_eq!(
            (plain.len(), plain[1].as_str(), plain[8].as_str()),
            (14, "bounce with 1 vCPUs", "bounce with 2 vCPUs")
        );
    }

    #[test]
    fn larger_scope_contains_the_smaller() {
        let [quick, plain, all] = [Scope::Quick, Scope::Plain, Scope::All].map(mappings);
        assert_eq!((quick.len(), plain.len(), all.len()), (2, 12, 32));
        assert!(quick.iter().all(|mapping| plain.contains(mapping)));
        assert!(plain.iter().all(|mapping| all.contains(mapping)));
    }
}
