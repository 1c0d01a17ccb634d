// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Jobs for guests and parsers of their output: fio on the NVMe drive, and the kernel's `dma_map_benchmark`.
//!
//! A job is a shell script. It runs as root with busybox's applets, `fio` and `dma_map_benchmark` in its path, and prints its
//! results as lines `CAROM-…`, which [`Outcome::values`] finds.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::Outcome;

/// Measured block sizes, in the format of fio and of the report.
pub const BLOCK_SIZES: [&str; 4] = ["4k", "16k", "64k", "128k"];

/// First lines of a job that uses the NVMe drive. They wait for the drive, and end the job if it does not appear. After a
/// removal of the drive, the job can call the function `wait_for_nvme` to wait for the drive again.
pub const WAIT_FOR_NVME: &str = r#"
wait_for_nvme() {
    i=0
    while [ ! -b /dev/nvme0n1 ]; do
        i=$((i + 1))
        [ $i -lt 300 ] || { echo "CAROM-NO-NVME"; exit 90; }
        sleep 0.1
    done
}
wait_for_nvme
NVME=$(basename "$(readlink -f /sys/class/nvme/nvme0/device)")
"#;

/// Lines of a job that print the versions of the guest's programs, for [`guest_versions`].
pub const PRINT_VERSIONS: &str = r#"
echo "CAROM-KERNEL $(uname -r)"
echo "CAROM-FIO-VERSION $(fio --version)"
"#;

/// Reads the output of [`PRINT_VERSIONS`], by name.
///
/// # Errors
/// Fails if a version is missing.
pub fn guest_versions(outcome: &Outcome) -> Result<BTreeMap<String, String>> {
    let named = [("guest_kernel", "CAROM-KERNEL"), ("fio", "CAROM-FIO-VERSION")];
    named.map(|(name, key)| Ok((name.into(), outcome.value(key)?.into()))).into_iter().collect()
}

/// Result of fio at one block size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Fio {
    /// Operations per second.
    pub iops: f64,
    /// MiB per second.
    pub mib_s: f64,
}

/// Result of `dma_map_benchmark`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DmaMap {
    /// Mean time of a map, in µs.
    pub map_us: f64,
    /// Mean time of an unmap, in µs.
    pub unmap_us: f64,
}

/// Patterns of [`fio_patterns`], by fio's names: random writes, and a mix of half random reads and half random writes.
pub const PATTERNS: [&str; 2] = ["randwrite", "randrw"];

/// Results of [`fio_patterns`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Patterns {
    /// Operations per second, reads and writes together, by pattern and block size.
    pub iops: BTreeMap<String, BTreeMap<String, f64>>,
    /// Mean latency from submission to completion of a random 4 KiB read at depth 1, in µs.
    pub read_latency_us: f64,
}

/// Time of mapping and unmapping at one block size, by the kernel's function profiler, in seconds per GiB read.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MapTime {
    /// Time in the functions that map, including the profiler's overhead.
    pub map_s: f64,
    /// Time in the functions that unmap, including the profiler's overhead.
    pub unmap_s: f64,
    /// Overhead of the profiler, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profiler: Option<ProfilerTime>,
}

/// Overhead of the function profiler, in seconds per GiB read: the profiled time of the same number of calls to an empty
/// function. This is a lower bound. The empty function is called in a tight loop, so the profiler's code is always in the
/// caches, unlike during I/O.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ProfilerTime {
    /// Overhead of the calls to functions that map.
    pub map_s: f64,
    /// Overhead of the calls to functions that unmap.
    pub unmap_s: f64,
}

impl MapTime {
    /// Returns the time in the functions that map, without the profiler's overhead.
    #[must_use]
    pub fn net_map_s(&self) -> f64 {
        self.map_s - self.profiler.map_or(0.0, |profiler| profiler.map_s)
    }

    /// Returns the time in the functions that unmap, without the profiler's overhead.
    #[must_use]
    pub fn net_unmap_s(&self) -> f64 {
        self.unmap_s - self.profiler.map_or(0.0, |profiler| profiler.unmap_s)
    }
}

/// Functions of `drivers/iommu/dma-iommu.c` in Linux 6.12 that map and unmap memory for drivers.
const PROFILED: &str = "iommu_dma_map_page iommu_dma_map_sg iommu_dma_unmap_page iommu_dma_unmap_sg";

/// Callers of [`PROFILED`]. After a VM exit, the CPU must translate the addresses of the profiler's code and data again. The
/// callers are profiled too, so that the CPU does this before it enters the functions of [`PROFILED`]. Otherwise, the time
/// would count for these functions.
const CALLERS: &str = "dma_map_page_attrs dma_map_sgtable dma_unmap_page_attrs dma_unmap_sg_attrs";

/// Entry points of interrupts (`arch/x86/kernel/irq.c`, `arch/x86/kernel/apic/apic.c`, `kernel/softirq.c`).
///
/// With fast drives, an interrupt sometimes completes other requests and copies their data. This time must not count for the
/// interrupted function. The job therefore profiles the entry points, and disables the profiler's option `graph-time`. However,
/// the time of the interrupted function still includes the VM exit at the start of an interrupt. It also includes the part of
/// an interrupt before the profiler has recorded the call of an entry point.
const INTERRUPTS: &str = "irq_enter_rcu __common_interrupt __sysvec_apic_timer_interrupt irq_exit_rcu";

/// Function that is called for each write to `/dev/null` (`drivers/char/mem.c`). The function returns immediately, so its
/// profiled time is the profiler's overhead.
const EMPTY: &str = "write_null";

/// Returns a job that reads sequentially with fio (direct, libaio, depth 64), in `jobs` threads. It measures each of
/// [`BLOCK_SIZES`] for `seconds` seconds after a warm-up of one second. [`fio_results`] reads the results.
#[must_use]
pub fn fio_reads(seconds: u32, jobs: u8) -> String {
    BLOCK_SIZES
        .map(|size| {
            format!(
                "fio --name=read --filename=/dev/nvme0n1 --direct=1 --rw=read --ioengine=libaio --thread --iodepth=64 --bs={size} \
                 --size=256M --offset_increment=256M --numjobs={jobs} --group_reporting --time_based --ramp_time=1 \
                 --runtime={seconds} --output-format=terse --terse-version=3 >/tmp/fio || exit 91\n\
                 awk -F';' '/^3;/ {{ print \"CAROM-FIO\", \"{size}\", $8, $7, $5 }}' /tmp/fio\n"
            )
        })
        .concat()
}

/// Reads the results of [`fio_reads`].
///
/// # Errors
/// Fails if a block size is missing, fio reported errors or nothing was read.
pub fn fio_results(outcome: &Outcome) -> Result<BTreeMap<String, Fio>> {
    let mut results = BTreeMap::new();
    for line in outcome.values("CAROM-FIO") {
        let words: Vec<&str> = line.split(' ').collect();
        let [size, iops, kib_s, errors] = words[..] else { anyhow::bail!("fio result {line:?}: expected four words") };
        let number = |text: &str| text.parse::<f64>().with_context(|| format!("invalid fio result {line:?}"));
        ensure!(errors == "0", "fio at {size} ended with error {errors}");
        let result = Fio { iops: number(iops)?, mib_s: number(kib_s)? / 1024.0 };
        ensure!(result.iops > 0.0, "fio at {size} read nothing");
        results.insert(size.to_owned(), result);
    }
    for size in BLOCK_SIZES {
        ensure!(results.contains_key(size), "no fio result at {size}; console:\n{}", outcome.console);
    }
    Ok(results)
}

/// Returns a job that runs fio (direct, libaio, one job). It measures each of [`PATTERNS`] at each of [`BLOCK_SIZES`] with
/// depth 64, and then random reads of 4 KiB with depth 1. Each measurement runs for `seconds` seconds after a warm-up of one
/// second. [`pattern_results`] reads the results.
///
/// First, the job writes the area of the drive that the measurements use. So the measured writes need not allocate space in the
/// drive's image on the host.
#[must_use]
pub fn fio_patterns(seconds: u32) -> String {
    let fio = "fio --filename=/dev/nvme0n1 --direct=1 --ioengine=libaio --thread --size=128M";
    let mut job =
        format!("{fio} --name=fill --rw=write --iodepth=16 --bs=128k >/tmp/fio 2>&1 || {{ cat /tmp/fio; exit 91; }}\n");
    let mut measure = |pattern: &str, size: &str, depth: u32, result: &str| {
        job += &format!(
            "{fio} --name={pattern} --rw={pattern} --iodepth={depth} --bs={size} --time_based --ramp_time=1 \
             --runtime={seconds} --output-format=terse --terse-version=3 >/tmp/fio || exit 91\n\
             awk -F';' '/^3;/ {{ print {result}, $5 }}' /tmp/fio\n"
        );
    };
    for pattern in PATTERNS {
        for size in BLOCK_SIZES {
            // Add the IOPS of reads and of writes.
            measure(pattern, size, 64, &format!("\"CAROM-PATTERN\", \"{pattern}\", \"{size}\", $8 + $49"));
        }
    }
    measure("randread", "4k", 1, "\"CAROM-READ-LATENCY-US\", $40");
    job
}

/// Reads the results of [`fio_patterns`].
///
/// # Errors
/// Fails if a result is missing, or if fio reported errors or completed no operation.
pub fn pattern_results(outcome: &Outcome) -> Result<Patterns> {
    let figure = |text: &str, errors: &str| {
        ensure!(errors == "0", "fio ended with error {errors}");
        let number: f64 = text.parse().with_context(|| format!("invalid fio result {text:?}"))?;
        ensure!(number > 0.0, "fio completed no operation");
        Ok(number)
    };
    let mut iops: BTreeMap<String, BTreeMap<String, f64>> = BTreeMap::new();
    for line in outcome.values("CAROM-PATTERN") {
        let words: Vec<&str> = line.split(' ').collect();
        let [pattern, size, number, errors] = words[..] else {
            anyhow::bail!("CAROM-PATTERN {line:?}: expected four words")
        };
        let number = figure(number, errors).with_context(|| format!("{pattern} at {size}"))?;
        iops.entry(pattern.into()).or_default().insert(size.into(), number);
    }
    for (pattern, size) in PATTERNS.iter().flat_map(|pattern| BLOCK_SIZES.map(|size| (*pattern, size))) {
        let there = iops.get(pattern).is_some_and(|sizes| sizes.contains_key(size));
        ensure!(there, "no result of {pattern} at {size}; console:\n{}", outcome.console);
    }
    let latency = outcome.value("CAROM-READ-LATENCY-US")?;
    let (number, errors) =
        latency.split_once(' ').with_context(|| format!("CAROM-READ-LATENCY-US {latency:?}: expected two words"))?;
    Ok(Patterns { iops, read_latency_us: figure(number, errors).context("randread at 4k")? })
}

/// Returns a job that reads sequentially with fio (direct, libaio, depth 64) at each of [`BLOCK_SIZES`]. Meanwhile, the
/// function profiler measures the functions that map and unmap memory. [`map_times`] reads the results.
///
/// The job reads `mib` MiB at the smallest block size and twice as much at each next size. Each size runs twice, and the second
/// run counts. The measured time excludes most of the time in interrupts. Before the reads, the job measures the profiler's
/// overhead with an empty function. The guest's kernel must be built with `guest/config/profile.config`.
#[must_use]
pub fn fio_profiled(mib: u32) -> String {
    // Fields of a line of the profiler: function, number of calls, time in µs, and others.
    let mut job = format!(
        "cd /sys/kernel/tracing || exit 95\necho {PROFILED} {CALLERS} {INTERRUPTS} {EMPTY} >set_ftrace_filter || exit 95\n\
         echo 0 >options/graph-time || exit 95\n\
         echo 1 >function_profile_enabled || exit 95\n\
         total() {{ cat trace_stat/function* |\n\
         awk -v name=\"^$1\" '$1 ~ name {{ calls += $2; us += $3 }} END {{ printf \"%d %.3f\\n\", calls, us }}'; }}\n\
         dd if=/dev/zero of=/dev/null bs=1 count=20000 2>/tmp/dd || exit 95\n\
         echo \"CAROM-PROFILER $(total {EMPTY})\"\n"
    );
    for (step, size) in BLOCK_SIZES.iter().enumerate() {
        // A larger block size has fewer reads per MiB, but each buffer must be used many times, so read more MiB. Otherwise the
        // first use of each buffer, when the host allocates its memory, dominates the result.
        let mib = mib << step;
        // The first round does not count, because the pool grows in this round. In this round, an emulator also translates the
        // profiled functions again, because the profiler has changed their code. So the profiler stays on in both rounds.
        job += &format!(
            "for round in 1 2; do\n\
             BEFORE=\"$(total iommu_dma_map) $(total iommu_dma_unmap)\"\n\
             fio --name=read --filename=/dev/nvme0n1 --direct=1 --rw=read --ioengine=libaio --thread --iodepth=64 --bs={size} \
             --size={mib}M --output-format=terse --terse-version=3 >/tmp/fio || exit 91\n\
             done\n\
             BYTES=$(awk -F';' '/^3;/ {{ print $6 * 1024 }}' /tmp/fio)\n\
             echo \"CAROM-MAP-TIME {size} $BYTES $BEFORE $(total iommu_dma_map) $(total iommu_dma_unmap)\"\n"
        );
    }
    job
}

/// Reads the results of [`fio_profiled`], by block size.
///
/// # Errors
/// Fails if a result is missing, or if nothing was read or mapped.
pub fn map_times(outcome: &Outcome) -> Result<BTreeMap<String, MapTime>> {
    let [calls, us] = positive(outcome.value("CAROM-PROFILER")?)?;
    let profiler_us = us / calls;
    let mut times = BTreeMap::new();
    for line in outcome.values("CAROM-MAP-TIME") {
        let (size, numbers) = line
            .split_once(' ')
            .with_context(|| format!("CAROM-MAP-TIME {line:?}: expected a block size and numbers"))?;
        let [bytes, before @ .., maps, map_us, unmaps, unmap_us] = positive::<9>(numbers)?;
        let in_round = |after: f64, before: f64| {
            let amount = after - before;
            ensure!(amount > 0.0, "profile {line:?}: a value did not grow in the round that counts");
            Ok(amount)
        };
        let (maps, map_us) = (in_round(maps, before[0])?, in_round(map_us, before[1])?);
        let (unmaps, unmap_us) = (in_round(unmaps, before[2])?, in_round(unmap_us, before[3])?);
        let each_gib = f64::from(1 << 30) / bytes / 1e6;
        let profiler = ProfilerTime { map_s: maps * profiler_us * each_gib, unmap_s: unmaps * profiler_us * each_gib };
        let time = MapTime { map_s: map_us * each_gib, unmap_s: unmap_us * each_gib, profiler: Some(profiler) };
        ensure!(
            time.net_map_s() > 0.0 && time.net_unmap_s() > 0.0,
            "profile {line:?}: the profiler's overhead is not less than the measured time"
        );
        times.insert(size.to_owned(), time);
    }
    for size in BLOCK_SIZES {
        ensure!(times.contains_key(size), "no profile at {size}; console:\n{}", outcome.console);
    }
    Ok(times)
}

/// Parses the numbers of a line. Fails unless all numbers are above 0.
fn positive<const N: usize>(line: &str) -> Result<[f64; N]> {
    let numbers: Vec<f64> =
        line.split(' ').map(str::parse).collect::<Result<_, _>>().with_context(|| format!("profile {line:?}"))?;
    ensure!(numbers.iter().all(|number| *number > 0.0), "profile {line:?}: a number is not above 0");
    numbers.try_into().ok().with_context(|| format!("profile {line:?}: expected {N} numbers"))
}

/// Returns a job that writes `mib` MiB of the NVMe drive, in mixed block sizes and at random places. Then the job reads all
/// data back and checks it (crc32c). `depth` requests are in flight. Prints `CAROM-VERIFY <fio's status> <bytes checked>`.
#[must_use]
pub fn fio_verify(mib: u32, depth: u32) -> String {
    fio_verify_on("/dev/nvme0n1", mib, depth)
}

/// Like [`fio_verify`], on any block device.
#[must_use]
pub fn fio_verify_on(device: &str, mib: u32, depth: u32) -> String {
    format!(
        "fio --name=verify --filename={device} --direct=1 --rw=randwrite --ioengine=libaio --iodepth={depth} \
         --bssplit=512/5:4k/35:12k/10:16k/15:64k/20:128k/15 --bs_unaligned=0 --size={mib}M --verify=crc32c --do_verify=1 \
         --verify_fatal=1 --verify_dump=0 --output-format=terse --terse-version=3 >/tmp/verify 2>&1\n\
         status=$?\n\
         [ $status = 0 ] || cat /tmp/verify\n\
         echo \"CAROM-VERIFY $status $(awk -F';' '/^3;/ {{ print $6 * 1024 }}' /tmp/verify)\"\n"
    )
}

/// Checks that the jobs of [`fio_verify`] ran `times` times and succeeded each time.
///
/// # Errors
/// Fails if the number of runs differs, or if a run found an error or checked nothing.
pub fn check_verified(outcome: &Outcome, times: usize) -> Result<()> {
    let results: Vec<&str> = outcome.values("CAROM-VERIFY").collect();
    ensure!(
        results.len() == times,
        "the console has {} CAROM-VERIFY lines, but {times} verified passes are expected; console:\n{}",
        results.len(),
        outcome.console
    );
    for result in results {
        let bytes: Option<u64> = result.strip_prefix("0 ").and_then(|bytes| bytes.parse().ok());
        ensure!(bytes.is_some_and(|bytes| bytes > 0), "CAROM-VERIFY {result:?}; console:\n{}", outcome.console);
    }
    Ok(())
}

/// Parameters of the kernel's `dma_map_benchmark`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// True if the device reads the mapped memory, false if the device writes this memory.
    pub to_device: bool,
    /// Number of threads that map concurrently. Each thread has its own buffer.
    pub threads: u8,
    /// Number of 4 KiB pages of each mapping.
    pub pages: u16,
}

/// One page for the device to write, in one thread.
pub const FROM_DEVICE: Mapping = Mapping { to_device: false, threads: 1, pages: 1 };
/// One page for the device to read, in one thread.
pub const TO_DEVICE: Mapping = Mapping { to_device: true, ..FROM_DEVICE };
/// One page for the device to write, in two threads.
pub const FROM_DEVICE_TWO_THREADS: Mapping = Mapping { threads: 2, ..FROM_DEVICE };

impl Mapping {
    /// Returns the name that identifies these parameters on the console.
    fn key(self) -> String {
        format!("{}-{}-{}", if self.to_device { "TO" } else { "FROM" }, self.threads, self.pages)
    }

    /// Returns the program's options for direction, threads and size.
    fn options(self) -> String {
        let Self { to_device, threads, pages } = self;
        format!("-d {} -t {threads} -g {pages}", if to_device { 1 } else { 2 })
    }
}

/// Returns a job that binds the NVMe drive to the kernel's `dma_map_benchmark`. With each of these parameters, the benchmark
/// maps and unmaps memory for `seconds` seconds. [`dma_map_result`] reads the results. The drive is not usable afterwards.
///
/// If the guest has windows, the job enables bouncing for the device, because this driver does not opt in.
#[must_use]
pub fn dma_map_benchmark(seconds: u32, mappings: &[Mapping]) -> String {
    let mut job = r#"
echo "$NVME" >/sys/bus/pci/drivers/nvme/unbind
echo dma_map_benchmark >"/sys/bus/pci/devices/$NVME/driver_override"
echo "$NVME" >/sys/bus/pci/drivers_probe
SWITCH="/sys/bus/pci/devices/$NVME/iommu_bounce"
# Earlier kernels, which may be measured in the same run, have a file instead of the directory.
[ ! -d "$SWITCH" ] || SWITCH=$SWITCH/mode
[ ! -e "$SWITCH" ] || echo on >"$SWITCH"
"#
    .to_owned();
    for mapping in mappings {
        let (key, options) = (mapping.key(), mapping.options());
        // Writing to a String does not fail.
        let _ = write!(
            job,
            "dma_map_benchmark {options} -s {seconds} >/tmp/dma_map 2>&1 || {{ cat /tmp/dma_map; exit 92; }}\n\
             sed -n 's/^average map latency(us):\\([0-9.]*\\).*/CAROM-MAP-US-{key} \\1/p\n\
             s/^average unmap latency(us):\\([0-9.]*\\).*/CAROM-UNMAP-US-{key} \\1/p' /tmp/dma_map\n"
        );
    }
    job
}

/// Reads the result of [`dma_map_benchmark`].
///
/// # Errors
/// Fails if the result is missing.
pub fn dma_map_result(outcome: &Outcome, mapping: Mapping) -> Result<DmaMap> {
    let number = |what| {
        let key = format!("CAROM-{what}-US-{}", mapping.key());
        outcome.value(&key)?.parse::<f64>().with_context(|| format!("{key} is not a number"))
    };
    Ok(DmaMap { map_us: number("MAP")?, unmap_us: number("UNMAP")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the output of a guest that read half a GiB at each block size. Each call took 3 µs, including 2 µs of overhead.
    fn profile(profiler: &str) -> Outcome {
        // The profiler's values accumulate, so the values before the counted round are from the first round. The first round
        // had as many calls, and took twice as long.
        let line = |size| {
            let before = "1000000 6000000.0 1000000 12000000";
            format!("CAROM-MAP-TIME {size} 536870912 {before} 2000000 9000000 2000000 18000000.0\n")
        };
        Outcome { console: format!("{profiler}\n{}", BLOCK_SIZES.map(line).concat()), ..Outcome::default() }
    }

    #[test]
    fn profile_contains_the_profilers_overhead() {
        let times = map_times(&profile("CAROM-PROFILER 20000 40000.0")).unwrap();
        for size in BLOCK_SIZES {
            let time = times[size];
            let profiler = ProfilerTime { map_s: 4.0, unmap_s: 4.0 };
            assert_eq!(time, MapTime { map_s: 6.0, unmap_s: 12.0, profiler: Some(profiler) });
            assert!((time.net_map_s() - 2.0).abs() < 1e-9 && (time.net_unmap_s() - 8.0).abs() < 1e-9);
        }
    }

    #[test]
    fn profile_without_mappings_in_its_last_round_is_an_error() {
        let mut outcome = profile("CAROM-PROFILER 20000 40000.0");
        outcome.console = outcome.console.replace(" 2000000 9000000 ", " 1000000 6000000.0 ");
        map_times(&outcome).unwrap_err();
    }

    #[test]
    fn profile_without_profiler_or_map_times_is_an_error() {
        for profiler in ["", "CAROM-PROFILER 0 0", "CAROM-PROFILER 20000", "CAROM-PROFILER 20000 80000"] {
            map_times(&profile(profiler)).unwrap_err();
        }
    }
}
