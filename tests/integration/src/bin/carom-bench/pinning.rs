// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long guests of several sizes take to start, and how much of their memory is pinned while their drive works.

use std::time::Duration;

use carom_integration::Site;
use carom_integration::measure::fio::{self, Cell, Extent, RANDREAD};
use carom_integration::measure::mode::{MODES, Mode};
use carom_integration::workload::{self, PRINT_VERSIONS, WAIT_FOR_NVME};

use crate::table::{self, Measured, Row, Scope, Shown, Table, Work, figure, start_ms};
use crate::throughput::AROUND;

pub(crate) const TABLE: Table = Table {
    name: "pinning",
    across: "mode",
    shown: &[
        Shown { figure: "start_ms", title: "from the VMM's start to the guest's first program, in ms", places: 0 },
        Shown { figure: "pinned_mib", title: "most memory pinned, in MiB", places: 1 },
        Shown { figure: "pinned_percent", title: "of the guest's RAM, in %", places: 1 },
    ],
    work,
};

/// The modes that differ in what is pinned. Without an IOMMU it is all, in each VMM.
const WANTED: [&str; 5] = ["no-viommu", "strict", "bounce", "guest-pages", "qemu-strict"];

/// What the drive does meanwhile.
const CELL: Cell = Cell { pattern: RANDREAD, kib: 64, depth: 64, jobs: 1, extent: Extent::Seconds(2) };

fn work(scope: Scope, _: &Site) -> Vec<Work> {
    let sizes: &[u32] = if scope == Scope::Quick { &[1] } else { &[1, 2, 4] };
    let wanted: &[&str] = if scope == Scope::Quick { &["no-viommu", "strict", "bounce"] } else { &WANTED };
    let modes = || wanted.iter().filter_map(|name| MODES.iter().find(|mode| mode.name == *name));
    sizes.iter().flat_map(|gib| modes().map(|mode| in_a_guest(mode, *gib))).collect()
}

fn in_a_guest(mode: &'static Mode, gib: u32) -> Work {
    let estimate = AROUND + CELL.estimate() + Duration::from_secs(2 * u64::from(gib));
    let run = move |site: &Site, name: &str| {
        let job = format!("{WAIT_FOR_NVME}{PRINT_VERSIONS}{}", fio::job(&[CELL]));
        let guest = mode.guest(site, name).memory_mib(gib << 10).look_every(Duration::from_millis(5)).job(&job);
        let outcome = table::run(guest, estimate, site)?;
        fio::results(&outcome, &[CELL]).remove(0)?;
        let pinned_mib = figure(outcome.peak_pinned_bytes) / f64::from(1 << 20);
        let row = Row::new(
            [("mode", mode.name.into()), ("ram_gib", gib.into())],
            [
                ("start_ms", start_ms(&outcome)?),
                ("pinned_mib", pinned_mib),
                ("pinned_percent", pinned_mib / f64::from(gib << 10) * 100.0),
            ],
        );
        let versions = workload::guest_versions(&outcome)?;
        Ok(Measured { rows: vec![row], versions, retries: outcome.retries, ..Measured::default() })
    };
    Work { name: format!("{}, {gib} GiB", mode.name), estimate, run: Box::new(run) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_all_modes_side_by_side() {
        let names: Vec<String> = work(Scope::Plain, &Site::default()).into_iter().map(|work| work.name).collect();
        assert_eq!(names.len(), 3 * WANTED.len());
        assert_eq!((names[0].as_str(), names[5].as_str()), ("no-viommu, 1 GiB", "no-viommu, 2 GiB"));
    }
}
