// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where a console of the guest writes to. Whoever reads that, or does not, the VM goes on.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use carom_api::Field;

use crate::process::output_file;
use crate::process::queued_writer::QueuedWriter;

/// Most bytes that wait to be written, beside what the kernel holds in a pipe.
const MAX_WAITING: u64 = 16 << 10;
/// Most bytes of a regular file.
const MAX_FILE: u64 = 256 << 20;
/// How long a vCPU waits for room, before output is lost: long enough for a pipe that is read at 8 KB/s, as
/// its reader makes room by pages, and for a line of 9600 bits a second. A guest gets over a pause of this length, as a real serial
/// port makes it wait longer for a line of text, and so does a client that pauses the VM meanwhile.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long a reader may take nothing when the VM ends, before the rest is not waited for.
const PATIENCE_AT_END: Duration = Duration::from_secs(1);
/// How long the end of a VM may take, however its output is read.
const MAX_END: Duration = Duration::from_secs(10);

/// Standard output, once a guest has it. One VM after the other writes there, and what one has left comes before what the next
/// writes.
static STDOUT: Mutex<Option<Arc<QueuedWriter>>> = Mutex::new(None);

/// Where a console of a VM writes to; dropping it waits until all is written, but not for a reader that takes nothing.
pub struct ConsoleOutput {
    /// What the log calls it.
    name: &'static str,
    queue: Arc<QueuedWriter>,
    /// Bytes that the queue had lost before.
    lost_before: u64,
}

/// What a console writes with.
struct Pen(Arc<QueuedWriter>);

impl ConsoleOutput {
    /// Standard output, for the console of this option.
    ///
    /// # Errors
    /// There can be no more threads or descriptors.
    pub fn stdout(option: Field) -> io::Result<Self> {
        let mut stdout = STDOUT.lock().unwrap_or_else(PoisonError::into_inner);
        let queue = match &*stdout {
            Some(queue) => queue.clone(),
            None => {
                // Not by `Stdout`: that has a lock, which a thread that cannot write would hold.
                let file = File::from(io::stdout().as_fd().try_clone_to_owned()?);
                stdout.insert(Arc::new(QueuedWriter::new(option.option(), file, MAX_WAITING)?)).clone()
            }
        };
        Ok(Self { name: option.option(), lost_before: queue.lost(), queue })
    }

    /// A file for the console of this option, which is made, or emptied if it is a regular one. Such a file takes 256 MiB; whoever
    /// empties it makes room.
    ///
    /// # Errors
    /// It cannot be opened at once.
    pub fn file(option: Field, path: &Path) -> io::Result<Self> {
        let (name, file) = (option.option(), create(path)?);
        let most = if file.metadata()?.is_file() { MAX_FILE } else { u64::MAX };
        let queue = Arc::new(QueuedWriter::bounded(name, file, MAX_WAITING, most)?);
        Ok(Self { name, queue, lost_before: 0 })
    }

    /// Bytes that were lost.
    pub fn lost_bytes(&self) -> u64 {
        self.queue.lost() - self.lost_before
    }

    /// What the console writes with: it never fails, and waits for half a second at most.
    pub fn writer(&self) -> Box<dyn Write + Send> {
        Box::new(Pen(self.queue.clone()))
    }
}

impl Drop for ConsoleOutput {
    fn drop(&mut self) {
        if !self.queue.drain(PATIENCE_AT_END, MAX_END) {
            log::warn!("{}: the last output is not written: nobody reads it", self.name);
        }
    }
}

impl Write for Pen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.push(bytes, PATIENCE);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// As [`File::create`], by [`output_file::open`].
fn create(path: &Path) -> io::Result<File> {
    // At its end, so that whoever empties it has no hole before what comes.
    output_file::open(OpenOptions::new().write(true).truncate(true), libc::O_APPEND, path)
}
