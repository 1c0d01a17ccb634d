// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Model that predicts results on hardware from the counts of a run. The counts are measured in the rig. Emulation changes these
//! counts little. The cost of copies is measured on the machine that runs this program. All other costs are estimates, each with a
//! lower and an upper bound.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use carom_integration::measure::markdown;
use carom_integration::measure::mode::{LAZY, NO_VIOMMU};
use serde_json::Value;

use crate::counts;
use crate::results::{Merged, Results};

/// Bounds of a time in ns.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Range {
    low: f64,
    high: f64,
}

const fn range(low: f64, high: f64) -> Range {
    Range { low, high }
}

impl Range {
    fn times(self, count: f64) -> Self {
        range(self.low * count, self.high * count)
    }

    /// Returns the geometric mean of the bounds.
    fn middle(self) -> f64 {
        (self.low * self.high).sqrt()
    }

    fn plus(self, other: Self) -> Self {
        range(self.low + other.low, self.high + other.high)
    }
}

/// CPU time that an event costs, and the source of this figure.
struct Cost {
    what: &'static str,
    time: Range,
    why: &'static str,
}

/// CPU cost of an I/O operation without a virtual IOMMU, excluding exits.
const OPERATION: Cost = Cost {
    what: "operation, in the guest",
    time: range(2500.0, 5000.0),
    why: "assumed: a core does 200,000 to 400,000 direct operations per second by libaio",
};
const EXIT: Cost = Cost {
    what: "exit",
    time: range(500.0, 1500.0),
    why: "AMD's exit and entry with the ioctl around them: 2,528 cycles (lkml.iu.edu/hypermail/linux/kernel/2012.2/00527.html)",
};
const WAIT: Cost = Cost {
    what: "wait for requests, without their handling",
    time: range(300.0, 8000.0),
    why: "assumed: a few cache lines if a thread polls; otherwise a thread is woken and sleeps again",
};
const HOST_MAP: Cost = Cost {
    what: "mapping in the host",
    time: range(700.0, 3000.0),
    why: "assumed: a system call, pinned pages, page table entries",
};
const HOST_UNMAP: Cost = Cost {
    what: "unmapping in the host",
    time: range(1000.0, 4000.0),
    why: "assumed: like mapping, plus the invalidation of the IOTLB, for which the CPU waits",
};
const PAGE: Cost = Cost {
    what: "page of a mapping",
    time: range(60.0, 250.0),
    why: "assumed: pin and map a page, unmap and unpin a page",
};
const SLOT: Cost = Cost {
    what: "slot, without the copy",
    time: range(80.0, 300.0),
    why: "assumed: 17 cache lines that bouncing adds, and two locked operations (docs/guest-patch-design.md)",
};
const COSTS: [&Cost; 7] = [&OPERATION, &EXIT, &WAIT, &HOST_MAP, &HOST_UNMAP, &PAGE, &SLOT];

/// Limits of a typical data-centre drive: operations per second, and bytes per second.
const DRIVE: (f64, f64) = (1_000_000.0, 7_000.0 * 1_048_576.0);

/// Number of slots, and number of buffers, in the fast measurement of copies: one for each operation in flight. These few slots and
/// buffers may fit into the CPU's caches.
const IN_FLIGHT: usize = 64;

/// Total bytes of all slots in the slow measurement of copies. They do not fit into any cache, so the CPU must read the slots from
/// memory.
const COLD_BYTES: usize = 256 << 20;

/// Average counts per operation of a cell.
#[derive(Debug, Clone, PartialEq)]
struct Cell {
    mode: String,
    pattern: String,
    kib: u32,
    exits: f64,
    map_requests: f64,
    unmap_requests: f64,
    host_maps: f64,
    copied_bytes: f64,
}

impl Cell {
    /// Parses a row. Returns `None` if the mode has a virtual IOMMU but the row lacks the IOMMU's counts, for example because
    /// another VMM ran.
    fn of(row: &Merged) -> Option<Self> {
        let word = |key: &str| row.fields.get(key).and_then(Value::as_str).map(str::to_owned);
        let count = |key: &str| row.fields.get(key).and_then(Value::as_f64);
        let mode = word("mode")?;
        let none = (mode == NO_VIOMMU.name).then_some(0.0);
        Some(Self {
            pattern: word("pattern")?,
            kib: word("size")?.strip_suffix('k')?.parse().ok()?,
            exits: count("exits")?,
            map_requests: count("map_requests").or(none)?,
            unmap_requests: count("unmap_requests").or(none)?,
            host_maps: count("host_maps").or(none)?,
            copied_bytes: count("copied_bytes").or(none)?,
            mode,
        })
    }

    /// Returns the number of bytes per operation.
    fn bytes(&self) -> f64 {
        f64::from(self.kib) * 1024.0
    }

    /// Returns the CPU time that the virtual IOMMU adds to an operation. The time of exits is not included.
    fn added(&self, copy: Range) -> Range {
        // The driver waits once for the MAP requests of an operation, and once for the UNMAP requests. In lazy mode, the driver
        // does not wait for UNMAP requests.
        let ended = if self.mode == LAZY.name { 0.0 } else { self.unmap_requests.min(1.0) };
        let waits = self.map_requests.min(1.0) + ended;
        let pages = self.bytes() / 4096.0 * self.map_requests.min(1.0);
        let slots = if self.copied_bytes > 0.0 { 1.0 } else { 0.0 };
        WAIT.time
            .times(waits)
            .plus(HOST_MAP.time.times(self.host_maps))
            .plus(HOST_UNMAP.time.times(self.unmap_requests))
            .plus(PAGE.time.times(pages))
            .plus(SLOT.time.times(slots))
            .plus(copy.times(self.copied_bytes))
    }

    /// Returns the CPU time of the operation if each copied byte takes `copy`.
    fn cpu(&self, copy: Range) -> Range {
        OPERATION.time.plus(EXIT.time.times(self.exits)).plus(self.added(copy))
    }

    /// Returns the operations per second with the drive [`DRIVE`] and one CPU. Each operation takes `cpu_ns` ns of CPU time.
    fn rate(&self, cpu_ns: f64) -> f64 {
        DRIVE.0.min(DRIVE.1 / self.bytes()).min(1e9 / cpu_ns)
    }

    /// Divides this cell's rate by the rate of `base`, the same cell without a virtual IOMMU. Returns the bounds of this ratio, and
    /// the ratio that results if each cost is in the middle of its bounds. A cost that occurs in both cells has the same bound in
    /// both cells. The drive may limit either rate, so any combination of bounds can result in the lowest or highest ratio.
    /// Therefore, all combinations are tried.
    fn ratio(&self, base: &Self, copy: Range) -> (Range, f64) {
        let common = |exits: f64| OPERATION.time.plus(EXIT.time.times(exits));
        let (own, other, added) = (common(self.exits), common(base.exits), self.added(copy));
        let ratio = |own: f64, other: f64, added: f64| self.rate(own + added) / base.rate(other);
        let corners = [(own.low, other.low), (own.high, other.high)]
            .map(|(own, other)| [added.low, added.high].map(|added| ratio(own, other, added)));
        let all = corners.as_flattened().iter().copied();
        let bounds = range(all.clone().fold(f64::INFINITY, f64::min), all.fold(0.0, f64::max));
        (bounds, ratio(own.middle(), other.middle(), added.middle()))
    }
}

/// Measures copies of `bytes` bytes from slots to buffers. Returns the bounds of the time per byte, in ns. One bound is measured
/// with few slots and buffers, which may be in the CPU's caches. The other bound is measured with more slots and buffers than any
/// cache can contain.
fn copy_ns(bytes: usize) -> Result<Range> {
    let warm = turns_ns(bytes, bytes * IN_FLIGHT, 201)?;
    let cold = turns_ns(bytes, COLD_BYTES, 7)?;
    Ok(range(warm.min(cold), warm.max(cold)))
}

/// Measures the time per copied byte, in ns. A turn copies slots with a total size of `span` bytes. The fastest of `turns` turns
/// counts, because other work on the machine only adds to the time.
fn turns_ns(bytes: usize, span: usize, turns: usize) -> Result<f64> {
    let (slots, mut buffers) = (vec![1_u8; span], vec![0_u8; span]);
    let mut turn = || {
        let start = Instant::now();
        for (slot, buffer) in slots.chunks_exact(bytes).zip(buffers.chunks_exact_mut(bytes)) {
            buffer.copy_from_slice(black_box(slot));
            black_box(buffer);
        }
        start.elapsed()
    };
    // The first turn is not measured, because it allocates the pages.
    turn();
    let quickest = (0..turns).map(|_| turn()).min().context("no copies were measured")?;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let copied = span as f64;
    Ok(quickest.as_secs_f64() * 1e9 / copied)
}

/// Returns the prediction from the counts of `results`, as text.
///
/// # Errors
/// Fails if `results` contains no usable counts.
pub(crate) fn text(results: &Results) -> Result<String> {
    let rows = results.tables.get(counts::TABLE.name).into_iter().flatten();
    let cells: Vec<Cell> = rows.filter_map(Cell::of).collect();
    ensure!(
        !cells.is_empty(),
        "the file contains no usable rows of the table {}; use the --json file of a run that measured this table",
        counts::TABLE.name
    );
    let sizes: BTreeSet<u32> = cells.iter().map(|cell| cell.kib).collect();
    let copies = sizes.into_iter().map(|kib| Ok((kib, copy_ns((kib as usize) << 10)?))).collect::<Result<_>>()?;
    show(&cells, &copies)
}

/// Formats the tables. `copies` contains the time per copied byte in ns, for each operation size in KiB.
fn show(cells: &[Cell], copies: &BTreeMap<u32, Range>) -> Result<String> {
    let mut text = String::from(
        "Prediction for a host that is not emulated, with one CPU, 64 operations in flight, and a drive of\n",
    );
    let (operations, bytes) = DRIVE;
    let _ = writeln!(
        text,
        "{operations} operations per second and {} MiB/s. Each figure is calculated\n\
         with each cost in the middle of its bounds. The figure's lower and upper bound are in parentheses.\n",
        bytes / 1_048_576.0
    );
    let mut costs = markdown::new_table_of(1, ["cost", "ns", "from"]);
    for cost in COSTS {
        costs.add_row([cost.what.into(), format!("{}–{}", cost.time.low, cost.time.high), cost.why.to_owned()]);
    }
    for (kib, ns) in copies {
        let time = ns.times(f64::from(*kib) * 1024.0);
        let why = "measured on this machine, in its caches and from memory".to_owned();
        costs.add_row([format!("copy of {kib}k"), format!("{:.0}–{:.0}", time.low, time.high), why]);
    }
    text += &markdown::finish(&costs);
    text.push('\n');
    let header = ["pattern", "size", "mode", "CPU, µs", "1000 operations/s", "÷ no-viommu"];
    let mut table = markdown::new_table_of(3, header);
    for cell in cells {
        let ns = *copies.get(&cell.kib).context("no copies of this size were measured")?;
        let same = |base: &&Cell| (&base.pattern, base.kib) == (&cell.pattern, cell.kib) && base.mode == NO_VIOMMU.name;
        let (cpu, base) = (cell.cpu(ns), cells.iter().find(same));
        let of_base = base.map_or(markdown::NONE.to_owned(), |base| {
            let (bounds, middle) = cell.ratio(base, ns);
            format!("{middle:.2} ({:.2}–{:.2})", bounds.low, bounds.high)
        });
        let rate = |cpu: f64| cell.rate(cpu) / 1e3;
        let rates = format!("{:.0} ({:.0}–{:.0})", rate(cpu.middle()), rate(cpu.high), rate(cpu.low));
        let time = format!("{:.1} ({:.1}–{:.1})", cpu.middle() / 1e3, cpu.low / 1e3, cpu.high / 1e3);
        table.add_row([cell.pattern.clone(), format!("{}k", cell.kib), cell.mode.clone(), time, rates, of_base]);
    }
    text += &markdown::finish(&table);
    text += "\nTo measure these figures: scripts/bench --direct ADDRESS throughput\n";
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPY: Range = range(0.05, 0.15);

    fn cell(mode: &str, kib: u32) -> Cell {
        Cell {
            mode: mode.into(),
            pattern: "read".into(),
            kib,
            exits: 0.5,
            map_requests: 0.0,
            unmap_requests: 0.0,
            host_maps: 0.0,
            copied_bytes: 0.0,
        }
    }

    fn strict(kib: u32) -> Cell {
        Cell { map_requests: 1.0, unmap_requests: 1.0, host_maps: 1.0, ..cell("strict", kib) }
    }

    fn bounce(kib: u32) -> Cell {
        Cell { copied_bytes: f64::from(kib) * 1024.0, ..cell("bounce", kib) }
    }

    #[test]
    fn no_viommu_cell_has_the_base_cost_and_a_ratio_of_one() {
        let base = cell("no-viommu", 4);
        assert_eq!(base.cpu(COPY), OPERATION.time.plus(EXIT.time.times(0.5)));
        assert_eq!(base.ratio(&base, COPY), (range(1.0, 1.0), 1.0));
    }

    #[test]
    fn added_cost_follows_the_counted_copies_and_requests() {
        let added = bounce(4).added(COPY);
        assert!((added.low - (SLOT.time.low + 0.05 * 4096.0)).abs() < 1e-9, "{added:?}");
        let added = strict(4).added(COPY);
        assert!(
            (added.high - (2.0 * WAIT.time.high + HOST_MAP.time.high + HOST_UNMAP.time.high + PAGE.time.high)).abs()
                < 1e-9
        );
        let lazy = Cell { mode: LAZY.name.into(), ..strict(4) };
        assert!((added.high - lazy.added(COPY).high - WAIT.time.high).abs() < 1e-9);
        // The driver sends all MAP requests of an operation together and waits once, so eight requests add no waits.
        let many = Cell { map_requests: 8.0, host_maps: 8.0, ..strict(64) };
        assert!((many.added(COPY).high - added.high - 7.0 * HOST_MAP.time.high - 15.0 * PAGE.time.high).abs() < 1e-9);
    }

    #[test]
    fn rate_is_limited_by_the_drive() {
        let large = bounce(128);
        assert_eq!(large.rate(1.0), DRIVE.1 / (128.0 * 1024.0));
        // The drive limits both cells, so their ratio is 1.
        let base = cell("no-viommu", 128);
        assert_eq!(large.ratio(&base, range(0.01, 0.01)).0.high, 1.0);
        assert_eq!(cell("no-viommu", 4).rate(1.0), DRIVE.0);
    }

    #[test]
    fn bounds_of_a_ratio_are_in_order_and_strict_is_below_bounce() {
        let base = cell("no-viommu", 4);
        let ratios = [strict(4).ratio(&base, COPY), bounce(4).ratio(&base, COPY)];
        for (bounds, middle) in ratios {
            assert!(bounds.low <= middle && middle <= bounds.high && bounds.high <= 1.0, "{ratios:?}");
        }
        assert!(ratios[0].1 < ratios[1].1, "{ratios:?}");
    }

    #[test]
    fn ratio_drops_below_one_if_only_one_mode_is_drive_bound() {
        let (base, large) = (cell("no-viommu", 64), bounce(64));
        let (bounds, _) = large.ratio(&base, range(0.07, 0.07));
        // With the lower bounds, the drive limits both cells.
        assert!(bounds.low < 1.0 && bounds.high == 1.0, "{bounds:?}");
    }

    #[test]
    fn cells_without_counts_of_their_iommu_are_left_out() {
        let row = |text: &str| serde_json::from_str::<Merged>(text).unwrap();
        let of = |mode: &str, more: &str| {
            let keys = format!(r#""mode": "{mode}", "pattern": "read", "size": "4k", "exits": 1.5"#);
            Cell::of(&row(&format!(r#"{{{keys}{more}, "rounds": 1, "spread": {{}}}}"#)))
        };
        assert_eq!(of("no-viommu", "").map(|cell| (cell.exits, cell.host_maps)), Some((1.5, 0.0)));
        assert_eq!(of("qemu-strict", ""), None);
        let counts = r#", "map_requests": 1, "unmap_requests": 2, "host_maps": 3, "copied_bytes": 4"#;
        let cell = of("strict", counts).unwrap();
        assert_eq!((cell.map_requests, cell.unmap_requests, cell.host_maps, cell.copied_bytes), (1.0, 2.0, 3.0, 4.0));
    }

    #[test]
    fn table_compares_each_cell_with_the_cell_without_an_iommu() {
        let cells = [cell("no-viommu", 4), bounce(4), strict(4)];
        let text = show(&cells, &BTreeMap::from([(4, COPY)])).unwrap();
        assert!(text.contains("copy of 4k") && text.contains("| read    | 4k   | bounce"), "{text}");
        let line = text.lines().find(|line| line.contains("no-viommu") && line.contains("read")).unwrap();
        assert!(line.contains("1.00 (1.00–1.00)"), "{line}");
    }

    #[test]
    fn copies_take_time() {
        let copy = copy_ns(4096).unwrap();
        assert!(copy.low > 0.0 && copy.high >= copy.low, "{copy:?}");
    }
}
