// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Gain in operations per second from a second job on a second vCPU. The gain is measured on a real drive, and on a drive that
//! discards writes. The drive that discards writes is so fast that it limits neither one job nor two jobs.

use anyhow::Context;
use carom_integration::Site;
use carom_integration::measure::fio::{Cell, Done, Extent, Pattern, RANDWRITE, READ};
use carom_integration::measure::mode::{BOUNCE, LAZY, Mode, NO_VIOMMU, STRICT};

use crate::table::{Scope, Table, Work};
use crate::throughput::{self, RAM_MIB, SHOWN};

pub(crate) const TABLE: Table = Table::new("scaling", "mode", SHOWN, work);

/// Drive of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Drive {
    /// First drive of the site.
    Real,
    /// Drive that discards writes. The emulator copies no data for this drive.
    Null,
}

/// Returns the work. The guests with one job and with two jobs are adjacent, because they are compared.
fn work(scope: Scope, site: &Site) -> Vec<Work> {
    let drives: &[Drive] = if site.null_nvme.is_some() { &[Drive::Real, Drive::Null] } else { &[Drive::Real] };
    let mut work = Vec::new();
    for mode in [&NO_VIOMMU, &BOUNCE, &STRICT, &LAZY] {
        for drive in drives {
            work.extend([1, 2].map(|jobs| in_a_guest(mode, *drive, jobs, cells(scope, *drive, jobs))));
        }
    }
    work
}

fn cells(scope: Scope, drive: Drive, jobs: u8) -> Vec<Cell> {
    let sizes: &[u32] = if scope == Scope::Quick { &[4, 128] } else { &[4, 16, 64, 128] };
    let patterns: &[Pattern] = if drive == Drive::Real { &[READ] } else { &[READ, RANDWRITE] };
    let cell = |pattern, kib| Cell { pattern, kib, depth: 64, jobs, extent: Extent::Seconds(2) };
    patterns.iter().flat_map(|pattern| sizes.iter().map(move |kib| cell(*pattern, *kib))).collect()
}

fn in_a_guest(mode: &'static Mode, drive: Drive, jobs: u8, cells: Vec<Cell>) -> Work {
    let (key, address): (_, fn(&Site) -> Option<&String>) = match drive {
        Drive::Real => ("real", |site| site.nvme.first()),
        Drive::Null => ("null", |site| site.null_nvme.as_ref()),
    };
    let guest = move |site: &Site, name: &str| {
        let address = address(site).context(
            "this table needs the drives CAROM_NVME and CAROM_NULL_NVME; run scripts/bench, which sets both variables",
        )?;
        Ok(mode.guest_with(address, name).memory_mib(RAM_MIB).cpus(jobs))
    };
    let row = move |cell: &Cell, done: &Done| {
        let mut row = throughput::row(mode, cell, done);
        row.of.push(("drive".into(), key.into()));
        row
    };
    throughput::of_cells(format!("{} with {jobs} jobs, {key} drive", mode.name), mode, cells, guest, row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_job_and_two_have_the_same_cells_side_by_side() {
        for (drive, count) in [(Drive::Real, 4), (Drive::Null, 8)] {
            let [one, two] = [1, 2].map(|jobs| cells(Scope::Plain, drive, jobs));
            assert_eq!(one.len(), count);
            assert!(one.iter().zip(&two).all(|(one, two)| Cell { jobs: 2, ..*one } == *two));
            assert!(cells(Scope::Quick, drive, 1).iter().all(|cell| one.contains(cell)));
        }
    }

    #[test]
    fn null_drive_is_measured_if_it_exists() {
        let mut site = Site { nvme: vec!["0000:01:00.0".into()], ..Site::default() };
        let names = |site: &Site| work(Scope::Plain, site).into_iter().map(|work| work.name).collect::<Vec<_>>();
        assert_eq!(names(&site)[..2], ["no-viommu with 1 jobs, real drive", "no-viommu with 2 jobs, real drive"]);
        assert_eq!(names(&site).len(), 8);
        site.null_nvme = Some("0000:00:1c.0".into());
        assert_eq!(names(&site)[2], "no-viommu with 1 jobs, null drive");
        assert_eq!(names(&site).len(), 16);
    }
}
