// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Maximum number of guests, each with a drive, that a host with a fixed amount of memory sustains. A host sustains its guests if
//! it swaps in little memory and the guests' latencies stay low. Guests are added until the host no longer sustains them, their
//! number reaches `Host::most`, or every drive has a guest.

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
    Shown::new("iops", "verified operations per second of all guests together", 0),
    LATENCY,
    Shown::new("memory_mib", "memory of all VMMs, in MiB", 0),
    Shown::new("swapped_in_mib", "memory read back from swap during the measurement, in MiB", 1),
    Shown::new("cpu_percent", "CPU usage of the host, in %", 0),
    Shown::new("start_ms", "time from the start of the added VMMs to their guests' first program, in ms", 0),
    Shown::new("fits", "1 if the host sustains this number of guests, otherwise 0", 0),
];

pub(crate) const TABLE: Table = Table::new("density", "mode", SHOWN, work).once();

/// Limits of the host that runs the guests of a mode.
struct Host {
    /// Memory for all VMMs, in MiB.
    memory_mib: u64,
    /// Number of guests to add before each measurement.
    step: usize,
    /// Maximum number of guests.
    most: usize,
}

/// Number of output lines of each guest that a measurement uses. Each line reports two seconds of work.
const LINES: usize = 2;

/// Maximum time for guests to become ready.
const READY_TIME: Duration = Duration::from_secs(60);

/// Maximum time for guests to become ready if the memory of all VMMs has reached its limit. If a guest needs longer, the host has
/// too little memory for the guest.
const READY_TIME_AT_LIMIT: Duration = Duration::from_secs(20);

/// Maximum time until all guests have printed the lines of a measurement.
const LINES_TIME: Duration = Duration::from_secs(40);

/// Memory in MiB that the host may read back from swap during a measurement. If the host reads more, it does not sustain the
/// guests.
const SWAP_IN_MIB: f64 = 1.0;

/// Maximum latency, as a multiple of the latency in the first measurement, which has the fewest guests.
const LATENCY_RATIO: f64 = 2.0;

/// Latency that is always accepted, in µs. If this machine is emulated on a busy host, latencies are about this high even with few
/// guests.
const LATENCY_FLOOR_US: f64 = 50_000.0;

/// If the guests are too slow, they are measured at most this number of times. The measurement with the lowest latency counts.
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

/// Returns the drives for guests. Leaves out the second drive, because some of its reads fail.
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

/// Returns the rows of a mode, one for each number of guests. The last row is for the first number of guests that the host does
/// not sustain. If the host sustains `host.most` guests, or one guest on each drive, there is no such row.
fn curve(mode: &Mode, host: &Host, site: &Site, name: &str) -> Result<Measured> {
    let program = fs::read(site.tenant.as_ref().context("CAROM_TENANT is not set; run scripts/bench, which sets it")?)
        .context("cannot read the program that CAROM_TENANT names")?;
    let swap = site.swap.as_deref().context("CAROM_SWAP is not set; run scripts/bench, which sets it")?;
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
            // On an emulated machine, a guest sometimes hangs independently of its work. Start it again, as other measurements do.
            eprintln!("guest {number} of mode {} hung and is started again; {why}", mode.name);
            measured.retries += 1;
            let number = *number;
            // Dropping the previous guest frees the drive.
            drop(tenants.remove(number));
            tenants.insert(number, Background::start(&guest(&drives[number], number, 1), site)?);
            come = ready(&mut tenants, begun, &group);
        }
        let limit_us = first_p99.map_or(f64::INFINITY, |first: f64| (first * LATENCY_RATIO).max(LATENCY_FLOOR_US));
        let measure = come.and_then(|start_ms| Ok((start_ms, best_window(&mut tenants, &group, limit_us)?)));
        let fits = match measure {
            Ok((start_ms, window)) => {
                first_p99.get_or_insert(window.p99_us());
                let fits = window.fits(limit_us);
                if window.wrong > 0 {
                    measured
                        .failures
                        .push(format!("{}: {} blocks or pages had wrong contents", mode.name, window.wrong));
                }
                row.figures.insert("start_ms".into(), start_ms);
                row.figures.extend(window.figures(&tenants, &group)?);
                fits
            }
            Err(Stop::NoRoom(why)) => {
                eprintln!("not enough memory for {} guests of mode {}: {why}", wanted, mode.name);
                row.figures.insert("refused".into(), 1.0);
                false
            }
            Err(Stop::Hung(number, why)) => bail!("guest {number} hung again; {why}"),
            Err(Stop::Other(error)) => return Err(error),
        };
        row.figures.insert("fits".into(), f64::from(u8::from(fits)));
        measured.rows.push(row);
        if !fits {
            break;
        }
    }
    Ok(measured)
}

/// Reason why a number of guests could not be measured.
enum Stop {
    /// A VMM could not get memory, a guest was not ready in time at the memory limit, or the kernel killed a VMM for lack of
    /// memory.
    NoRoom(String),
    /// The guest with this number does not become ready, although memory is not at its limit. The text describes what the guest's
    /// VMM is doing.
    Hung(usize, String),
    /// Any other error.
    Other(anyhow::Error),
}

impl From<anyhow::Error> for Stop {
    fn from(error: anyhow::Error) -> Self {
        Self::Other(error)
    }
}

/// Fails if a guest has ended or the kernel has killed a VMM.
fn all_run(tenants: &mut [Background], group: &MemoryGroup) -> Result<(), Stop> {
    let killed = group.killed()?;
    if killed > 0 {
        return Err(Stop::NoRoom(format!("the kernel killed {killed} VMMs for lack of memory")));
    }
    for (number, tenant) in tenants.iter_mut().enumerate() {
        if let Some(status) = tenant.ended()? {
            let said = tenant.stderr();
            if said.contains("memory") {
                return Err(Stop::NoRoom(format!("guest {number} could not get memory: {said}")));
            }
            return Err(Stop::Other(anyhow!("guest {number} ended unexpectedly: {status}; {said}")));
        }
    }
    Ok(())
}

/// Waits until all guests from `begun` on are ready. Returns the median of the times from a VMM's start to its guest's first
/// program, in ms.
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

/// Measures the guests' work. If the latency exceeds `limit_us` although the host swapped in little memory, measures again. Makes
/// at most [`TRIES`] measurements, and returns the measurement with the lowest latency.
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

/// Measurement of the guests' work over some time.
struct Window {
    /// Measured lines of all guests.
    lines: Vec<Line>,
    guests: u32,
    swapped_in_mib: f64,
    cpu_percent: f64,
    wrong: u64,
}

/// Measures until each guest has printed [`LINES`] lines that belong entirely to this measurement.
fn window(tenants: &mut [Background], group: &MemoryGroup) -> Result<Window, Stop> {
    let seen =
        tenants.iter_mut().map(|tenant| Ok(tenant::lines(tenant.console()?).len())).collect::<Result<Vec<_>>>()?;
    // Skip the first new line, because it may cover time before this measurement.
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
            return Err(Stop::Other(anyhow!("a guest printed too few CAROM-TENANT lines in {LINES_TIME:?}")));
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
    /// Returns the median of the 99th latency percentiles that the lines contain.
    fn p99_us(&self) -> f64 {
        median(self.lines.iter().map(|line| line.p99_us)).unwrap_or_default()
    }

    /// True if the host can run the guests: it swaps in little memory, latencies are low enough, and no data is wrong.
    fn fits(&self, limit_us: f64) -> bool {
        self.swapped_in_mib <= SWAP_IN_MIB && self.p99_us() <= limit_us && self.wrong == 0
    }

    /// Returns the operations per second of all guests.
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

/// Returns the busy time and the total time of the host's CPUs, in ticks (first line of proc_stat(5)).
fn cpu_times() -> Result<(u64, u64)> {
    let stat = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    parse_cpu_times(&stat).context("cannot parse the first line of /proc/stat")
}

fn parse_cpu_times(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = line.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>()?;
    // Fields: user, nice, system, idle, iowait, irq, softirq, steal. The other fields are guest times, which user and nice already
    // include.
    let all: u64 = ticks.get(..8)?.iter().sum();
    Some((all - ticks[3] - ticks[4], all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_time_counts_once_and_waiting_does_not_count() {
        assert_eq!(parse_cpu_times("cpu  10 1 5 70 4 3 2 1 9 0\ncpu0 1\n"), Some((22, 96)));
        assert_eq!(parse_cpu_times("cpu  10 1 5\n"), None);
    }

    #[test]
    fn density_needs_drives_for_several_guests() {
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
        assert!(window.fits(1100.0) && !window.fits(1000.0));
        assert!(!Window { wrong: 1, ..window }.fits(f64::INFINITY));
    }
}
