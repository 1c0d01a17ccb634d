// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cost of seccomp filters: fio's operations per second with and without filters. The two guests of a comparison run directly after
//! each other.

use carom_integration::Site;
use carom_integration::measure::fio::{Cell, Done, Extent, READ};
use carom_integration::measure::mode::{BOUNCE, Mode, STRICT};

use crate::table::{LITTLE_RAM_MIB, Row, Scope, Table, Work};
use crate::throughput::{self, IOPS};

pub(crate) const TABLE: Table = Table::new("sandbox", "seccomp", &[IOPS], work);

fn work(scope: Scope, _: &Site) -> Vec<Work> {
    let sizes: &[u32] = if scope == Scope::Quick { &[4] } else { &[4, 64] };
    let cell = |kib: &u32| Cell { pattern: READ, kib: *kib, depth: 64, jobs: 1, extent: Extent::Seconds(2) };
    let cells: Vec<Cell> = sizes.iter().map(cell).collect();
    let both = |mode| [true, false].map(|filtered| in_a_guest(mode, filtered, cells.clone()));
    [&BOUNCE, &STRICT].into_iter().flat_map(both).collect()
}

fn in_a_guest(mode: &'static Mode, filtered: bool, cells: Vec<Cell>) -> Work {
    let guest = move |site: &Site, name: &str| Ok(mode.guest(site, name).memory_mib(LITTLE_RAM_MIB).seccomp(filtered));
    let row = move |cell: &Cell, done: &Done| {
        let of = [("mode", mode.name.into()), ("size", cell.size().into()), ("seccomp", filtered.to_string().into())];
        Row::new(of, [("iops", done.iops), ("latency_p99_us", done.percentiles_us[1])])
    };
    throughput::of_cells(format!("{} with seccomp {filtered}", mode.name), mode, cells, guest, row)
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
