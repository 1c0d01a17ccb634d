// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Exits, IOMMU requests and copied bytes per operation of fio. Unlike times, these counts depend little or not at all on the
//! host's load.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use carom_integration::measure::fio::{self, Cell, Done, Extent, PATTERNS, RANDWRITE, READ};
use carom_integration::measure::mode::{MODES, Mode};
use carom_integration::{Probe, Site};

use crate::counters::{self, OF_IOMMU, OF_KVM};
use crate::table::{self, Row, Scope, Shown, Table, Work, figure};
use crate::throughput::{RAM_MIB, estimate, job, measured, of};

const SHOWN: &[Shown] = &[
    Shown::new("exits", "exits per operation", 2),
    Shown::new("map_requests", "MAP and MAP_LIST requests per operation", 3),
    Shown::new("unmap_requests", "UNMAP requests per operation", 3),
    Shown::new("copied_bytes", "bytes copied per operation", 0),
];

pub(crate) const TABLE: Table = Table::new("counts", "mode", SHOWN, work).once();

/// Name of the figure with the number of operations. All other figures of the table are counts per operation.
pub(crate) const OPERATIONS: &str = "operations";

/// Modes of a quick run.
const QUICK: [&str; 4] = ["no-viommu", "bounce", "strict", "lazy"];

/// Cell with a single operation. It runs before the other cells and measures the cost of starting and ending fio.
pub(crate) const EMPTY: Cell = Cell { pattern: READ, kib: 4, depth: 1, jobs: 1, extent: Extent::Operations(1) };

fn work(scope: Scope, site: &Site) -> Vec<Work> {
    let wanted = |mode: &&Mode| mode.is_at(site) && (scope != Scope::Quick || QUICK.contains(&mode.name));
    let operations = Extent::Operations(if scope == Scope::Quick { 2000 } else { 4000 });
    let cell = |pattern, kib| Cell { pattern, kib, depth: 64, jobs: 1, extent: operations };
    let cells = match scope {
        Scope::Quick => vec![cell(READ, 4), cell(READ, 64)],
        Scope::Plain => {
            [READ, RANDWRITE].into_iter().flat_map(|pattern| [4, 16, 64, 128].map(|kib| cell(pattern, kib))).collect()
        }
        Scope::All => PATTERNS.into_iter().flat_map(|pattern| [4, 16, 64, 128].map(|kib| cell(pattern, kib))).collect(),
    };
    let cells = [vec![EMPTY], cells].concat();
    MODES.iter().filter(wanted).map(|mode| against_empty(mode, cells.clone(), estimate(&cells), row)).collect()
}

/// Returns the work of a guest that runs `cells`. The first cell must be [`EMPTY`]. For each other cell, `row` makes a row from the
/// results of that cell and of [`EMPTY`].
pub(crate) fn against_empty(
    mode: &'static Mode,
    cells: Vec<Cell>,
    estimate: Duration,
    row: fn(&Mode, &Cell, &Done, &Done) -> Result<Row>,
) -> Work {
    let run = move |site: &Site, name: &str| {
        let guest = mode.guest(site, name).memory_mib(RAM_MIB).job(&job(&fio::job(&cells)));
        let outcome = table::run(guest, estimate, site)?;
        let empty =
            fio::results(&outcome, &cells[..1]).remove(0).context("the cell with a single operation has no result")?;
        let mut measured = measured(&outcome, mode, &cells, |cell, done| row(mode, cell, done, &empty))?;
        measured.rows.retain(|row| !is_empty(row));
        Ok(measured)
    };
    Work { name: mode.name.into(), estimate, run: Box::new(run) }
}

/// True if a row belongs to the cell with a single operation.
fn is_empty(row: &Row) -> bool {
    row.key("depth").is_some_and(|depth| *depth == EMPTY.depth)
}

fn row(mode: &Mode, cell: &Cell, done: &Done, empty: &Done) -> Result<Row> {
    let mut row = Row::new(of(mode, cell), [(OPERATIONS, done.operations)]);
    // Subtract the cost of the cell with a single operation.
    let operations = (done.operations - empty.operations).max(1.0);
    let mut add = |figure: &str, counter: &dyn Fn(&Probe) -> Option<f64>| {
        let in_cell = |done: &Done| Some(counter(&done.after)? - counter(&done.before)?);
        let (own, base) = (in_cell(done).context(figure.to_owned())?, in_cell(empty).context(figure.to_owned())?);
        row.figures.insert(figure.into(), (own - base).max(0.0) / operations);
        Ok::<_, anyhow::Error>(())
    };
    for (counter, name) in OF_KVM {
        add(name, &|probe| probe.kvm.get(counter).copied().map(figure))?;
    }
    if mode.iommu && mode.vmm.is_carom() {
        for (counters, name) in OF_IOMMU {
            add(name, &|probe| counters::sum(&probe.iommu, counters))?;
        }
    }
    let copied = (done.copied_bytes - empty.copied_bytes).max(0.0) / operations;
    ensure!(
        copied == 0.0 || mode.name == "bounce" || mode.name == "guest-pages",
        "the guest copied bytes in a mode in which nothing bounces"
    );
    row.figures.insert("copied_bytes".into(), copied);
    Ok(row)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn done(operations: f64, exits: u64, maps: u64) -> Done {
        let probe = |exits: u64, maps: u64| Probe {
            kvm: OF_KVM.map(|(counter, _)| (counter.into(), exits)).into(),
            iommu: json!({"requests_map": maps, "requests_unmap": 0, "requests_window_add": 1, "host_maps": 1}),
            ..Probe::default()
        };
        Done { operations, before: probe(100, 5), after: probe(100 + exits, 5 + maps), ..Done::default() }
    }

    #[test]
    fn cost_of_an_empty_cell_is_subtracted() {
        let strict = MODES.iter().find(|mode| mode.name == "strict").unwrap();
        let row = row(strict, &EMPTY, &done(1001.0, 3300, 1002), &done(1.0, 300, 2)).unwrap();
        let figure = |name: &str| row.figures[name];
        assert!((figure("exits") - 3.0).abs() < 1e-9 && (figure("map_requests") - 1.0).abs() < 1e-9, "{row:?}");
        assert_eq!((figure("window_add_requests"), figure("copied_bytes")), (0.0, 0.0));
        // The row of [`EMPTY`] is found by its keys. The position of this row varies, because failed cells have no rows.
        assert!(is_empty(&row));
    }

    #[test]
    fn copies_in_strict_mode_and_missing_counters_are_errors() {
        let strict = MODES.iter().find(|mode| mode.name == "strict").unwrap();
        let copying = Done { copied_bytes: 4096.0, ..done(1001.0, 1, 1) };
        assert!(row(strict, &EMPTY, &copying, &done(1.0, 1, 1)).is_err());
        let mut blind = done(1001.0, 1, 1);
        blind.after.kvm.clear();
        assert!(row(strict, &EMPTY, &blind, &done(1.0, 1, 1)).is_err());
    }
}
