// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writes that a handler of signals may do: without an allocation or a lock, and without waiting for ever for a reader.

use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Bytes that are written at once. A pipe or terminal that poll(2) calls ready takes as many without waiting.
const PIECE: usize = 512;
/// How often a report, or a line, waits for a reader in all.
pub(crate) const STEPS: u32 = 10;
/// How long each time.
const STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Writes `bytes` to `file`, as many as a reader takes. `steps` is how often this may wait, and is counted down.
pub(crate) fn write(file: &impl AsFd, bytes: &[u8], steps: &mut u32) {
    write_with(file, bytes, steps, || {
        poll(&mut [PollFd::new(file, PollFlags::OUT)], Some(&STEP)).is_ok_and(|ready| ready > 0)
    });
}

/// The same with another way to wait until `file` is ready; it returns false if it is not by then.
fn write_with(file: &impl AsFd, mut rest: &[u8], steps: &mut u32, mut wait: impl FnMut() -> bool) {
    while !rest.is_empty() && *steps > 0 {
        let written = if wait() { rustix::io::write(file, &rest[..rest.len().min(PIECE)]) } else { Err(Errno::AGAIN) };
        match written {
            Ok(written) if written > 0 => rest = &rest[written..],
            Err(Errno::INTR | Errno::AGAIN) => *steps -= 1,
            // There is no place to report it.
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read};

    use super::*;

    #[test]
    fn reader_that_takes_nothing_costs_a_few_steps() {
        let (mut reader, writer) = io::pipe().unwrap();
        let (mut steps, mut waits) = (STEPS, 0);
        let mut wait = || {
            waits += 1;
            // Ready twice.
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
