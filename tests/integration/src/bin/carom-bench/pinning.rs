// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Start time of guests of several sizes, and the memory that is pinned while fio reads from the guest's drive.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use carom_integration::measure::fio::{self, Cell, Extent, RANDREAD};
use carom_integration::measure::mode::{BOUNCE, BOUNCE_REPORTING, GUEST_PAGES, Mode, NO_VIOMMU, QEMU_STRICT, STRICT};
use carom_integration::{Outcome, PROBE, Site, workload};

use crate::table::{self, Measured, Row, Scope, Shown, Table, Work, figure, start_ms};
use crate::throughput::{self, AROUND};

const SHOWN: &[Shown] = &[
    Shown::new("start_ms", "from the VMM's start to the guest's first program, in ms", 0),
    Shown::new("pinned_mib", "maximum pinned memory, in MiB", 1),
    Shown::new("pinned_percent", "maximum pinned memory, in % of the guest's RAM", 1),
    Shown::new("returned_percent", "freed guest memory that the host has back after 5 s, in %", 1),
];

pub(crate) const TABLE: Table = Table::new("pinning", "mode", SHOWN, work).once();

/// Modes that differ in the amount of pinned memory. Without an IOMMU, every VMM pins all RAM of the guest, so only Carom is
/// measured without an IOMMU.
const WANTED: [Mode; 6] = [NO_VIOMMU, STRICT, BOUNCE, BOUNCE_REPORTING, GUEST_PAGES, QEMU_STRICT];

/// Memory that a guest uses and frees, in MiB.
const FREED_MIB: u32 = 256;

/// Time after which the returned memory is measured, in seconds. The guest must return freed memory to the host within this
/// time.
const RETURN_TIME: u32 = 5;

/// Cell of fio that runs while the pinned memory is measured.
const CELL: Cell = Cell { pattern: RANDREAD, kib: 64, depth: 64, jobs: 1, extent: Extent::Seconds(2) };

fn work(scope: Scope, _: &Site) -> Vec<Work> {
    let sizes: &[u32] = if scope == Scope::Quick { &[1] } else { &[1, 2, 4] };
    let wanted: &[Mode] = if scope == Scope::Quick { &[NO_VIOMMU, STRICT, BOUNCE_REPORTING] } else { &WANTED };
    sizes.iter().flat_map(|gib| wanted.iter().map(|mode| in_a_guest(*mode, *gib))).collect()
}

/// First word of console lines that report the guest's free memory, in KiB.
const FREE: &str = "CAROM-FREE";

/// Returns a job that uses and frees memory. Meanwhile, the job verifies I/O on the drive.
fn free_memory() -> String {
    let verify = workload::fio_verify(4, 8);
    let free = format!("awk '/^MemFree:/ {{ print \"{FREE}\", $2 }}' /proc/meminfo\n");
    format!(
        "(while [ ! -e /run/freed ]; do\n{verify}done) &\n\
         dd if=/dev/zero of=/run/fill bs=1M count={FREED_MIB} 2>/dev/null || exit 91\n\
         {free}echo \"{PROBE}used\"\nsleep 0.5\nrm /run/fill\nsleep {RETURN_TIME}\n{free}echo \"{PROBE}freed\"\n\
         sleep 0.5\n: >/run/freed\nwait\n"
    )
}

/// Returns the percentage of freed memory that the guest has returned to the host.
fn returned_percent(outcome: &Outcome) -> Result<f64> {
    let passes = outcome.values("CAROM-VERIFY").count();
    ensure!(passes > 0, "the guest verified no data on the drive while its memory was filled and freed");
    workload::check_verified(outcome, passes)?;
    let resident = |label: &str| {
        let probe = outcome.probes.iter().find(|probe| probe.label == label);
        probe
            .map(|probe| figure(probe.resident_bytes))
            .with_context(|| format!("the console has no line 'CAROM-PROBE {label}'"))
    };
    let returned = (resident("used")? - resident("freed")?) / 1024.0;
    let free: Vec<f64> = outcome
        .values(FREE)
        .map(str::parse)
        .collect::<Result<_, _>>()
        .context("a CAROM-FREE line of the console is not a number")?;
    let [before, after] = free[..] else {
        bail!("the console has {} CAROM-FREE lines with the guest's free memory; it must have two", free.len())
    };
    // The difference also includes a little memory that fio allocates and frees.
    let freed = after - before;
    ensure!(
        freed > f64::from(FREED_MIB) * 512.0,
        "the guest's free memory grew by only {freed} KiB, although the job freed {FREED_MIB} MiB"
    );
    Ok(returned / freed * 100.0)
}

fn in_a_guest(mode: Mode, gib: u32) -> Work {
    let reporting = if mode.reporting { 12 } else { 0 };
    let estimate = AROUND + CELL.estimate() + Duration::from_secs(2 * u64::from(gib) + reporting);
    let run = move |site: &Site, name: &str| {
        let free = if mode.reporting { free_memory() } else { String::new() };
        let job = throughput::job(&(fio::job(&[CELL]) + &free));
        let guest = mode.guest(site, name).memory_mib(gib << 10).look_every(Duration::from_millis(5)).job(&job);
        let outcome = table::run(guest, estimate, site)?;
        fio::results(&outcome, &[CELL]).remove(0)?;
        let pinned_mib = figure(outcome.peak_pinned_bytes) / f64::from(1 << 20);
        let mut row = Row::new(
            [("mode", mode.name.into()), ("ram_gib", gib.into())],
            [
                ("start_ms", start_ms(&outcome)?),
                ("pinned_mib", pinned_mib),
                ("pinned_percent", pinned_mib / f64::from(gib << 10) * 100.0),
            ],
        );
        if mode.reporting {
            row.figures.insert("returned_percent".into(), returned_percent(&outcome)?);
        }
        Measured::of(&outcome, vec![row])
    };
    Work { name: format!("{}, {gib} GiB", mode.name), estimate, run: Box::new(run) }
}

#[cfg(test)]
mod tests {
    use carom_integration::Probe;

    use super::*;

    #[test]
    fn sizes_have_all_modes_side_by_side() {
        let names: Vec<String> = work(Scope::Plain, &Site::default()).into_iter().map(|work| work.name).collect();
        assert_eq!(names.len(), 3 * WANTED.len());
        assert_eq!((names[0].as_str(), names[6].as_str()), ("no-viommu, 1 GiB", "no-viommu, 2 GiB"));
    }

    fn outcome(verified: &str) -> Outcome {
        let probe =
            |label: &str, mib: u64| Probe { label: label.into(), resident_bytes: mib << 20, ..Probe::default() };
        let probes = vec![probe("used", 500), probe("freed", 260)];
        let console = format!("CAROM-FREE 100000\n{verified}CAROM-FREE 350000\n");
        Outcome { console, probes, ..Outcome::default() }
    }

    #[test]
    fn returned_memory_is_a_percentage_of_freed_memory() {
        let percent = returned_percent(&outcome("CAROM-VERIFY 0 4194304\n")).unwrap();
        assert!((percent - 240.0 * 1024.0 / 2500.0).abs() < 1e-9, "{percent}");
    }

    #[test]
    fn memory_that_was_not_freed_is_an_error() {
        let mut outcome = outcome("CAROM-VERIFY 0 4194304\n");
        outcome.console = outcome.console.replace("350000", "200000");
        assert!(returned_percent(&outcome).unwrap_err().to_string().contains("100000 KiB"));
    }

    #[test]
    fn returned_memory_needs_verified_data() {
        for wrong in ["", "CAROM-VERIFY 1 0\n", "CAROM-VERIFY 0 4194304\nCAROM-VERIFY 1 0\n"] {
            assert!(returned_percent(&outcome(wrong)).is_err(), "{wrong}");
        }
    }
}
