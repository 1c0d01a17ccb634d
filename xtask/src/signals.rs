// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Signals that ask a program to end. Signals are recorded, so that the program can stop what it has started.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

/// Record of the signal that asked this program to end.
#[derive(Debug, Clone, Default)]
pub struct Signals(Arc<AtomicUsize>);

impl Signals {
    /// Starts recording these signals. These signals then no longer end the program by themselves.
    ///
    /// # Errors
    /// Fails if the kernel refuses a handler.
    pub fn catch() -> Result<Self> {
        let noted = Arc::new(AtomicUsize::new(0));
        for (signal, number) in [(SIGHUP, 1), (SIGINT, 2), (SIGTERM, 15)] {
            flag::register_usize(signal, noted.clone(), number).context("cannot catch signals")?;
        }
        Ok(Self(noted))
    }

    /// Returns the number of the last signal received, if any.
    #[must_use]
    pub fn caught(&self) -> Option<u8> {
        u8::try_from(self.0.load(Ordering::Relaxed)).ok().filter(|&signal| signal != 0)
    }
}
