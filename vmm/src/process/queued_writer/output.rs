// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writes to the file of a queue. After a failed write, a queue of lines reports the lost lines, and continues with a whole line.

use std::fs::File;
use std::io::{self, Write};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::fstat;

/// File or stream that a queue's thread writes to.
pub(super) trait Output: Send {
    /// Writes some of `bytes`, and waits as long as necessary. Returns the number of written bytes.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// Returns the size of the file in bytes.
    fn size(&self) -> io::Result<u64>;
}

impl Output for File {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match Write::write(self, bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Another process may have set O_NONBLOCK for the file.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    poll(&mut [PollFd::new(self, PollFlags::OUT)], None).or_else(ignore_interrupt)?;
                }
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                other => return other,
            }
        }
    }

    fn size(&self) -> io::Result<u64> {
        Ok(u64::try_from(fstat(self)?.st_size).unwrap_or(u64::MAX))
    }
}

fn ignore_interrupt(error: rustix::io::Errno) -> rustix::io::Result<usize> {
    if error == rustix::io::Errno::INTR { Ok(0) } else { Err(error) }
}

/// Function that takes the number of lost lines, and returns the line that reports this number, with a line break.
pub(super) type Notice = Box<dyn Fn(u64) -> Vec<u8> + Send + Sync>;

/// Writing end of a queue, which the queue's thread uses.
pub(super) struct Pen<O> {
    output: O,
    /// Maximum size of the file in bytes.
    most: u64,
    /// Number of lines that could not be written and that no notice has reported yet.
    failed: u64,
    /// True if the last write ended within a line.
    in_line: bool,
}

/// Outcome of writing a piece.
pub(super) struct Written {
    /// Number of lost lines if the queue is a queue of lines. Otherwise the number of lost bytes.
    pub(super) lost: u64,
    pub(super) result: io::Result<()>,
}

impl<O: Output> Pen<O> {
    pub(super) fn new(output: O, most: u64) -> Self {
        Self { output, most, failed: 0, in_line: false }
    }

    /// Writes bytes that are not lines.
    pub(super) fn write_bytes(&mut self, piece: &[u8]) -> Written {
        let (done, result) = self.write(piece);
        Written { lost: (piece.len() - done) as u64, result }
    }

    /// Writes whole lines. First reports the lines that were lost in earlier failed writes.
    pub(super) fn write_lines(&mut self, piece: &[u8], notice: &Notice) -> Written {
        let mut before = Vec::new();
        if self.failed > 0 {
            // End the line that was cut off, unless another process has truncated the file to 0 bytes since.
            if self.in_line && self.output.size().is_ok_and(|size| size > 0) {
                before.push(b'\n');
            }
            before.extend(notice(self.failed));
        }
        let (before_len, result) = self.write(&before);
        if result.is_ok() && !before.is_empty() {
            self.failed = 0;
        }
        let (done, result) = if result.is_ok() { self.write(piece) } else { (0, result) };
        let lost = lines(&piece[done..]);
        self.failed += lost;
        if before_len + done > 0 {
            let last = if done > 0 { &piece[..done] } else { &before[..before_len] };
            self.in_line = last.last() != Some(&b'\n');
        }
        Written { lost, result }
    }

    /// Writes all of `bytes`. Returns the number of bytes written before an error.
    fn write(&mut self, bytes: &[u8]) -> (usize, io::Result<()>) {
        if let Err(error) = self.check_size(bytes.len()) {
            return (0, Err(error));
        }
        let mut done = 0;
        while done < bytes.len() {
            match self.output.write(&bytes[done..]) {
                Ok(written) => done += written,
                Err(error) => return (done, Err(error)),
            }
        }
        (done, Ok(()))
    }

    /// Checks that `more` bytes would not exceed the file's maximum size. If the user truncates the file, it has room again.
    fn check_size(&self, more: usize) -> io::Result<()> {
        if self.most == u64::MAX {
            return Ok(());
        }
        let size = self.output.size()?;
        if size.saturating_add(more as u64) <= self.most {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "the file has {size} bytes, and {more} more bytes would exceed its maximum of {} bytes: truncate the file",
            self.most
        )))
    }
}

/// Returns the number of line breaks in `bytes`.
pub(super) fn lines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// File with a small maximum size.
    struct Small {
        bytes: Vec<u8>,
        most: usize,
    }

    impl Output for Small {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let room = (self.most - self.bytes.len()).min(bytes.len());
            if room == 0 {
                return Err(io::Error::from_raw_os_error(libc::EFBIG));
            }
            self.bytes.extend(&bytes[..room]);
            Ok(room)
        }

        fn size(&self) -> io::Result<u64> {
            Ok(self.bytes.len() as u64)
        }
    }

    fn pen(most: usize) -> (Pen<Small>, Notice) {
        let notice: Notice = Box::new(|count| format!("{count} lost\n").into_bytes());
        (Pen::new(Small { bytes: Vec::new(), most }, u64::MAX), notice)
    }

    #[test]
    fn lines_that_fail_are_reported_once_there_is_room() {
        let (mut pen, notice) = pen(8);
        let lost = |pen: &mut Pen<Small>, text: &str| pen.write_lines(text.as_bytes(), &notice).lost;
        assert_eq!(lost(&mut pen, "one\n"), 0);
        assert_eq!(lost(&mut pen, "two\nthree\n"), 1);
        assert_eq!(lost(&mut pen, "four\n"), 1);
        pen.output.most = 100;
        assert_eq!(lost(&mut pen, "five\n"), 0);
        assert_eq!(lost(&mut pen, "six\n"), 0);
        assert_eq!(pen.output.bytes, b"one\ntwo\n2 lost\nfive\nsix\n");
    }

    #[test]
    fn line_that_was_cut_is_ended_before_the_next() {
        let (mut pen, notice) = pen(6);
        assert_eq!(pen.write_lines(b"one\ntwo\n", &notice).lost, 1);
        pen.output.most = 100;
        assert_eq!(pen.write_lines(b"three\n", &notice).lost, 0);
        assert_eq!(pen.output.bytes, b"one\ntw\n1 lost\nthree\n");
    }

    #[test]
    fn emptied_file_begins_with_a_whole_line() {
        let (mut pen, notice) = pen(6);
        assert_eq!(pen.write_lines(b"one\ntwo\n", &notice).lost, 1);
        pen.output.bytes.clear();
        pen.output.most = 100;
        assert_eq!(pen.write_lines(b"three\n", &notice).lost, 0);
        assert_eq!(pen.output.bytes, b"1 lost\nthree\n");
    }

    #[test]
    fn notice_that_fails_too_is_written_later() {
        let (mut pen, notice) = pen(4);
        for _ in 0..3 {
            pen.write_lines(b"one\n", &notice);
        }
        pen.output.most = 9;
        assert_eq!(pen.write_lines(b"two\n", &notice).lost, 1);
        pen.output.most = 100;
        assert_eq!(pen.write_lines(b"three\n", &notice).lost, 0);
        assert_eq!(pen.output.bytes, b"one\n2 los\n3 lost\nthree\n");
    }

    #[test]
    fn bytes_that_fail_are_counted() {
        let (mut pen, _) = pen(6);
        assert_eq!(pen.write_bytes(b"12345678").lost, 2);
        assert_eq!(pen.write_bytes(b"1234").lost, 4);
    }
}
