// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How many guests with a drive each a host of fixed memory bears: guests are added until there is no more room.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use carom_integration::host_memory::{MemoryGroup, Swap, pages_swapped_in};
use carom_integration::measure::mode::{
    BOUNCE, BOUNCE_REPORTING, CH_NO_VIOMMU, Mode, NO_VIOMMU, QEMU_NO_VIOMMU, STRICT,
};
use carom_integration::measure::statistics::median;
use carom_integration::{Background, INIT_BEGIN, Site};

use crate::table::{LITTLE_RAM_MIB, Measured, Row, Scope, Shown, Table, Work, figure, ms};
use crate::tenant::{self, Line};
use crate::throughput::LATENCY;

const SHOWN: &[Shown] = &[
    Shown::new("iops", "verified operations a second of all guests together", 0),
    LATENCY,
    Shown::new("memory_mib", "memory of all VMMs, in MiB", 0),
    Shown::new("swapped_in_mib", "read back from swap while measured, in MiB", 1),
    Shown::new("cpu_percent", "CPU time of the host that is used, in %", 0),
    Shown::new("start_ms", "time from the start of the VMMs that were added to their guests' first program, in ms", 0),
    Shown::new("borne", "whether so many guests are borne", 0),
];

pub(crate) const TABLE: Table = Table::new("density", "mode", SHOWN, work).once();

/// Where a mode's guests are added.
struct Host {
    /// Memory for all VMMs, in MiB.
    memory_mib: u64,
    /// How many guests are added at a time.
    step: usize,
    /// Most guests.
    most: usize,
}

/// Lines of each guest that are measured.
const LINES: usize = 2;

/// Longest time in which guests come to work.
const READY_TIME: Duration = Duration::from_secs(60);

/// The same while memory is at its limit: what has to be taken from other guests first.
const READY_TIME_AT_LIMIT: Duration = Duration::from_secs(20);

/// Longest time that the lines may take.
const LINES_TIME: Duration = Duration::from_secs(40);

/// Swapping in is what is read back beyond this, in MiB.
const SWAP_IN_MIB: f64 = 1.0;

/// How many times the latency of the first guests is too much.
const LATENCY_RATIO: f64 = 2.0;

/// Latency in µs that is never too much: what a busy machine adds that emulates this one is of that order, however few guests there are.
const LATENCY_FLOOR_US: f64 = 50_000.0;

/// How often guests are measured that were too slow, before that is taken for theirs.
const TRIES: usize = 3;

fn work(scope: Scope, site: &Site) -> Vec<Work> {
    let modes: &[Mode] = match scope {
        Scope::Quick => &[NO_VIOMMU, BOUNCE_REPORTING],
        _ => &[NO_VIOMMU, QEMU_NO_VIOMMU, CH_NO_VIOMMU, STRICT, BOUNCE, BOUNCE_REPORTING],
    };
    if drives(site).len() < 3 {
        return Vec::new();
    }
    modes.iter().filter(|mode| mode.is_at(site)).map(|mode| of_mode(*mode, scope)).collect()
}

/// The drives that guests get. The second one stays away, as some of its reads fail.
fn drives(site: &Site) -> Vec<String> {
    site.nvme.iter().take(1).chain(&site.more_nvme).cloned().collect()
}

fn of_mode(mode: Mode, scope: Scope) -> Work {
    let quick = scope == Scope::Quick;
    let host = if quick {
        Host { memory_mib: 1280, step: if mode.iommu { 2 } else { 1 }, most: 8 }
    } else {
        Host { memory_mib: 2048, step: 1, most: 13 }
    };
    let estimate = Duration::from_secs(match (quick, mode.iommu) {
        (true, false) => 20,
        (true, true) => 50,
        (false, false) => 50,
        (false, true) => 150,
    });
    let run = move |site: &Site, name: &str| curve(&mode, &host, site, name);
    Work { name: mode.name.into(), estimate, run: Box::new(run) }
}

/// The rows of a mode: one for each number of guests, the last of which is not borne unless there are no more drives.
fn curve(mode: &Mode, host: &Host, site: &Site, name: &str) -> Result<Measured> {
    let program = fs::read(site.tenant.as_ref().context("CAROM_TENANT is not set")?).context("cannot read CAROM_TENANT")?;
    let swap = site.swap.as_deref().context("CAROM_SWAP is not set")?;
    let _swap = Swap::on(swap)?;
    let group = MemoryGroup::new("carom-density")?;
    group.limit(host.memory_mib << 20)?;
    let drives = drives(site);
    let guest = |drive: &str, number: usize, again: u32| {
        let name = format!("{name}-{number}-{again}");
        let guest = mode.guest_with(drive, &name).memory_mib(LITTLE_RAM_MIB).group(group.dir());
        guest.program("tenant", program.clone()).job(&tenant::job(number))
    };
    let mut tenants: Vec<Background> = Vec::new();
    let mut measured = Measured::default();
    let mut first_p99 = None;
    while tenants.len() < host.most.min(drives.len()) {
        let wanted = (tenants.len() + host.step).min(host.most).min(drives.len());
        let begun = tenants.len();
        for (number, drive) in drives.iter().enumerate().take(wanted).skip(begun) {
            tenants.push(Background::start(&guest(drive, number, 0), site)?);
        }
        let mut row = Row::new([("mode", mode.name.into()), ("guests", wanted.into())], []);
        let mut come = ready(&mut tenants, begun, &group);
        if let Err(Stop::Hung(number, why)) = &come {
            // As for a guest that is run by itself: an emulated one hangs now and then.
            eprintln!("guest {number} of {} hung and is started again; {why}", mode.name);
            measured.retries += 1;
            let number = *number;
            // The drive is free when the former has ended.
            drop(tenants.remove(number));
            tenants.insert(number, Background::start(&guest(&drives[number], number, 1), site)?);
            come = ready(&mut tenants, begun, &group);
        }
        let limit_us = first_p99.map_or(f64::INFINITY, |first: f64| (first * LATENCY_RATIO).max(LATENCY_FLOOR_US));
        let measure = come.and_then(|start_ms| Ok((start_ms, best_window(&mut tenants, &group, limit_us)?)));
        let borne = match measure {
            Ok((start_ms, window)) => {
                first_p99.get_or_insert(window.p99_us());
                let borne = window.is_borne(limit_us);
                if window.wrong > 0 {
                    measured.failures.push(format!("{}: {} blocks or pages were wrong", mode.name, window.wrong));
                }
                row.figures.insert("start_ms".into(), start_ms);
                row.figures.extend(window.figures(&tenants, &group)?);
                borne
            }
            Err(Stop::NoRoom(why)) => {
                eprintln!("{} guests, {}: {why}", wanted, mode.name);
                row.figures.insert("refused".into(), 1.0);
                false
            }
            Err(Stop::Hung(number, why)) => bail!("guest {number} hung once more; {why}"),
            Err(Stop::Other(error)) => return Err(error),
        };
        row.figures.insert("borne".into(), f64::from(u8::from(borne)));
        measured.rows.push(row);
        if !borne {
            break;
        }
    }
    Ok(measured)
}

/// Why no window was measured.
enum Stop {
    /// A guest was refused memory, or ended by the kernel for want of it.
    NoRoom(String),
    /// The guest of this number does not come to work, though there is memory; and what its VMM is at.
    Hung(usize, String),
    /// Anything else.
    Other(anyhow::Error),
}

impl From<anyhow::Error> for Stop {
    fn from(error: anyhow::Error) -> Self {
        Self::Other(error)
    }
}

/// Fails if a guest has ended, or the kernel killed a VMM.
fn all_run(tenants: &mut [Background], group: &MemoryGroup) -> Result<(), Stop> {
    let killed = group.killed()?;
    if killed > 0 {
        return Err(Stop::NoRoom(format!("{killed} VMMs were killed for want of memory")));
    }
    for (number, tenant) in tenants.iter_mut().enumerate() {
        if let Some(status) = tenant.ended()? {
            let said = tenant.stderr();
            if said.contains("memory") {
                return Err(Stop::NoRoom(format!("guest {number} was refused memory: {said}")));
            }
            return Err(Stop::Other(anyhow!("guest {number} ended: {status}; {said}")));
        }
    }
    Ok(())
}

/// Waits until the guests from `begun` on work; the median of the times from their VMMs' start to their first program, in ms.
fn ready(tenants: &mut [Background], begun: usize, group: &MemoryGroup) -> Result<f64, Stop> {
    let mut started: Vec<Option<Duration>> = vec![None; tenants.len()];
    let (limited, start) = (group.limited()?, Instant::now());
    loop {
        all_run(tenants, group)?;
        let at_limit = group.limited()? > limited;
        let time = if at_limit { READY_TIME_AT_LIMIT } else { READY_TIME };
        let mut missing = 0;
        for (number, (tenant, started)) in tenants.iter_mut().zip(&mut started).enumerate().skip(begun) {
            let elapsed = tenant.elapsed();
            let console = tenant.console()?;
            if started.is_none() && console.contains(INIT_BEGIN) {
                *started = Some(elapsed);
            }
            if !console.contains(tenant::READY) {
                missing += 1;
                if start.elapsed() > time {
                    let why = tenant.stuck();
                    let why = format!("{why}\nand its console:\n{}", tenant.console()?);
                    let stop = if at_limit { Stop::NoRoom(why) } else { Stop::Hung(number, why) };
                    return Err(stop);
                }
            }
        }
        if missing == 0 {
            return Ok(median(started.iter().flatten().copied().map(ms)).unwrap_or_default());
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Measures, and again where the guests were slower than `limit_us`.
fn best_window(tenants: &mut [Background], group: &MemoryGroup, limit_us: f64) -> Result<Window, Stop> {
    let mut best = window(tenants, group)?;
    for _ in 1..TRIES {
        if best.p99_us() <= limit_us || best.swapped_in_mib > SWAP_IN_MIB {
            break;
        }
        let next = window(tenants, group)?;
        if next.p99_us() < best.p99_us() {
            best = next;
        }
    }
    Ok(best)
}

/// What the guests did in a time.
struct Window {
    /// Of all guests.
    lines: Vec<Line>,
    guests: u32,
    swapped_in_mib: f64,
    cpu_percent: f64,
    wrong: u64,
}

/// Measures until each guest has told of itself [`LINES`] times.
fn window(tenants: &mut [Background], group: &MemoryGroup) -> Result<Window, Stop> {
    let seen =
        tenants.iter_mut().map(|tenant| Ok(tenant::lines(tenant.console()?).len())).collect::<Result<Vec<_>>>()?;
    // The line that is under way may be of the time before.
    let wanted = |before: usize| before + 1 + LINES;
    let (swapped, cpu, start) = (pages_swapped_in()?, cpu_times()?, Instant::now());
    loop {
        all_run(tenants, group)?;
        let mut waiting = false;
        for (tenant, before) in tenants.iter_mut().zip(&seen) {
            waiting |= tenant::lines(tenant.console()?).len() < wanted(*before);
        }
        if !waiting {
            break;
        }
        if start.elapsed() > LINES_TIME {
            return Err(Stop::Other(anyhow!("a guest has nothing to tell for {LINES_TIME:?}")));
        }
        thread::sleep(Duration::from_millis(100));
    }
    let (mut lines, mut wrong) = (Vec::new(), 0);
    for (tenant, before) in tenants.iter_mut().zip(&seen) {
        let all = tenant::lines(tenant.console()?);
        wrong += all.last().map_or(0, |line| line.wrong);
        lines.extend_from_slice(&all[before + 1..wanted(*before)]);
    }
    let guests = u32::try_from(tenants.len()).context("too many guests")?;
    let (busy, all) = cpu_times()?;
    let cpu_percent = figure(busy - cpu.0) / figure((all - cpu.1).max(1)) * 100.0;
    let swapped_in_mib = figure(pages_swapped_in()? - swapped) * 4096.0 / f64::from(1 << 20);
    Ok(Window { lines, guests, swapped_in_mib, cpu_percent, wrong })
}

impl Window {
    /// The median of the lines' own.
    fn p99_us(&self) -> f64 {
        median(self.lines.iter().map(|line| line.p99_us)).unwrap_or_default()
    }

    /// Whether the host bears the guests.
    fn is_borne(&self, limit_us: f64) -> bool {
        self.swapped_in_mib <= SWAP_IN_MIB && self.p99_us() <= limit_us && self.wrong == 0
    }

    /// Operations a second of all guests.
    fn iops(&self) -> f64 {
        let (operations, seconds) =
            self.lines.iter().fold((0.0, 0.0), |sum, line| (sum.0 + line.operations, sum.1 + line.ms / 1e3));
        operations / seconds * f64::from(self.guests)
    }

    fn figures(&self, tenants: &[Background], group: &MemoryGroup) -> Result<[(String, f64); 8]> {
        let mib = |bytes: u64| figure(bytes) / f64::from(1 << 20);
        Ok([
            ("iops", self.iops()),
            ("latency_p99_us", self.p99_us()),
            ("memory_mib", mib(group.without_a_file()?)),
            ("pinned_mib", mib(tenants.iter().map(Background::pinned_bytes).sum())),
            ("swapped_mib", mib(group.swapped()?)),
            ("swapped_in_mib", self.swapped_in_mib),
            ("cpu_percent", self.cpu_percent),
            ("wrong", figure(self.wrong)),
        ]
        .map(|(name, value)| (name.to_owned(), value)))
    }
}

/// Time that the host's CPUs were busy, and all time, in ticks (first line of proc_stat(5)).
fn cpu_times() -> Result<(u64, u64)> {
    let stat = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    parse_cpu_times(&stat).context("the first line of /proc/stat")
}

fn parse_cpu_times(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = line.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>()?;
    // user, nice, system, idle, iowait, irq, softirq, steal; the guests' time that follows is in user and nice.
    let all: u64 = ticks.get(..8)?.iter().sum();
    Some((all - ticks[3] - ticks[4], all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_guests_is_not_counted_twice_and_waiting_is_no_work() {
        assert_eq!(parse_cpu_times("cpu  10 1 5 70 4 3 2 1 9 0\ncpu0 1\n"), Some((22, 96)));
        assert_eq!(parse_cpu_times("cpu  10 1 5\n"), None);
    }

    #[test]
    fn there_is_nothing_to_do_without_drives_for_several_guests() {
        let mut site = Site { nvme: vec!["a".into(), "b".into()], ..Site::default() };
        assert!(work(Scope::Quick, &site).is_empty());
        site.more_nvme = vec!["c".into(), "d".into()];
        assert_eq!(drives(&site), ["a", "c", "d"]);
        assert_eq!(work(Scope::Quick, &site).len(), 2);
        assert_eq!(work(Scope::All, &site).len(), 5, "there is no Cloud Hypervisor");
    }

    #[test]
    fn operations_are_of_all_guests_and_latency_is_the_median() {
        let line = |operations, p99_us| Line { operations, ms: 2000.0, p99_us, wrong: 0 };
        let lines = vec![line(40.0, 900.0), line(40.0, 1000.0), line(20.0, 9000.0), line(40.0, 1100.0)];
        let window = Window { lines, guests: 2, swapped_in_mib: 0.0, cpu_percent: 0.0, wrong: 0 };
        assert!((window.p99_us() - 1050.0).abs() < 1e-9);
        assert!((window.iops() - 35.0).abs() < 1e-9);
        assert!(window.is_borne(1100.0) && !window.is_borne(1000.0));
        assert!(!Window { wrong: 1, ..window }.is_borne(f64::INFINITY));
    }
}
