// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Cycles that guests without an operating system print, by this build of Carom and by another one in turn.
//!
//! `CAROM_BASE_VMM` names the other build. The benchmark then prints the ratio of their times: the median of all rounds, and the interval
//! that holds it at 95 %. `CAROM_ROUNDS` is the number of rounds. Such a guest prints lines of two hexadecimal numbers: how many
//! operations were under way at a time, 1 or 64, and the cycles of [`OPERATIONS`] of them. It prints `!` if one fails.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::measure::statistics::{interval, median};

use crate::c_guest;

/// Lines of the guest for each depth that count. It prints one more before them.
const LINES: usize = 3;
/// How often a guest is started, and how long each may take.
const TRIES: usize = 3;
const LIMIT: Duration = Duration::from_secs(120);
/// Length of a disk's image, which the guest reads whole.
const IMAGE: usize = 32 << 20;
/// Operations of a line.
const OPERATIONS: f64 = 2048.0;

/// Measures the guest in `tests/GUEST`. `arguments` makes the VM's files in a directory in the host's RAM, and returns further arguments.
/// `what` is one operation, in words.
pub(crate) fn compare(guest: &str, what: &str, arguments: impl FnOnce(&Path) -> Vec<String>) {
    // Under `cargo test` it need only build.
    if !env::args().any(|argument| argument == "--bench") {
        return;
    }
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let Some(kernel) = c_guest::build(guest, dir.path()) else { return };
    let arguments = arguments(dir.path());
    let rounds = env::var("CAROM_ROUNDS").map_or(20, |text| text.parse().expect("CAROM_ROUNDS: a number"));
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
        println!("  time to that of the base: {:.3} [{low:.3}, {high:.3}]", median(ratios.iter().copied()).unwrap());
    }
}

/// Makes an image of a disk in `dir`, and returns the value of `--disk` with `more` parts.
///
/// The queue's thread runs on the second CPU. The vCPU runs on the first one, so that the scheduler moves neither.
#[allow(dead_code, reason = "each benchmark includes this file, and not all have such a disk")]
pub(crate) fn disk(dir: &Path, more: &str) -> String {
    let image = dir.join("image");
    fs::write(&image, vec![1; IMAGE]).unwrap();
    let comma = if more.is_empty() { "" } else { "," };
    let affinity = if has_two_cpus() { ",queue_affinity=[0@[1]]" } else { "" };
    // Processes share the lock of a disk that is only read: builds before this one gave it back late.
    format!("path={},image_type=raw,queue_size=256,readonly=on{affinity}{comma}{more}", image.display())
}

fn has_two_cpus() -> bool {
    thread::available_parallelism().is_ok_and(|number| number.get() > 1)
}

/// A `carom` process that does not outlive this value.
struct Carom(Child);

impl Drop for Carom {
    fn drop(&mut self) {
        // Fails only where it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Cycles of an operation at each depth, the medians of a guest's lines.
///
/// A guest that stops is started again. Where KVM emulates its instructions, KVM may write a ring's index byte by byte, and a device that
/// reads half of it gives the queue up.
fn measure(program: &Path, kernel: &Path, arguments: &[String], dir: &Path) -> [f64; 2] {
    for _ in 0..TRIES {
        if let Some(times) = run(program, kernel, arguments, dir) {
            return times.map(|times| median(times[1..].iter().copied()).unwrap() / OPERATIONS);
        }
        eprintln!("{}: its guest has stopped; once more", program.display());
    }
    panic!("{}: its guest stopped each time", program.display());
}

/// The cycles that a guest prints for each depth. `None` if it takes too long.
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
    if has_two_cpus() {
        command.args(["--cpus", "boot=1,affinity=[0@[0]]"]);
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

/// The cycles of the whole lines that are of this depth.
fn times(text: &str, depth: u32) -> Vec<f64> {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let lines = whole.lines().filter_map(|line| line.split_once(' '));
    let of_depth = lines.filter(|(its, _)| u32::from_str_radix(its, 16) == Ok(depth));
    of_depth.map(|(_, cycles)| u32::from_str_radix(cycles, 16).unwrap().into()).collect()
}
