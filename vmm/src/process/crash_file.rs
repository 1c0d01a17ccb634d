// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! File for crash reports. Carom creates the file at its start, and removes the file at its end if no report was written.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use devices::crash;
use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use crate::process::output_file;

/// Crash file of this process. Dropping this value removes the file if the file contains no report.
#[derive(Debug)]
pub struct CrashFile {
    file: File,
    /// Path of the file, or `None` if the file was inherited.
    path: Option<PathBuf>,
}

impl CrashFile {
    /// Opens or creates the file at `path`, and makes the process append crash reports to this file.
    ///
    /// # Errors
    /// Another process writes its crash reports to the file, or the file cannot be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = output_file::open(File::options().append(true), libc::O_NONBLOCK, path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => {
                Err(io::Error::other("another process writes its crash reports to this file: use another file"))
            }
            // A file that cannot be locked is used without a lock.
            _ => Self::of(file, Some(path.to_path_buf())),
        }
    }

    /// Makes the process write crash reports to a file that the parent process opened.
    ///
    /// # Errors
    /// The descriptor cannot be duplicated.
    pub fn inherited(fd: OwnedFd) -> io::Result<Self> {
        Self::of(fd.into(), None)
    }

    fn of(file: File, path: Option<PathBuf>) -> io::Result<Self> {
        crash::leave_reports_in(fcntl_dupfd_cloexec(&file, 0)?.into())?;
        Ok(Self { file, path })
    }
}

impl Drop for CrashFile {
    fn drop(&mut self) {
        let Some(path) = &self.path else { return };
        let (Ok(opened), Ok(there)) = (self.file.metadata(), fs::symlink_metadata(path)) else { return };
        let is_it = (opened.dev(), opened.ino()) == (there.dev(), there.ino());
        if is_it
            && opened.is_file()
            && opened.len() == 0
            && let Err(error) = fs::remove_file(path)
        {
            log::warn!("cannot remove the empty crash report {}: {error}; remove the file yourself", path.display());
        }
    }
}
