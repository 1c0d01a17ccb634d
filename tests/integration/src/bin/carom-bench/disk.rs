// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! fio on disks that the VMMs emulate. The raw image is in the host's RAM, so that no time is spent on a drive of the host.

use std::fs::File;

use anyhow::Context;
use carom_integration::Site;
use carom_integration::measure::fio::{self, AREA_MIB, Cell, Extent, RANDREAD, RANDWRITE, READ, WRITE};
use carom_integration::measure::mode::{EMULATED_MODES, Mode};
use carom_integration::workload::PRINT_VERSIONS;

use crate::table::{self, LITTLE_RAM_MIB, Scope, Table, Work};
use crate::throughput::{self, IOPS, LATENCY};

pub(crate) const TABLE: Table = Table::new("disk", "mode", &[IOPS, LATENCY], work);

/// Directory for images: a file system in RAM.
const IN_RAM: &str = "/dev/shm";

/// Shell lines that wait for the disk.
const WAIT: &str = "i=0\nwhile [ ! -b /dev/vda ] && [ $i -lt 300 ]; do i=$((i + 1)); sleep 0.1; done\n";

fn work(scope: Scope, site: &Site) -> Vec<Work> {
    let cells = cells(scope);
    let modes = EMULATED_MODES.iter().filter(|mode| mode.is_at(site));
    modes.map(|mode| in_a_guest(mode, cells.clone())).collect()
}

/// Returns the cells that a round measures in every mode.
fn cells(scope: Scope) -> Vec<Cell> {
    let cell = |pattern, kib, depth| Cell { pattern, kib, depth, jobs: 1, extent: Extent::Seconds(1) };
    let (patterns, sizes, depths): (&[_], &[u32], &[u32]) = match scope {
        Scope::Quick => return vec![cell(RANDREAD, 4, 1), cell(RANDREAD, 4, 64), cell(RANDREAD, 128, 64)],
        Scope::Plain => (&[READ, WRITE, RANDREAD, RANDWRITE], &[4, 16, 64, 128], &[1, 64]),
        Scope::All => (&fio::PATTERNS, &[4, 16, 64, 128, 1024], &[1, 16, 64]),
    };
    let mut cells = Vec::new();
    for pattern in patterns {
        for kib in sizes {
            cells.extend(depths.iter().map(|depth| cell(*pattern, *kib, *depth)));
        }
    }
    cells
}

fn in_a_guest(mode: &'static Mode, cells: Vec<Cell>) -> Work {
    let estimate = throughput::estimate(&cells);
    let run = move |site: &Site, name: &str| {
        let dir = tempfile::tempdir_in(IN_RAM).context("cannot create a directory for the disk image in /dev/shm")?;
        let image = dir.path().join("image");
        let length = u64::from(AREA_MIB) << 20;
        File::create(&image)
            .and_then(|file| file.set_len(length))
            .context("cannot create the disk image in /dev/shm")?;
        let guest = mode.bare_guest(name).memory_mib(LITTLE_RAM_MIB).virtio_disk(&image, mode.iommu);
        let job = format!("{WAIT}{PRINT_VERSIONS}{}", fio::job_on("/dev/vda", &cells));
        let outcome = table::run(guest.job(&job), estimate, site)?;
        throughput::measured(&outcome, mode, &cells, |cell, done| Ok(throughput::row(mode, cell, done)))
    };
    Work { name: mode.name.into(), estimate, run: Box::new(run) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mode_has_one_guest_and_each_scope_contains_the_last() {
        let site = Site::default();
        let names: Vec<String> = work(Scope::Plain, &site).into_iter().map(|work| work.name).collect();
        assert_eq!(names, ["no-viommu", "qemu-no-viommu", "bounce", "strict", "qemu-strict"]);
        let scopes = [Scope::Quick, Scope::Plain, Scope::All].map(cells);
        assert_eq!(scopes.each_ref().map(Vec::len), [3, 32, 75]);
        assert!(scopes[0].iter().all(|cell| scopes[1].contains(cell)));
        assert!(scopes[1].iter().all(|cell| scopes[2].contains(cell)));
    }
}
