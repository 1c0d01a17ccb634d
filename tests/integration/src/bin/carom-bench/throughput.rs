// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! fio's operations per second, their latencies, and the CPU time of guest and VMM.

use std::time::Duration;

use anyhow::Result;
use carom_integration::measure::fio::{self, Cell, Done, Extent, PATTERNS, RANDREAD, RANDWRITE, READ, WRITE};
use carom_integration::measure::mode::{MODES, Mode};
use carom_integration::workload::{PRINT_VERSIONS, WAIT_FOR_NVME};
use carom_integration::{Guest, Outcome, Probe, Site};
use serde_json::Value;

use crate::counters;
use crate::table::{self, Measured, Row, Scope, Shown, Table, Work};

pub(crate) const IOPS: Shown = Shown::new("iops", "operations per second", 0);
pub(crate) const LATENCY: Shown = Shown::new("latency_p99_us", "99th percentile of the latency, in µs", 0);
const GUEST_CPU: Shown = Shown::new("guest_cpu_us", "CPU time of the guest per operation, in µs", 0);
const VMM_CPU: Shown = Shown::new("vmm_cpu_us", "CPU time of the VMM outside the guest per operation, in µs", 0);

pub(crate) const TABLE: Table = Table::new("throughput", "mode", &[IOPS, LATENCY, GUEST_CPU, VMM_CPU], work);

/// Figures of tables that show only the operations per second and the guest's CPU time per operation.
pub(crate) const SHOWN: &[Shown] = &[IOPS, GUEST_CPU];

/// RAM of each guest, in MiB.
pub(crate) const RAM_MIB: u32 = 1024;

/// Time from the VMM's start to the first cell, plus the time from the last cell to the VMM's end.
pub(crate) const AROUND: Duration = Duration::from_secs(10);

/// Maximum number of cells per guest. If a guest hangs, only the cells of this guest are lost.
const AT_A_TIME: usize = 30;

/// Modes of a quick run.
pub(crate) const QUICK: [&str; 10] = [
    "no-viommu",
    "no-viommu-base-vmm",
    "bounce",
    "bounce-base",
    "bounce-base-vmm",
    "guest-pages",
    "strict",
    "strict-base-vmm",
    "qemu-strict",
    "lazy",
];

fn work(scope: Scope, site: &Site) -> Vec<Work> {
    let modes = || MODES.iter().filter(|mode| mode.is_at(site));
    let modes: Vec<&'static Mode> =
        modes().filter(|mode| scope != Scope::Quick || QUICK.contains(&mode.name)).collect();
    let cells = cells(scope);
    let mut work = Vec::new();
    for jobs in [1, 2] {
        let cells: Vec<Cell> = cells.iter().copied().filter(|cell| cell.jobs == jobs).collect();
        for (part, cells) in cells.chunks(AT_A_TIME).enumerate() {
            work.extend(modes.iter().map(|mode| in_a_guest(mode, jobs, part, cells.to_vec())));
        }
    }
    work
}

/// Returns the cells that a round measures in every mode.
fn cells(scope: Scope) -> Vec<Cell> {
    let cell = |pattern, kib, depth, jobs| Cell { pattern, kib, depth, jobs, extent: Extent::Seconds(2) };
    match scope {
        Scope::Quick => {
            vec![cell(READ, 4, 64, 1), cell(READ, 64, 64, 1), cell(RANDWRITE, 4, 64, 1), cell(RANDWRITE, 64, 64, 1)]
        }
        Scope::Plain => {
            let of = |pattern| {
                let sizes: &[u32] =
                    if [READ, WRITE, RANDWRITE].contains(&pattern) { &[4, 16, 64, 128] } else { &[4, 64] };
                sizes.iter().map(move |kib| cell(pattern, *kib, 64, 1))
            };
            let mut cells: Vec<Cell> = PATTERNS.into_iter().flat_map(of).collect();
            cells.extend([1, 16].map(|depth| cell(RANDREAD, 4, depth, 1)));
            // With buffers of 64 MiB in flight, a guest whose windows have 64 MiB must map some of them.
            cells.extend(
                [(1024, 64), (4096, 16)]
                    .into_iter()
                    .flat_map(|(kib, depth)| [READ, WRITE].map(|pattern| cell(pattern, kib, depth, 1))),
            );
            cells.extend([4, 16, 64, 128].map(|kib| cell(READ, kib, 64, 2)));
            cells
        }
        Scope::All => {
            let mut cells = Vec::new();
            for jobs in [1, 2] {
                for pattern in PATTERNS {
                    for kib in [4, 16, 64, 128, 256, 1024, 4096] {
                        cells.extend([1, 16, 64].map(|depth| cell(pattern, kib, depth, jobs)));
                    }
                }
            }
            cells
        }
    }
}

fn in_a_guest(mode: &'static Mode, jobs: u8, part: usize, cells: Vec<Cell>) -> Work {
    let name = match part {
        0 => format!("{} with {jobs} jobs", mode.name),
        _ => format!("{} with {jobs} jobs, part {}", mode.name, part + 1),
    };
    let guest = move |site: &Site, name: &str| Ok(mode.guest(site, name).memory_mib(RAM_MIB).cpus(jobs));
    of_cells(name, mode, cells, guest, move |cell, done| row(mode, cell, done))
}

/// Returns the work of a guest that runs cells of fio on its drive. `row` makes a row from each result.
pub(crate) fn of_cells(
    name: String,
    mode: &'static Mode,
    cells: Vec<Cell>,
    guest: impl Fn(&Site, &str) -> Result<Guest> + 'static,
    row: impl Fn(&Cell, &Done) -> Row + 'static,
) -> Work {
    let estimate = estimate(&cells);
    let run = move |site: &Site, name: &str| {
        let outcome = table::run(guest(site, name)?.job(&job(&fio::job(&cells))), estimate, site)?;
        measured(&outcome, mode, &cells, |cell, done| Ok(row(cell, done)))
    };
    Work { name, estimate, run: Box::new(run) }
}

/// Returns the job of a guest that waits for its drive and then runs the shell lines `fio`.
pub(crate) fn job(fio: &str) -> String {
    format!("{WAIT_FOR_NVME}{PRINT_VERSIONS}{fio}")
}

/// Estimates the duration of a guest with these cells.
pub(crate) fn estimate(cells: &[Cell]) -> Duration {
    AROUND + cells.iter().map(Cell::estimate).sum::<Duration>()
}

/// Returns the rows of a guest's cells, and the failures of cells without a row.
pub(crate) fn measured(
    outcome: &Outcome,
    mode: &Mode,
    cells: &[Cell],
    row: impl Fn(&Cell, &Done) -> Result<Row>,
) -> Result<Measured> {
    let mut measured = Measured::of(outcome, Vec::new())?;
    for (cell, result) in cells.iter().zip(fio::results(outcome, cells)) {
        match result.and_then(|done| row(cell, &done)) {
            Ok(row) => measured.rows.push(row),
            Err(error) => {
                let (size, pattern) = (cell.size(), cell.pattern.name);
                measured.failures.push(format!("{}: {pattern} of {size}, depth {}: {error:#}", mode.name, cell.depth));
            }
        }
    }
    Ok(measured)
}

/// Returns the keys of a row of a fio cell.
pub(crate) fn of(mode: &Mode, cell: &Cell) -> [(&'static str, Value); 5] {
    [
        ("mode", mode.name.into()),
        ("pattern", cell.pattern.name.into()),
        ("size", cell.size().into()),
        ("depth", cell.depth.into()),
        ("jobs", cell.jobs.into()),
    ]
}

/// Returns the row of one cell.
pub(crate) fn row(mode: &Mode, cell: &Cell, done: &Done) -> Row {
    let each = |of: fn(&Probe) -> Duration| {
        (of(&done.after).saturating_sub(of(&done.before))).as_secs_f64() * 1e6 / done.operations
    };
    let [p50, p99, p999] = done.percentiles_us;
    let figures = [
        ("iops", done.iops),
        ("mib_s", done.mib_s),
        ("latency_us", done.latency_us),
        ("latency_p50_us", p50),
        ("latency_p99_us", p99),
        ("latency_p99_9_us", p999),
        ("guest_cpu_us", each(|probe| probe.guest_cpu)),
        ("vmm_cpu_us", each(|probe| probe.vmm_cpu)),
        ("copied_bytes", done.copied_bytes / done.operations),
    ];
    let mut row = Row::new(of(mode, cell), figures);
    // Unlike in the table `counts`, these counts include the start and the end of fio.
    for (name, count) in counters::in_cell(done) {
        row.figures.insert(name.into(), count / done.operations);
    }
    row
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_scope_has_the_cells_of_the_smaller_one() {
        let scopes = [Scope::Quick, Scope::Plain, Scope::All].map(cells);
        assert_eq!(scopes.each_ref().map(Vec::len), [4, 26, 210]);
        for cell in &scopes[0] {
            assert!(scopes[1].contains(cell), "{cell:?}");
        }
        for cell in &scopes[1] {
            assert!(scopes[2].contains(cell), "{cell:?}");
        }
    }

    #[test]
    fn modes_of_a_cell_are_adjacent_and_guests_hold_few_cells() {
        let work = work(Scope::All, &Site::default());
        let names: Vec<&str> = work.iter().map(|work| work.name.as_str()).collect();
        assert_eq!(&names[..2], ["no-viommu with 1 jobs", "bounce with 1 jobs"]);
        assert_eq!(names.len(), 7 * 8, "seven modes without Cloud Hypervisor, each in eight guests: {names:?}");
        assert!(work.iter().all(|work| work.estimate < Duration::from_secs(150)));
    }

    #[test]
    fn row_has_exits_requests_and_copies_for_an_operation() {
        let probe = |exits: u64, maps: u64| Probe {
            kvm: [("exits".into(), exits)].into(),
            iommu: json!({"requests_map": maps}),
            ..Probe::default()
        };
        let cell = cells(Scope::Quick)[0];
        let done = Done {
            operations: 100.0,
            copied_bytes: 409_600.0,
            before: probe(50, 7),
            after: probe(350, 107),
            ..Done::default()
        };
        let row = row(&MODES[0], &cell, &done);
        for (figure, wanted) in [("exits", 3.0), ("map_requests", 1.0), ("copied_bytes", 4096.0)] {
            assert!((row.figures[figure] - wanted).abs() < 1e-9, "{figure}: {row:?}");
        }
        assert!(!row.figures.contains_key("unmap_requests"), "a missing count became a figure: {row:?}");
    }

    #[test]
    fn quick_modes_are_modes() {
        assert!(QUICK.iter().all(|name| MODES.iter().any(|mode| mode.name == *name)));
    }
}
