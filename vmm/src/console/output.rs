// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Output of a guest's console to a file or to standard output. A slow reader does not stop the VM.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use carom_api::Field;

use crate::process::output_file;
use crate::process::queued_writer::QueuedWriter;

/// Maximum bytes that are queued, in addition to the contents of a pipe.
const MAX_WAITING: u64 = 16 << 10;
/// Maximum bytes of a regular file.
const MAX_FILE: u64 = 256 << 20;
/// Maximum time that a vCPU waits for room. After this time, output is lost. This time is long enough for a serial line with 9600 bits per
/// second to make room. It is also long enough for a pipe that is read at 8 KB/s, although a pipe makes room only in whole pages. A guest
/// tolerates such a wait, because a real serial port may also be slow. A client that pauses the VM meanwhile may also have to wait this
/// long.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum time that the end of the VM waits for a reader that reads nothing. After this time, the remaining output is lost.
const TIMEOUT_AT_END: Duration = Duration::from_secs(1);
/// Maximum time to write the remaining output when the VM ends.
const MAX_END: Duration = Duration::from_secs(10);

/// Queue of standard output, created when a guest first uses standard output. Successive VMs share the queue. So the remaining output of
/// one VM is written before the output of the next VM.
static STDOUT: Mutex<Option<Arc<QueuedWriter>>> = Mutex::new(None);

/// Output of a VM's console. Dropping it waits until everything is written, for at most 10 s. The wait ends earlier if the reader reads
/// nothing for 1 s.
pub struct ConsoleOutput {
    /// Name in the log.
    name: &'static str,
    queue: Arc<QueuedWriter>,
    /// Bytes that the queue had lost before this VM used it.
    lost_before: u64,
}

/// Writer of the console's output.
struct Pen(Arc<QueuedWriter>);

impl ConsoleOutput {
    /// Opens standard output for the console that `option` configures.
    ///
    /// # Errors
    /// The process has reached its limit of threads or descriptors.
    pub fn stdout(option: Field) -> io::Result<Self> {
        let mut stdout = STDOUT.lock().unwrap_or_else(PoisonError::into_inner);
        let queue = match &*stdout {
            Some(queue) => queue.clone(),
            None => {
                // `Stdout` is not used, because a blocked thread would hold the lock of `Stdout`.
                let file = File::from(io::stdout().as_fd().try_clone_to_owned()?);
                stdout.insert(Arc::new(QueuedWriter::new(option.option(), file, MAX_WAITING)?)).clone()
            }
        };
        Ok(Self { name: option.option(), lost_before: queue.lost(), queue })
    }

    /// Opens a file for the console that `option` configures. Creates the file, or empties it if it is a regular file. A regular file may
    /// grow to 256 MiB. If a user empties the file, the file can grow again.
    ///
    /// # Errors
    /// The file cannot be opened without waiting.
    pub fn file(option: Field, path: &Path) -> io::Result<Self> {
        let (name, file) = (option.option(), create(path)?);
        let most = if file.metadata()?.is_file() { MAX_FILE } else { u64::MAX };
        let queue = Arc::new(QueuedWriter::bounded(name, file, MAX_WAITING, most)?);
        Ok(Self { name, queue, lost_before: 0 })
    }

    /// Returns the number of lost bytes.
    pub fn lost_bytes(&self) -> u64 {
        self.queue.lost() - self.lost_before
    }

    /// Returns the writer of the console's output. A write never fails, and waits at most half a second.
    pub fn writer(&self) -> Box<dyn Write + Send> {
        Box::new(Pen(self.queue.clone()))
    }
}

impl Drop for ConsoleOutput {
    fn drop(&mut self) {
        if !self.queue.drain(TIMEOUT_AT_END, MAX_END) {
            log::warn!(
                "{}: the guest's last output is lost, because it could not be written in time; use a faster disk or reader",
                self.name
            );
        }
    }
}

impl Write for Pen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.push(bytes, TIMEOUT);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Like [`File::create`], but with the rules of [`output_file::open`].
fn create(path: &Path) -> io::Result<File> {
    // With O_APPEND, emptying the file leaves no hole before later output.
    output_file::open(OpenOptions::new().write(true).truncate(true), libc::O_APPEND, path)
}
