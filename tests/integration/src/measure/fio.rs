// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cells: runs of fio on a guest's drive. Counters before and after each cell show the cost for guest and host.

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::{Outcome, Probe};

/// Access pattern of fio: its name and options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    /// Name in tables.
    pub name: &'static str,
    options: &'static str,
}

/// Sequential reads.
pub const READ: Pattern = Pattern { name: "read", options: "--rw=read" };
/// Sequential writes.
pub const WRITE: Pattern = Pattern { name: "write", options: "--rw=write" };
/// Random reads.
pub const RANDREAD: Pattern = Pattern { name: "randread", options: "--rw=randread" };
/// Random writes.
pub const RANDWRITE: Pattern = Pattern { name: "randwrite", options: "--rw=randwrite" };
/// Random reads and writes, 70 to 30.
pub const RANDRW: Pattern = Pattern { name: "randrw", options: "--rw=randrw --rwmixread=70" };

/// All patterns.
pub const PATTERNS: [Pattern; 5] = [READ, WRITE, RANDREAD, RANDWRITE, RANDRW];

/// Condition that ends a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// The cell ends after this time, in seconds.
    Seconds(u32),
    /// The cell ends after this number of operations, at the latest after 30 seconds.
    Operations(u32),
}

/// Cell: one run of fio with direct I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// Access pattern.
    pub pattern: Pattern,
    /// Size of an operation, in KiB.
    pub kib: u32,
    /// Operations in flight per job.
    pub depth: u32,
    /// Number of jobs. Each job uses its own area of the drive.
    pub jobs: u8,
    /// Condition that ends the cell.
    pub extent: Extent,
}

/// Time after which a hanging fio is killed, in seconds.
const HARD_LIMIT: u32 = 60;

/// Area of the drive that a job uses, in MiB.
pub const AREA_MIB: u32 = 128;

/// Result of a cell.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Done {
    /// Number of operations.
    pub operations: f64,
    /// Operations per second.
    pub iops: f64,
    /// MiB per second.
    pub mib_s: f64,
    /// Mean latency from submission to completion, in µs.
    pub latency_us: f64,
    /// Percentiles 50, 99 and 99.9 of the latency from the end of submission to completion, in µs. If the cell has reads, only
    /// reads count. Otherwise writes count.
    pub percentiles_us: [f64; 3],
    /// Bytes that the guest copied for bouncing, in both directions.
    pub copied_bytes: f64,
    /// Counters of host and VMM before the cell.
    pub before: Probe,
    /// Counters of host and VMM after the cell.
    pub after: Probe,
}

impl Cell {
    /// Returns the block size as fio's users write it.
    #[must_use]
    pub fn size(&self) -> String {
        if self.kib.is_multiple_of(1024) { format!("{}M", self.kib / 1024) } else { format!("{}k", self.kib) }
    }

    /// Returns the estimated duration of the whole cell.
    #[must_use]
    pub fn estimate(&self) -> Duration {
        let seconds = match self.extent {
            Extent::Seconds(seconds) => f64::from(seconds),
            // In the rig, a guest in strict mode does about 800 operations per second.
            Extent::Operations(operations) => f64::from(operations) / 800.0,
        };
        Duration::from_secs_f64(seconds + 1.5)
    }

    fn options(&self) -> String {
        let Self { pattern, kib, depth, jobs, extent } = self;
        let extent = match extent {
            Extent::Seconds(seconds) => format!("--time_based --runtime={seconds}"),
            Extent::Operations(operations) => format!("--io_size={}k --runtime=30", kib * operations),
        };
        format!(
            "{} --bs={kib}k --iodepth={depth} --numjobs={jobs} --offset_increment={AREA_MIB}M {extent}",
            pattern.options
        )
    }
}

/// Returns the job of a guest that runs these cells on its NVMe drive, one after the other. First, the job writes all areas of
/// the drive that the cells use. So the cells' writes need not allocate space in the drive's image on the host.
///
/// The first process of fio wakes 95 times per second. Therefore, fio runs its jobs as threads of this process. If the jobs
/// were processes with their own page tables, each wake would flush the guest's TLB twice on a CPU without PCID, such as the
/// rig's.
#[must_use]
pub fn job(cells: &[Cell]) -> String {
    job_on("/dev/nvme0n1", cells)
}

/// Like [`job`], but fio uses io_uring with registered buffers.
#[must_use]
pub fn job_of_registered(cells: &[Cell]) -> String {
    job_with("/dev/nvme0n1", cells, |_| "engine=io_uring memory=--fixedbufs=1")
}

/// Like [`job_of_registered`], with the registered buffers in memory that the kernel lends for the drive. fio removes the file
/// that it maps, so the job gives fio a symbolic link to the device file, not the device file itself.
#[must_use]
pub fn job_of_lent(cells: &[Cell]) -> String {
    let link = r#"ln -sf "/dev/iommu_bounce/$NVME" /tmp/lent; engine=io_uring memory="--fixedbufs=1 --mem=mmapshared:/tmp/lent""#;
    job_with("/dev/nvme0n1", cells, |_| link)
}

/// Like [`job`], on another block device.
#[must_use]
pub fn job_on(device: &str, cells: &[Cell]) -> String {
    job_with(device, cells, |_| "")
}

/// Like [`job_on`], with additional shell lines before each cell. `before` returns these lines for a cell's index.
#[must_use]
pub fn job_with(device: &str, cells: &[Cell], before: impl Fn(usize) -> &'static str) -> String {
    let jobs = cells.iter().map(|cell| cell.jobs).max().unwrap_or(1);
    let mut job = format!(
        r#"
copied() {{ cat /sys/kernel/debug/iommu_bounce/*/stats 2>/dev/null | awk '/^bytes_(in|out) / {{ n += $2 }} END {{ printf "%.0f\n", n }}'; }}
work() {{
    fio --name=cell --filename={device} --direct=1 --ioengine=${{engine:-libaio}} --thread --size={AREA_MIB}M \
        --group_reporting --percentile_list=50:99:99.9 --output-format=terse --terse-version=3 ${{memory:-}} "$@" >/tmp/fio 2>&1 &
    fio=$!
    # A hanging fio is killed, and the next cell runs.
    (sleep {HARD_LIMIT}; killall -9 fio) >/dev/null 2>&1 &
    guard=$!
    wait $fio
    status=$?
    kill $guard 2>/dev/null
    return $status
}}
cell() {{
    number=$1
    shift
    before=$(copied)
    echo "CAROM-PROBE $number"
    sleep 0.3
    work "$@"
    status=$?
    echo "CAROM-PROBE $number"
    sleep 0.2
    echo "CAROM-COPIED $number $before $(copied)"
    [ $status = 0 ] || cat /tmp/fio
    echo "CAROM-CELL $number $status $(sed -n '/^3;/p' /tmp/fio)"
}}
work --rw=write --bs=1M --iodepth=8 --numjobs={jobs} --offset_increment={AREA_MIB}M || {{ cat /tmp/fio; exit 91; }}
"#
    );
    for (number, cell) in cells.iter().enumerate() {
        // Writing to a String does not fail.
        let _ = writeln!(job, "{}\ncell {number} {}", before(number), cell.options());
    }
    job
}

/// Returns the results of [`job`]: for each cell, the result or the reason why it is missing.
#[must_use]
pub fn results(outcome: &Outcome, cells: &[Cell]) -> Vec<Result<Done>> {
    (0..cells.len()).map(|number| result(outcome, number)).collect()
}

fn result(outcome: &Outcome, number: usize) -> Result<Done> {
    let of = |key: &'static str| {
        let mut lines = outcome.values(key).filter_map(|line| line.split_once(' '));
        lines.find(|(cell, _)| cell.parse() == Ok(number)).map(|(_, rest)| rest)
    };
    let cell = of("CAROM-CELL").context("the console has no CAROM-CELL line of this cell")?;
    // If fio was killed, it has printed no result line.
    let (status, line) = cell.split_once(' ').unwrap_or((cell, ""));
    ensure!(status == "0", "fio ended with status {status}");
    let label = number.to_string();
    let mut probes = outcome.probes.iter().filter(|probe| probe.label == label).cloned();
    let (before, after) = (probes.next(), probes.next());
    let (before, after) = (
        before.context("the console has no CAROM-PROBE line before the cell")?,
        after.context("the console has no CAROM-PROBE line after the cell")?,
    );
    let copied = of("CAROM-COPIED")
        .and_then(|rest| rest.split_once(' '))
        .context("the guest printed no count of copied bytes for this cell")?;
    let copied_bytes = copied.1.parse::<f64>()? - copied.0.parse::<f64>()?;
    ensure!(
        copied_bytes >= 0.0,
        "the guest's count of copied bytes fell from {} to {} during this cell",
        copied.0,
        copied.1
    );
    parse(line, copied_bytes, before, after).with_context(|| format!("invalid fio result {line:?}"))
}

/// Parses a line of fio's terse form, version 3 (fio's HOWTO, "Terse output"). Fields are numbered from 1. Fields of reads
/// come before fields of writes.
fn parse(line: &str, copied_bytes: f64, before: Probe, after: Probe) -> Result<Done> {
    let fields: Vec<&str> = line.split(';').collect();
    let field = |number: usize| fields.get(number - 1).copied().with_context(|| format!("field {number} is missing"));
    let number = |at: usize| field(at)?.parse::<f64>().with_context(|| format!("field {at} is not a number"));
    ensure!(field(5)? == "0", "fio reported error {}", field(5)?);
    // Multiply the IOPS by the runtime in ms.
    let operations = |first: usize| Ok::<_, anyhow::Error>(number(first + 2)? * number(first + 3)? / 1000.0);
    let [reads, writes] = [6, 47].map(operations);
    let (reads, writes) = (reads?, writes?);
    ensure!(reads + writes > 0.0, "fio completed no operation");
    let first = if reads > 0.0 { 6 } else { 47 };
    let percentile = |at: usize| {
        let text = field(first + 12 + at)?;
        text.split_once('=')
            .and_then(|(_, us)| us.parse::<f64>().ok())
            .with_context(|| format!("{text:?} is not a percentile (PERCENT=MICROSECONDS)"))
    };
    let mean = |first: usize| number(first + 34);
    Ok(Done {
        operations: reads + writes,
        iops: number(8)? + number(49)?,
        mib_s: (number(7)? + number(48)?) / 1024.0,
        latency_us: (mean(6)? * reads + mean(47)? * writes) / (reads + writes),
        percentiles_us: [percentile(0)?, percentile(1)?, percentile(2)?],
        copied_bytes,
        before,
        after,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a result of fio 3.33 with 686 reads and 294 writes per second, over 1020 ms.
    fn mixed(error: u32) -> String {
        let none = "0%=0;".repeat(17);
        let side = |start: &str, percentiles: &str, mean: u32| {
            format!(
                "{start};2;30;4.1;2.0;400;9000;1500.5;800.0;{percentiles};{none}420;9010;{mean}.000000;810.0;100;5000;99.0%;2700.0;30.0"
            )
        };
        let reads = side("2800;2745;686;1020", "50.000000%=1400;99.000000%=5000;99.900000%=8000", 1600);
        let writes = side("1200;1176;294;1020", "50.000000%=1000;99.000000%=4000;99.900000%=7000", 1200);
        format!("3;fio-3.33;cell;0;{error};{reads};{writes};5.000000%;20.000000%;700;0;10")
    }

    fn outcome(cell: &str) -> Outcome {
        let probe = |at| Probe { label: "1".into(), at: Duration::from_secs(at), ..Probe::default() };
        let console = format!("CAROM-COPIED 1 100 4196\nCAROM-CELL {cell}\n");
        Outcome { console, probes: vec![probe(1), probe(4)], ..Outcome::default() }
    }

    #[test]
    fn mixed_result_is_read_with_reads_and_writes_together() {
        let done = result(&outcome(&format!("1 0 {}", mixed(0))), 1).unwrap();
        assert!((done.operations - 999.6).abs() < 1e-9 && (done.iops - 980.0).abs() < 1e-9, "{done:?}");
        assert!((done.latency_us - 1480.0).abs() < 1e-9 && (done.mib_s - 3921.0 / 1024.0).abs() < 1e-9, "{done:?}");
        assert_eq!((done.percentiles_us, done.copied_bytes), ([1400.0, 5000.0, 8000.0], 4096.0));
        assert_eq!((done.before.at.as_secs(), done.after.at.as_secs()), (1, 4));
    }

    #[test]
    fn cell_that_failed_or_was_never_begun_has_no_result() {
        for (cell, reason) in [
            ("1 137 ".to_owned(), "status 137"),
            (format!("2 0 {}", mixed(0)), "no CAROM-CELL line of this cell"),
            (format!("1 0 {}", mixed(5)), "error 5"),
            ("1 0 3;fio".into(), "is missing"),
        ] {
            let error = result(&outcome(&cell), 1).unwrap_err();
            assert!(format!("{error:#}").contains(reason), "{error:#}");
        }
    }

    #[test]
    fn cells_become_fio_options() {
        let cell = Cell { pattern: RANDRW, kib: 1024, depth: 16, jobs: 2, extent: Extent::Operations(10) };
        let job = job(&[cell]);
        let line = "cell 0 --rw=randrw --rwmixread=70 --bs=1024k --iodepth=16 --numjobs=2 --offset_increment=128M --io_size=10240k --runtime=30\n";
        assert!(job.ends_with(line) && job.contains("--numjobs=2 --offset_increment=128M ||"), "{job}");
        assert_eq!((cell.size(), Cell { kib: 64, ..cell }.size()), ("1M".into(), "64k".into()));
    }
}
