// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writes to files that a signal handler may make. Such a write neither allocates memory nor takes a lock. If the file is a pipe or
//! terminal, the write waits only a limited time for the reader.

use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Maximum number of bytes per call of write(2). If poll(2) reports that a pipe or terminal is ready, a write of this size does not block.
const PIECE: usize = 512;
/// Maximum number of failed waits for a reader during one crash report or one line of text.
pub(crate) const STEPS: u32 = 10;
/// Maximum time of one wait.
const STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Writes `bytes` to `file`, or only the first bytes if the reader of `file` is too slow. `steps` is the number of waits that may still
/// fail. Each failed wait decrements `steps`.
pub(crate) fn write(file: &impl AsFd, bytes: &[u8], steps: &mut u32) {
    write_with(file, bytes, steps, || {
        poll(&mut [PollFd::new(file, PollFlags::OUT)], Some(&STEP)).is_ok_and(|ready| ready > 0)
    });
}

/// Like [`write()`], but calls `wait` instead of poll(2). `wait` returns false if `file` is not ready in time.
fn write_with(file: &impl AsFd, mut rest: &[u8], steps: &mut u32, mut wait: impl FnMut() -> bool) {
    while !rest.is_empty() && *steps > 0 {
        let written = if wait() { rustix::io::write(file, &rest[..rest.len().min(PIECE)]) } else { Err(Errno::AGAIN) };
        match written {
            Ok(written) if written > 0 => rest = &rest[written..],
            Err(Errno::INTR | Errno::AGAIN) => *steps -= 1,
            // Drop the remaining bytes, because the error cannot be reported anywhere.
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read};

    use super::*;

    #[test]
    fn reader_that_reads_nothing_costs_a_few_steps() {
        let (mut reader, writer) = io::pipe().unwrap();
        let (mut steps, mut waits) = (STEPS, 0);
        let mut wait = || {
            waits += 1;
            // The file is ready for the first two waits only.
            waits <= 2
        };
        write_with(&writer, &[7; 4 * PIECE], &mut steps, &mut wait);
        write_with(&writer, &[8; PIECE], &mut steps, &mut wait);
        assert_eq!((steps, waits), (0, 2 + STEPS));
        drop(writer);
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        assert_eq!(all, [7; 2 * PIECE]);
    }

    #[test]
    fn closed_pipe_is_given_up_at_once() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let (mut steps, mut waits) = (STEPS, 0);
        write_with(&writer, &[7; 4 * PIECE], &mut steps, || {
            waits += 1;
            true
        });
        assert_eq!((steps, waits), (STEPS, 1));
    }
}
