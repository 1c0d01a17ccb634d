// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cost of growing pools. One part of the table compares empty bounce pools, filled bounce pools, and swiotlb's pools. In the
//! other part, fio uses a single buffer once or many times. This part compares bouncing with a static mapping.

use std::time::Duration;

use anyhow::{Context, Result};
use carom_integration::measure::fio::{self, Cell, Done, Extent, Pattern, READ, WRITE};
use carom_integration::measure::mode::{BOUNCE, GUEST_PAGES, Mode, NO_VIOMMU, STRICT};
use carom_integration::measure::statistics::median;
use carom_integration::{Outcome, Probe, Site};

use crate::counters;
use crate::table::{self, Measured, Row, Scope, Shown, Table, Work};
use crate::throughput::{self, AROUND, RAM_MIB};

const SHOWN: &[Shown] = &[
    Shown::new("mib_s", "MiB per second", 1),
    Shown::new("requests", "requests to the virtio-iommu for all uses of a buffer", 0),
    Shown::new("use_us", "time of one use of a buffer, in µs", 0),
];

pub(crate) const TABLE: Table = Table::new("pools", "mode", SHOWN, work).once();

/// Mode without an IOMMU, with swiotlb's pool of 64 MiB. The kernel allocates this pool at boot.
const SWIOTLB: Mode = Mode { name: "swiotlb", cmdline: "swiotlb=force", ..NO_VIOMMU };
/// Mode without an IOMMU, with a swiotlb pool of 1 MiB. The kernel enlarges this pool at run time (`CONFIG_SWIOTLB_DYNAMIC`).
const SWIOTLB_DYNAMIC: Mode = Mode { name: "swiotlb-dynamic", cmdline: "swiotlb=512,force", ..NO_VIOMMU };

/// Modes of the comparison of pools. Only the first mode has no pool.
static POOLS: [Mode; 5] = [NO_VIOMMU, SWIOTLB, SWIOTLB_DYNAMIC, BOUNCE, GUEST_PAGES];

/// Modes of the comparison of buffers. The first mode maps all memory statically.
static BUFFERS: [Mode; 4] = [NO_VIOMMU, BOUNCE, GUEST_PAGES, STRICT];

/// Number of runs of each cell that uses a buffer only once. The row contains the median of these runs.
const FIRST_USES: usize = 5;

/// Shell lines that make the bounce pools return all their chunks, if the guest has such pools.
const EMPTY_POOLS: &str = r#"
for pool in /sys/kernel/debug/iommu_bounce/domain*; do
    [ -e "$pool/idle_ms" ] || continue
    echo 20 >"$pool/idle_ms"
    i=0
    while ! grep -q '^chunks 0$' "$pool/stats"; do
        i=$((i + 1))
        [ $i -lt 50 ] || { cat "$pool/stats"; exit 93; }
        sleep 0.1
    done
    echo 10000 >"$pool/idle_ms"
done"#;

/// State of the pool before a cell starts. This state is a key of the cell's row.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// The pool is empty, unless it is a pool of swiotlb, which cannot be emptied.
    Empty,
    /// The pool is filled, because the same cell has just run.
    Filled,
    /// The pool is empty before the cell starts. The cell uses its only buffer this number of times.
    Uses(u32),
}

fn work(scope: Scope, _: &Site) -> Vec<Work> {
    let pools = POOLS.iter().map(|mode| in_a_guest(mode, "pool", 2, pools(scope)));
    let buffers = BUFFERS.iter().map(|mode| in_a_guest(mode, "buffers", 1, buffers(scope, mode)));
    pools.chain(buffers).collect()
}

/// Returns the cells of the comparison of pools. Each cell runs twice: with an empty pool, and then with a filled pool.
fn pools(scope: Scope) -> Vec<(Cell, Kind)> {
    let seconds = if scope == Scope::Quick { 1 } else { 2 };
    let cell = |pattern: Pattern, kib, depth, jobs| {
        let cell = Cell { pattern, kib, depth, jobs, extent: Extent::Seconds(seconds) };
        [(cell, Kind::Empty), (cell, Kind::Filled)]
    };
    let of = |pattern| [cell(pattern, 64, 16, 4), cell(pattern, 4, 1, 1), cell(pattern, 1024, 1, 1)].concat();
    [READ, WRITE].into_iter().flat_map(of).collect()
}

/// Returns the cells of the comparison of buffers. Each cell reads into one buffer. In strict mode, leaves out cells that would
/// take minutes.
fn buffers(scope: Scope, mode: &Mode) -> Vec<(Cell, Kind)> {
    let slow = *mode == STRICT;
    let sizes: &[(u32, &[u32])] = match scope {
        Scope::Quick => &[(1, &[1, 100]), (10, &[1])],
        _ => &[(1, &[1, 100, 1000]), (10, &[1, 100, 1000])],
    };
    let mut cells = Vec::new();
    for (mib, uses) in sizes {
        for uses in uses.iter().filter(|uses| !slow || mib * **uses <= 1000) {
            let cell = Cell { pattern: READ, kib: mib << 10, depth: 1, jobs: 1, extent: Extent::Operations(*uses) };
            let times = if *uses == 1 { FIRST_USES } else { 1 };
            cells.extend(vec![(cell, Kind::Uses(*uses)); times]);
        }
    }
    cells
}

/// Estimates the duration of a cell, at about 100 MiB per second.
fn estimate(cell: &Cell, kind: Kind) -> Duration {
    match kind {
        Kind::Uses(uses) => Duration::from_secs_f64(1.5 + f64::from(uses * cell.kib) / 1024.0 / 100.0),
        _ => cell.estimate(),
    }
}

fn in_a_guest(mode: &'static Mode, what: &str, cpus: u8, cells: Vec<(Cell, Kind)>) -> Work {
    let limit = AROUND + cells.iter().map(|(cell, kind)| estimate(cell, *kind)).sum::<Duration>();
    let run = move |site: &Site, name: &str| {
        let plain: Vec<Cell> = cells.iter().map(|(cell, _)| *cell).collect();
        let before = |number: usize| if cells[number].1 == Kind::Filled { "" } else { EMPTY_POOLS };
        let job = fio::job_with("/dev/nvme0n1", &plain, before);
        let guest = mode.guest(site, name).memory_mib(RAM_MIB).cpus(cpus);
        let outcome = table::run(guest.job(&throughput::job(&job)), limit, site)?;
        measured(&outcome, mode, &cells, fio::results(&outcome, &plain))
    };
    Work { name: format!("{}, {what}", mode.name), estimate: limit, run: Box::new(run) }
}

fn measured(outcome: &Outcome, mode: &Mode, cells: &[(Cell, Kind)], results: Vec<Result<Done>>) -> Result<Measured> {
    let mut measured = Measured::of(outcome, Vec::new())?;
    let mut uses: Vec<((Cell, Kind), Vec<Done>)> = Vec::new();
    for ((cell, kind), done) in cells.iter().zip(results) {
        let done = match done {
            Ok(done) => done,
            Err(error) => {
                let (pattern, size) = (cell.pattern.name, cell.size());
                measured.failures.push(format!("{}: {pattern} of {size}, {kind:?}: {error:#}", mode.name));
                continue;
            }
        };
        match kind {
            Kind::Uses(_) => match uses.iter_mut().find(|(known, _)| *known == (*cell, *kind)) {
                Some((_, times)) => times.push(done),
                None => uses.push(((*cell, *kind), vec![done])),
            },
            Kind::Empty | Kind::Filled => measured.rows.push(pool_row(mode, cell, *kind, &done)),
        }
    }
    for ((cell, kind), times) in uses {
        let Kind::Uses(number) = kind else { continue };
        let time = median(times.iter().map(|done| done.latency_us)).context("no latency was measured")?;
        let of = [("mode", mode.name.into()), ("buffer", cell.size().into()), ("uses", number.into())];
        let mut row = Row::new(of, [("use_us", time)]);
        if let Some(requests) = median(times.iter().filter_map(requests)) {
            row.figures.insert("requests".into(), requests);
        }
        measured.rows.push(row);
    }
    Ok(measured)
}

/// Returns the total number of MAP, MAP_LIST, UNMAP and WINDOW_ADD requests that the guest sent during a cell. Returns `None` without a
/// virtio-iommu.
fn requests(done: &Done) -> Option<f64> {
    let of = |probe: &Probe| {
        let kinds = ["requests_map", "requests_map_list", "requests_unmap", "requests_window_add"];
        counters::sum(&probe.iommu, &kinds)
    };
    Some(of(&done.after)? - of(&done.before)?)
}

fn pool_row(mode: &Mode, cell: &Cell, kind: Kind, done: &Done) -> Row {
    let of = [
        ("mode", mode.name.into()),
        ("pattern", cell.pattern.name.into()),
        ("size", cell.size().into()),
        ("jobs", cell.jobs.into()),
        ("pool", if kind == Kind::Empty { "empty" } else { "filled" }.into()),
    ];
    Row::new(of, [("mib_s", done.mib_s), ("latency_us", done.latency_us), ("latency_p99_us", done.percentiles_us[1])])
}

#[cfg(test)]
mod tests {
    use anyhow::bail;
    use serde_json::json;

    use super::*;

    fn done(latency_us: f64) -> Done {
        Done { latency_us, before: counted(10), after: counted(14), ..Done::default() }
    }

    fn counted(each: u32) -> Probe {
        let iommu = json!({"requests_map": each, "requests_unmap": each, "requests_window_add": 2});
        Probe { iommu, ..Probe::default() }
    }

    #[test]
    fn requests_are_counted_per_cell_and_none_without_an_iommu() {
        let bare = Done { after: Probe::default(), ..done(1.0) };
        assert_eq!((requests(&done(1.0)), requests(&bare)), (Some(8.0), None));
    }

    fn outcome() -> Outcome {
        Outcome { console: "CAROM-FIO-VERSION fio-3.33\nCAROM-KERNEL 6.12\n".into(), ..Outcome::default() }
    }

    #[test]
    fn each_empty_pool_cell_is_followed_by_its_filled_one() {
        for pair in pools(Scope::Plain).chunks(2) {
            let [(one, first), (other, second)] = pair else { panic!("{pair:?}") };
            assert_eq!((one, *first, *second), (other, Kind::Empty, Kind::Filled));
        }
    }

    #[test]
    fn first_uses_are_reported_by_median_and_failures_are_listed() {
        let cells = buffers(Scope::Quick, &BOUNCE);
        let mut results: Vec<Result<Done>> = [900.0, 500.0, 700.0, 5000.0].into_iter().map(|us| Ok(done(us))).collect();
        results.push((|| bail!("it hung"))());
        results.push(Ok(done(300.0)));

        let found = measured(&outcome(), &BOUNCE, &cells[..6], results).unwrap();

        let row = |row: &Row| (row.key("uses").cloned(), row.figures["use_us"]);
        let rows: Vec<_> = found.rows.iter().map(row).collect();
        assert_eq!(rows, [(Some(1.into()), 800.0), (Some(100.into()), 300.0)]);
        assert!(found.failures[0].contains("it hung"), "{found:?}");
    }

    #[test]
    fn slow_buffers_of_strict_guests_are_left_out() {
        let most = |mode| buffers(Scope::All, mode).iter().filter(|(cell, _)| cell.kib == 10 << 10).count();
        assert_eq!((most(&STRICT), most(&BOUNCE)), (FIRST_USES + 1, FIRST_USES + 2));
    }
}
