// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Runs guests without an operating system, which count the cycles of their operations. The guests run alternately with this build of Carom
//! and with another build.
//!
//! `CAROM_BASE_VMM` names the program of the other build. If this variable is set, the benchmark prints the ratio of the two builds' times.
//! The ratio is the median of all rounds, with its 95 % confidence interval. `CAROM_ROUNDS` is the number of rounds. Each line that a guest
//! prints consists of two hexadecimal numbers. The first is the depth: the number of simultaneous operations, 1 or 64. The second is the
//! number of cycles that [`OPERATIONS`] operations took. The guest prints `!` if an operation fails.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::measure::statistics::{interval, median};
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::c_guest;

/// Minimum number of lines that are evaluated for each depth. The first line of each depth is not evaluated.
const LINES: usize = 3;
/// Maximum number of times that a guest is started for one measurement.
const TRIES: usize = 3;
/// Maximum time of each run.
const LIMIT: Duration = Duration::from_secs(120);
/// Number of operations whose cycles a guest prints as one line.
const OPERATIONS: f64 = 2048.0;

/// Measures the guest in the directory `guest` of `tests`, built with `macros`. `arguments` creates the VM's files in a directory in the
/// host's RAM, and returns the arguments that make Carom use these files. `what` describes one operation.
pub(crate) fn compare(guest: &str, macros: &[&str], what: &str, arguments: impl FnOnce(&Path) -> Vec<String>) {
    // Without `--bench`, for example under `cargo test`, nothing is measured.
    if !env::args().any(|argument| argument == "--bench") {
        return;
    }
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let Some(kernel) = c_guest::build(guest, macros, dir.path()) else { return };
    let arguments = arguments(dir.path());
    let rounds = env::var("CAROM_ROUNDS").map_or(20, |text| text.parse().expect("CAROM_ROUNDS must be a number"));
    let base = env::var_os("CAROM_BASE_VMM").map(PathBuf::from);
    let own = Path::new(env!("CARGO_BIN_EXE_carom"));

    let mut cycles = [[vec![], vec![]], [vec![], vec![]]];
    for round in 0..rounds {
        let mut programs = vec![(0, own)];
        programs.extend(base.as_deref().map(|base| (1, base)));
        if round % 2 == 1 {
            programs.reverse();
        }
        for (which, program) in programs {
            let measured = measure(program, &kernel, &arguments, dir.path());
            for (times, time) in cycles[which].iter_mut().zip(measured) {
                times.push(time);
            }
        }
        eprintln!("round {} of {rounds}", round + 1);
    }

    for (depth, [own, base]) in [1, 64].into_iter().zip([0, 1].map(|depth| [0, 1].map(|which| &cycles[which][depth]))) {
        println!("depth {depth}: {:.0} cycles {what}", median(own.iter().copied()).unwrap());
        if base.is_empty() {
            continue;
        }
        let ratios: Vec<f64> = own.iter().zip(base).map(|(own, base)| own / base).collect();
        println!("  the base takes {:.0}", median(base.iter().copied()).unwrap());
        let (low, high) = interval(&ratios).unwrap_or((f64::NAN, f64::NAN));
        println!("  time relative to the base: {:.3} [{low:.3}, {high:.3}]", median(ratios.iter().copied()).unwrap());
    }
}

/// Returns the first two CPUs that this process may use, for the vCPU and for a device's thread. Returns `None` if this process may use
/// only one CPU.
pub(crate) fn two_cpus() -> Option<[usize; 2]> {
    let allowed = sched_getaffinity(None).unwrap();
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    Some([cpus.next()?, cpus.next()?])
}

/// `carom` process, which is killed when this value is dropped.
struct Carom(Child);

impl Drop for Carom {
    fn drop(&mut self) {
        // The call fails only if the process has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the cycles of an operation at each depth. Each value is the median of the lines that a guest prints for this depth.
///
/// A guest that prints nothing more is started again. The cause may be KVM: if KVM emulates the guest's instructions, it may write a ring's
/// index byte by byte. A device that reads such an incomplete index stops the queue, and the guest then waits for ever.
fn measure(program: &Path, kernel: &Path, arguments: &[String], dir: &Path) -> [f64; 2] {
    for _ in 0..TRIES {
        if let Some(times) = run(program, kernel, arguments, dir) {
            return times.map(|times| median(times[1..].iter().copied()).unwrap() / OPERATIONS);
        }
        eprintln!("{}: its guest stopped; trying again", program.display());
    }
    panic!("{}: its guest stopped each time", program.display());
}

/// Returns the cycles that a guest prints for each depth. Returns `None` if the guest takes too long.
fn run(program: &Path, kernel: &Path, arguments: &[String], dir: &Path) -> Option<[Vec<f64>; 2]> {
    let serial = dir.join("serial");
    let _ = fs::remove_file(&serial);
    let mut command = Command::new(program);
    command
        .args(["--memory", "size=32M", "--console", "off", "--kernel"])
        .arg(kernel)
        .args(["--serial", &format!("file={}", serial.display())])
        .args(arguments)
        .stdin(Stdio::null());
    if let Some([cpu, _]) = two_cpus() {
        command.args(["--cpus", &format!("boot=1,affinity=[0@[{cpu}]]")]);
    }
    let mut carom = Carom(command.spawn().unwrap());
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        assert!(carom.0.try_wait().unwrap().is_none(), "{} has ended", program.display());
        let text = fs::read_to_string(&serial).unwrap_or_default();
        assert!(!text.contains('!'), "an operation failed");
        let times = [1, 64].map(|depth| times(&text, depth));
        if times.iter().all(|times| times.len() > LINES) {
            return Some(times);
        }
        thread::sleep(Duration::from_millis(20));
    }
    None
}

/// Returns the numbers of cycles in the lines of `text` with this depth. Ignores the last line if it is incomplete.
fn times(text: &str, depth: u32) -> Vec<f64> {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let lines = whole.lines().filter_map(|line| line.split_once(' '));
    let of_depth = lines.filter(|(its, _)| u32::from_str_radix(its, 16) == Ok(depth));
    of_depth.map(|(_, cycles)| u32::from_str_radix(cycles, 16).unwrap().into()).collect()
}
