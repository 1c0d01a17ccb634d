// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reads of 4 KiB from an emulated disk by a guest without an operating system, one and 64 at a time. The image is in the host's RAM,
//! so only the VMM takes time.
//!
//! `CAROM_BASE_VMM` names another build of Carom, which takes turns with this one. The benchmark then prints the ratio of their times: the
//! median of all rounds, and the interval that holds it at 95 %. `CAROM_ROUNDS` is the number of rounds. `CAROM_DISK` is more options of
//! the disk.

#![expect(clippy::unwrap_used, reason = "a benchmark may panic")]

#[path = "../tests/c_guest/mod.rs"]
mod c_guest;
#[path = "../tests/tiny_guest/mod.rs"]
mod tiny_guest;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use carom_integration::measure::statistics::{interval, median};

/// Lines of the guest for each depth that count. It prints one more before them.
const LINES: usize = 5;
/// Length of the image, which the guest reads whole.
const IMAGE: usize = 32 << 20;
/// Requests of a line.
const READS: f64 = 8192.0;

fn main() {
    // Under `cargo test` it need only build.
    if !env::args().any(|argument| argument == "--bench") {
        return;
    }
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let Some(kernel) = c_guest::build("disk_reads_guest", dir.path()) else { return };
    let image = dir.path().join("image");
    fs::write(&image, vec![1; IMAGE]).unwrap();
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
            let measured = measure(program, &kernel, &image, dir.path());
            for (times, time) in cycles[which].iter_mut().zip(measured) {
                times.push(time);
            }
        }
        eprintln!("round {} of {rounds}", round + 1);
    }

    for (depth, [own, base]) in [1, 64].into_iter().zip([0, 1].map(|depth| [0, 1].map(|which| &cycles[which][depth]))) {
        println!("depth {depth}: {:.0} cycles a read", median(own.iter().copied()).unwrap());
        if base.is_empty() {
            continue;
        }
        let ratios: Vec<f64> = own.iter().zip(base).map(|(own, base)| own / base).collect();
        println!("  the base takes {:.0}", median(base.iter().copied()).unwrap());
        let (low, high) = interval(&ratios).unwrap_or((f64::NAN, f64::NAN));
        println!("  time to that of the base: {:.3} [{low:.3}, {high:.3}]", median(ratios.iter().copied()).unwrap());
    }
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

/// Cycles of a read at each depth, the medians of a guest's lines.
fn measure(program: &Path, kernel: &Path, image: &Path, dir: &Path) -> [f64; 2] {
    let serial = dir.join("serial");
    let _ = fs::remove_file(&serial);
    let more = env::var("CAROM_DISK").map_or(String::new(), |options| format!(",{options}"));
    // Processes share the lock of a disk that is only read: builds before this one gave it back late.
    let mut command = Command::new(program);
    command
        .args(["--memory", "size=32M", "--console", "off", "--kernel"])
        .arg(kernel)
        .args(["--serial", &format!("file={}", serial.display())])
        .args(["--disk", &format!("path={},image_type=raw,queue_size=256,readonly=on{more}", image.display())])
        .stdin(Stdio::null());
    let mut carom = Carom(command.spawn().unwrap());
    let times = loop {
        assert!(carom.0.try_wait().unwrap().is_none(), "{} has ended", program.display());
        let text = fs::read_to_string(&serial).unwrap_or_default();
        assert!(!text.contains('!'), "a read failed");
        let times = [1, 64].map(|depth| times(&text, depth));
        if times.iter().all(|times| times.len() > LINES) {
            break times;
        }
        thread::sleep(Duration::from_millis(20));
    };
    times.map(|times| median(times[1..].iter().copied()).unwrap() / READS)
}

/// The cycles of the whole lines that are of this depth.
fn times(text: &str, depth: u32) -> Vec<f64> {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let lines = whole.lines().filter_map(|line| line.split_once(' '));
    let of_depth = lines.filter(|(its, _)| u32::from_str_radix(its, 16) == Ok(depth));
    of_depth.map(|(_, cycles)| u32::from_str_radix(cycles, 16).unwrap().into()).collect()
}
