// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What filters of system calls cost: operations of fio a second with and without them, guest beside guest.

use std::time::Duration;

use carom_integration::Site;
use carom_integration::measure::fio::{self, Cell, Extent, READ};
use carom_integration::measure::mode::{BOUNCE, Mode, STRICT};
use carom_integration::workload::{PRINT_VERSIONS, WAIT_FOR_NVME};

use crate::table::{self, Row, Scope, Shown, Table, Work};
use crate::throughput::{self, AROUND};

pub(crate) const TABLE: Table = Table {
    name: "sandbox",
    across: "seccomp",
    shown: &[Shown { figure: "iops", title: "operations a second", places: 0 }],
    is_once_enough: false,
    work,
};

/// Memory of the guest.
const RAM_MIB: u32 = 512;

fn work(scope: Scope, _: &Site) -> Vec<Work> {
    let sizes: &[u32] = if scope == Scope::Quick { &[4] } else { &[4, 64] };
    let cell = |kib: &u32| Cell { pattern: READ, kib: *kib, depth: 64, jobs: 1, extent: Extent::Seconds(2) };
    let cells: Vec<Cell> = sizes.iter().map(cell).collect();
    let both = |mode| [true, false].map(|filtered| in_a_guest(mode, filtered, cells.clone()));
    [&BOUNCE, &STRICT].into_iter().flat_map(both).collect()
}

fn in_a_guest(mode: &'static Mode, filtered: bool, cells: Vec<Cell>) -> Work {
    let estimate = AROUND + cells.iter().map(Cell::estimate).sum::<Duration>();
    let run = move |site: &Site, name: &str| {
        let guest = mode.guest(site, name).memory_mib(RAM_MIB).seccomp(filtered);
        let job = format!("{WAIT_FOR_NVME}{PRINT_VERSIONS}{}", fio::job(&cells));
        let outcome = table::run(guest.job(&job), estimate, site)?;
        throughput::measured(&outcome, mode, &cells, |cell, done| {
            let of =
                [("mode", mode.name.into()), ("size", cell.size().into()), ("seccomp", filtered.to_string().into())];
            Ok(Row::new(of, [("iops", done.iops), ("latency_p99_us", done.percentiles_us[1])]))
        })
    };
    Work { name: format!("{} with seccomp {filtered}", mode.name), estimate, run: Box::new(run) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mode_with_filters_is_followed_by_the_one_without() {
        let names: Vec<String> = work(Scope::Plain, &Site::default()).into_iter().map(|work| work.name).collect();
        let wanted = ["bounce with seccomp true", "bounce with seccomp false", "strict with seccomp true"];
        assert_eq!((&names[..3], names.len()), (&wanted.map(String::from)[..], 4));
    }
}
