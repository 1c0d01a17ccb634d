// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Direct I/O with buffers in window memory that the kernel lends to fio. Compares fio's operations per second in three modes:
//! with these buffers, with copied I/O, and without an IOMMU.

use carom_integration::Site;
use carom_integration::measure::fio::{self, Cell, Extent, RANDWRITE, READ};
use carom_integration::measure::mode::{BOUNCE, LENT, Mode, NO_VIOMMU};

use crate::table::{self, Scope, Table, Work};
use crate::throughput::{self, RAM_MIB, SHOWN};

pub(crate) const TABLE: Table = Table::new("lent", "mode", SHOWN, work);

fn work(scope: Scope, _: &Site) -> Vec<Work> {
    let cells = cells(scope);
    [&NO_VIOMMU, &BOUNCE, &LENT].into_iter().map(|mode| in_a_guest(mode, cells.clone())).collect()
}

fn cells(scope: Scope) -> Vec<Cell> {
    let sizes: &[u32] = if scope == Scope::Quick { &[64] } else { &[4, 16, 64, 128] };
    let cell = |pattern, kib| Cell { pattern, kib, depth: 64, jobs: 1, extent: Extent::Seconds(2) };
    [READ, RANDWRITE].into_iter().flat_map(|pattern| sizes.iter().map(move |kib| cell(pattern, *kib))).collect()
}

fn in_a_guest(mode: &'static Mode, cells: Vec<Cell>) -> Work {
    let estimate = throughput::estimate(&cells);
    let run = move |site: &Site, name: &str| {
        let guest = mode.guest(site, name).memory_mib(RAM_MIB);
        let job = if *mode == LENT { fio::job_of_lent(&cells) } else { fio::job_of_registered(&cells) };
        let outcome = table::run(guest.job(&throughput::job(&job)), estimate, site)?;
        throughput::measured(&outcome, mode, &cells, |cell, done| Ok(throughput::row(mode, cell, done)))
    };
    Work { name: mode.name.into(), estimate, run: Box::new(run) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quick_run_has_cells_of_the_plain_one() {
        let [quick, plain] = [Scope::Quick, Scope::Plain].map(cells);
        assert_eq!([quick.len(), plain.len()], [2, 8]);
        assert!(quick.iter().all(|cell| plain.contains(cell)));
    }
}
