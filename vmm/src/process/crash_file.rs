// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The file that takes reports of crashes: it is there before there is anything to report, and goes if there never was.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use devices::crash;
use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use crate::process::output_file;

/// The file of this process. Dropping it removes the file if no report is in it.
#[derive(Debug)]
pub struct CrashFile {
    file: File,
    /// Absent where it was inherited.
    path: Option<PathBuf>,
}

impl CrashFile {
    /// Opens the file at `path`, or makes it, and has reports written to its end.
    ///
    /// # Errors
    /// Another process has it, or it cannot be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = output_file::open(File::options().append(true), libc::O_NONBLOCK, path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Err(io::Error::other("another process has its reports written there")),
            // Not all files can be locked.
            _ => Self::of(file, Some(path.to_path_buf())),
        }
    }

    /// Has reports written to a file that the parent process opened.
    ///
    /// # Errors
    /// It cannot be duplicated.
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
            log::warn!("removing {}, which has no report: {error}", path.display());
        }
    }
}
