// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that runs while other things are done, others beside it for one.

use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;

use crate::process::{self, Running};
use crate::{Guest, Site, stuck};

/// A guest that runs. Its VMM is ended with this value.
#[derive(Debug)]
pub struct Background {
    running: Running,
    /// Socket of a Carom's API.
    api: Option<PathBuf>,
    /// Files of the guest.
    _files: TempDir,
}

impl Background {
    /// Starts the guest.
    ///
    /// # Errors
    /// When its files cannot be made, or the VMM not be started.
    pub fn start(guest: &Guest, site: &Site) -> Result<Self> {
        let files = tempfile::tempdir().context("cannot create a directory for the guest's files")?;
        let (mut command, console, api) = guest.command(site, files.path())?;
        Ok(Self { running: Running::start(&mut command, &console)?, api, _files: files })
    }

    /// Time since its start.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.running.elapsed()
    }

    /// The whole lines on its console so far.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn console(&mut self) -> Result<&str> {
        self.running.console()
    }

    /// What its VMM has written to stderr.
    #[must_use]
    pub fn stderr(&self) -> String {
        self.running.stderr()
    }

    /// How its VMM ended, if it has.
    ///
    /// # Errors
    /// When it cannot be asked.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.running.ended()
    }

    /// What its VMM's threads are at, as text for an error. The kernel of a Carom's guest ends by that, and tells on its console where it was.
    #[must_use]
    pub fn stuck(&self) -> String {
        stuck::report(self.running.pid(), self.api.as_deref())
    }

    /// Memory that its VMM has locked or pinned now, in bytes; 0 when it is gone.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        process::pinned_bytes(self.running.pid())
    }
}
