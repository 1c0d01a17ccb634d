// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Benchmark of the CPU time of 4 KiB io_uring reads from the page cache. Two rings read the same file, and only one of the rings has
//! registered the file. Each measurement alternates turns of the two rings. For each number of reads in flight, the benchmark then prints a
//! ratio: the CPU time without registration, divided by the CPU time with registration.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use io_uring::{IoUring, opcode, squeue, types};
use rustix::time::{ClockId, clock_gettime};

/// Size of a read in bytes.
const LEN: u32 = 4096;
const PAGE: usize = LEN as usize;
/// Number of pages of the file.
const PAGES: usize = 256;
/// Maximum number of reads in flight.
const MOST: usize = 64;
/// Number of reads in a turn.
const TURN: usize = 2048;
/// Minimum number of turns of a measurement.
const LEAST: u64 = 15;

/// io_uring ring that reads a file, and the memory that receives the data.
struct Reader {
    ring: IoUring,
    file: File,
    is_registered: bool,
    pages: Vec<[u8; PAGE]>,
    next: usize,
}

impl Reader {
    fn new(file: &File, is_registered: bool) -> Self {
        let file = file.try_clone().expect("a descriptor");
        let ring = IoUring::new(64).expect("the host lets this process use io_uring");
        if is_registered {
            ring.submitter().register_files(&[file.as_raw_fd()]).expect("the file is open");
        }
        Self { ring, file, is_registered, pages: vec![[0; PAGE]; MOST], next: 0 }
    }

    /// Returns an io_uring entry that reads the file's next page into `self.pages[place]`.
    fn read(&mut self, place: usize) -> squeue::Entry {
        let page = self.pages[place].as_mut_ptr();
        let offset = (self.next * PAGE) as u64;
        self.next = (self.next + 1) % PAGES;
        if self.is_registered {
            opcode::Read::new(types::Fixed(0), page, LEN).offset(offset).build()
        } else {
            opcode::Read::new(types::Fd(self.file.as_raw_fd()), page, LEN).offset(offset).build()
        }
    }

    /// Runs a turn, with `at_a_time` reads in flight. Returns the CPU time of the turn.
    fn turn(&mut self, at_a_time: usize) -> Duration {
        let began = cpu_time();
        for _ in 0..TURN / at_a_time {
            for place in 0..at_a_time {
                let read = self.read(place);
                // SAFETY: The memory stays allocated as long as the ring exists, and no code uses the memory before the read has ended.
                unsafe { self.ring.submission().push(&read) }.expect("the queue has room");
            }
            self.ring.submit_and_wait(at_a_time).expect("the kernel takes reads");
            let ended = self.ring.completion();
            assert_eq!(ended.filter(|entry| entry.result().cast_unsigned() == LEN).count(), at_a_time);
        }
        cpu_time() - began
    }
}

fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().expect("time does not run backwards")
}

fn middle<T: PartialOrd + Copy>(all: &mut [T]) -> T {
    all.sort_unstable_by(|one, other| one.partial_cmp(other).expect("the value is not NaN"));
    all[all.len() / 2]
}

fn reads(criterion: &mut Criterion) {
    let file = tempfile::tempfile().expect("a temporary file can be created");
    file.write_all_at(&vec![1; PAGES * PAGE], 0).expect("there is enough disk space");
    let mut readers = [false, true].map(|is_registered| Reader::new(&file, is_registered));
    for at_a_time in [1, MOST] {
        let mut group = criterion.benchmark_group(format!("read_{at_a_time}_at_a_time"));
        let mut slower = Vec::new();
        for (measured, name) in ["file", "registered_file"].into_iter().enumerate() {
            group.bench_function(name, |bencher| {
                bencher.iter_custom(|rounds| {
                    let turns = rounds.div_ceil(TURN as u64).max(LEAST);
                    let mut took = Vec::new();
                    for _ in 0..turns {
                        let both = readers.each_mut().map(|reader| reader.turn(at_a_time));
                        slower.push(both[0].div_duration_f64(both[1]));
                        took.push(both[measured]);
                    }
                    // Report the CPU time of the median turn, so that delays by other programs on the host have no effect. Scale this time
                    // to the number of reads that Criterion requested.
                    middle(&mut took).mul_f64(rounds as f64 / TURN as f64)
                });
            });
        }
        group.finish();
        if !slower.is_empty() {
            println!(
                "file ÷ registered file, {at_a_time} at a time: {:.3} ({} turns)",
                middle(&mut slower),
                slower.len()
            );
        }
    }
}

criterion_group!(benches, reads);
criterion_main!(benches);
