// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writes the crash report without an allocation or a lock, so that a signal handler may write it.

use std::cell::Cell;
use std::fmt::{self, Arguments, Write};
use std::fs::{self, File};
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::requests::REQUESTS;
use super::{bounded_write, rings};

/// Maximum number of reports of a process. More than one report is possible, because a panic in a device's code does not end the process.
const MOST: u32 = 16;
/// Maximum time in milliseconds that a thread waits for another thread to finish a report.
const MAX_TRIES: u32 = 1000;

thread_local! {
    /// Role of this thread. The variable needs no allocation and no destructor, so a signal handler may read it.
    static ROLE: Cell<&'static str> = const { Cell::new("unknown") };
}

struct Target {
    file: File,
    /// Load address of the program. To find a code address of the report in the program file, the reader subtracts the load address.
    base: u64,
}

static TARGET: OnceLock<Target> = OnceLock::new();
static WRITTEN: AtomicU32 = AtomicU32::new(0);
static BUSY: AtomicBool = AtomicBool::new(false);

/// Sets the name of this thread's role.
pub(crate) fn set_role(name: &'static str) {
    ROLE.set(name);
}

/// Returns the name of this thread's role.
pub(crate) fn role() -> &'static str {
    ROLE.get()
}

pub(super) fn set_file(file: File) -> io::Result<()> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let base = maps.split('-').next().and_then(|text| u64::from_str_radix(text, 16).ok()).unwrap_or_default();
    TARGET.set(Target { file, base }).map_err(|_| io::Error::other("a file for crash reports is set already"))
}

/// Writes a report if a report file is set. A signal handler may call this function if formatting `cause` and `trace` neither allocates nor
/// locks.
pub(crate) fn write_report(cause: Arguments<'_>, trace: Arguments<'_>) {
    let Some(target) = TARGET.get() else { return };
    if WRITTEN.fetch_add(1, Ordering::Relaxed) >= MOST {
        return;
    }
    // The wait is limited. Otherwise a thread that crashes while it writes a report would wait for itself for ever.
    for _ in 0..MAX_TRIES {
        if BUSY.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            // Ignore an error, because it cannot be reported anywhere.
            let _ = write(&mut Lines::new(&target.file), target.base, cause, trace);
            BUSY.store(false, Ordering::Release);
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn write(to: &mut Lines<'_>, base: u64, cause: Arguments<'_>, trace: Arguments<'_>) -> fmt::Result {
    writeln!(to, "report of a crash, form 1")?;
    writeln!(to, "version: carom {}", env!("CARGO_PKG_VERSION"))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    writeln!(to, "time: {} s after 1970 (UTC)", now.as_secs())?;
    writeln!(to, "process: {}, program at {base:#x}", std::process::id())?;
    let mut name = [0; 16];
    writeln!(to, "thread: {} (role {})", thread_name(&mut name), role())?;
    writeln!(to, "cause: {cause}")?;
    writeln!(to, "trace:\n{trace}")?;
    writeln!(to, "last requests to the virtio-iommu, oldest first:")?;
    REQUESTS.write(to)?;
    rings::ALL.write(to)?;
    writeln!(to, "end of the report")?;
    to.flush();
    Ok(())
}

/// Returns the name that the kernel has stored for this thread.
fn thread_name(bytes: &mut [u8; 16]) -> &str {
    super::thread_name::read(bytes);
    let len = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    std::str::from_utf8(&bytes[..len]).unwrap_or("?")
}

/// Writer that buffers text for the report file.
struct Lines<'f> {
    file: &'f File,
    bytes: [u8; 512],
    len: usize,
    /// Number of waits for the file's reader that may still fail before the rest of the report is dropped.
    steps: u32,
}

impl<'f> Lines<'f> {
    fn new(file: &'f File) -> Self {
        Self { file, bytes: [0; 512], len: 0, steps: bounded_write::STEPS }
    }

    fn flush(&mut self) {
        bounded_write::write(self.file, &self.bytes[..self.len], &mut self.steps);
        self.len = 0;
    }
}

impl Write for Lines<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            if self.len == self.bytes.len() {
                self.flush();
            }
            let room = &mut self.bytes[self.len..];
            let (now, later) = rest.split_at(room.len().min(rest.len()));
            room[..now.len()].copy_from_slice(now);
            self.len += now.len();
            rest = later;
        }
        Ok(())
    }
}
