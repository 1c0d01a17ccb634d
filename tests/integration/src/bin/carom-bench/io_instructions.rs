// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Instructions that the emulated machine executes per operation of fio. The count includes the guest, the VMM and the host's
//! kernel.

use std::time::Duration;

use anyhow::{Context, Result};
use carom_integration::measure::fio::{Cell, Done, Extent, RANDWRITE, READ};
use carom_integration::measure::mode::{
    BOUNCE, BOUNCE_BASE, BOUNCE_BASE_VMM, CH_STRICT, Mode, NO_VIOMMU, QEMU_STRICT, STRICT, STRICT_BASE_VMM,
};
use carom_integration::{Probe, Site};

use crate::counts::{EMPTY, OPERATIONS, against_empty};
use crate::table::{self, Row, Scope, Shown, Table, Work};
use crate::throughput::of;

const SHOWN: &[Shown] = &[Shown::new("instructions", "instructions of the whole machine per operation", 0)];

pub(crate) const TABLE: Table = Table::new("io_instructions", "mode", SHOWN, work).once();

/// Estimated duration of a guest. The emulator counts during the whole time, which slows the guest down. In strict mode, a guest
/// executes about seven billion instructions. This figure is extrapolated from the cells with blocks of 64 KiB.
const ESTIMATE: Duration = Duration::from_secs(90);

/// Compared modes.
static COMPARED: [Mode; 8] =
    [NO_VIOMMU, BOUNCE, BOUNCE_BASE, BOUNCE_BASE_VMM, STRICT, STRICT_BASE_VMM, QEMU_STRICT, CH_STRICT];

fn work(_: Scope, site: &Site) -> Vec<Work> {
    // An emulated machine without an edu device does not count instructions.
    let modes = COMPARED.iter().filter(|mode| site.edu.is_some() && mode.is_at(site));
    modes.map(in_a_guest).collect()
}

/// Cells of modes whose guests send MAP requests for each operation. Each entry has the size of an operation in KiB, and the number
/// of operations. The cell with the largest size has fewer operations, so that the cell ends before fio's time limit.
const ASKING: [(u32, u32); 3] = [(4, 4000), (64, 4000), (128, 2000)];

/// Factor for the number of operations in other modes, where operations are faster. With more operations, merged interrupts
/// affect the result less.
const MORE: u32 = 4;

/// Returns the cells of a mode.
fn cells(mode: &Mode) -> impl Iterator<Item = Cell> {
    let more = if mode.iommu && !mode.windows { 1 } else { MORE };
    let cell = move |pattern, (kib, operations)| {
        let extent = Extent::Operations(operations * more);
        Cell { pattern, kib, depth: 64, jobs: 1, extent }
    };
    [READ, RANDWRITE].into_iter().flat_map(move |pattern| ASKING.map(|size| cell(pattern, size)))
}

fn in_a_guest(mode: &'static Mode) -> Work {
    let cells = [EMPTY].into_iter().chain(cells(mode)).collect();
    let Work { name, estimate, run } = against_empty(mode, cells, ESTIMATE, row);
    let run = move |site: &Site, name: &str| {
        site.instructions.as_ref().context("this table needs a rig that counts instructions")?;
        run(site, name)
    };
    Work { name, estimate, run: Box::new(run) }
}

fn row(mode: &Mode, cell: &Cell, done: &Done, empty: &Done) -> Result<Row> {
    let executed = |done: &Done| {
        let at = |probe: &Probe| probe.executed.context("the emulator reported no instruction count");
        Ok::<_, anyhow::Error>(table::figure(at(&done.after)?) - table::figure(at(&done.before)?))
    };
    let operations = (done.operations - empty.operations).max(1.0);
    let instructions = (executed(done)? - executed(empty)?) / operations;
    Ok(Row::new(of(mode, cell), [(OPERATIONS, done.operations), ("instructions", instructions)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(operations: f64, executed: Option<u64>) -> Done {
        Done {
            operations,
            before: Probe { executed: Some(1000), ..Probe::default() },
            after: Probe { executed, ..Probe::default() },
            ..Done::default()
        }
    }

    #[test]
    fn each_pattern_has_three_sizes_within_the_byte_limit() {
        let bytes = |cell: &Cell| {
            let Extent::Operations(operations) = cell.extent else { panic!("{cell:?}") };
            cell.kib * operations
        };
        for (mode, most) in [(&STRICT, 64 * 4000), (&BOUNCE, 64 * 16_000), (&NO_VIOMMU, 64 * 16_000)] {
            let cells: Vec<Cell> = cells(mode).collect();

            let sizes: Vec<(&str, u32)> = cells.iter().map(|cell| (cell.pattern.name, cell.kib)).collect();
            let of = |pattern| [4, 64, 128].map(|kib| (pattern, kib));
            assert_eq!(sizes, [of("read"), of("randwrite")].concat());
            assert!(cells.iter().all(|cell| bytes(cell) <= most), "{cells:?}");
            // The row of [`EMPTY`] is found by its depth, so no other cell may have this depth.
            assert!(cells.iter().all(|cell| cell.depth != EMPTY.depth));
        }
    }

    #[test]
    fn cost_of_a_single_operation_is_subtracted() {
        let row = row(&STRICT, &EMPTY, &done(1001.0, Some(5_002_000)), &done(1.0, Some(2000))).unwrap();

        assert!((row.figures["instructions"] - 5000.0).abs() < 1e-9, "{row:?}");
    }

    #[test]
    fn missing_instruction_counts_are_an_error() {
        assert!(row(&STRICT, &EMPTY, &done(1001.0, None), &done(1.0, Some(2000))).is_err());
    }
}
