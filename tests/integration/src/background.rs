// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest that runs in the background.

use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::process::{self, Running};
use crate::{Guest, Site, stuck};

/// Running guest. Its VMM ends when this value is dropped.
#[derive(Debug)]
pub struct Background {
    running: Running,
    /// Socket of the API, if the VMM is Carom.
    api: Option<PathBuf>,
    /// Files of the guest.
    _files: TempDir,
}

impl Background {
    /// Starts the guest.
    ///
    /// # Errors
    /// Fails if the guest's files cannot be created or the VMM cannot be started.
    pub fn start(guest: &Guest, site: &Site) -> Result<Self> {
        let files = tempfile::tempdir().context("cannot create a directory for the guest's files")?;
        let (mut command, console, api) = guest.command(site, files.path())?;
        Ok(Self { running: Running::start(&mut command, &console)?, api, _files: files })
    }

    /// Returns the time since the start.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.running.elapsed()
    }

    /// Returns the complete lines of the console so far.
    ///
    /// # Errors
    /// Fails if the console cannot be read.
    pub fn console(&mut self) -> Result<&str> {
        self.running.console()
    }

    /// Returns the VMM's stderr.
    #[must_use]
    pub fn stderr(&self) -> String {
        self.running.stderr()
    }

    /// Returns the VMM's exit status if it has ended.
    ///
    /// # Errors
    /// Fails if the status cannot be queried.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.running.ended()
    }

    /// Returns a report on the VMM's threads, as text for an error. If the VMM is Carom, also sends the guest an NMI. The
    /// guest's kernel then prints its position on the console and panics.
    #[must_use]
    pub fn stuck(&self) -> String {
        stuck::report(self.running.pid(), self.api.as_deref())
    }

    /// Returns the memory that the VMM has locked or pinned now, in bytes. Returns 0 after the VMM's end.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        process::pinned_bytes(self.running.pid())
    }
}
