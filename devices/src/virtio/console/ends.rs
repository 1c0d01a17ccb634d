// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The host's side of a console, which the device and its thread share.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use serde::{Deserialize, Serialize};

use super::counters::Counts;

/// Most bytes of input that wait for the driver.
pub(super) const MOST_INPUT: usize = 4 << 10;

/// The size of a terminal. Zeros stand for one that is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Size {
    /// Characters of a line.
    pub columns: u16,
    /// Lines.
    pub rows: u16,
}

/// What comes from the host.
#[derive(Default)]
pub(super) struct Incoming {
    /// Input that the driver has not got yet, [`MOST_INPUT`] at most.
    pub(super) input: VecDeque<u8>,
    /// There is a driver: what is typed before one came, or after it went, is for nobody.
    pub(super) driver: bool,
    /// Size of the terminal.
    pub(super) size: Size,
    /// The size that the driver was told of.
    pub(super) told: Option<Size>,
}

impl Incoming {
    /// The size, if the driver has to be told of it.
    pub(super) fn news(&self) -> Option<Size> {
        // A driver that was told of none takes its own guess for it.
        let known = self.told.unwrap_or_default();
        (self.size != known).then_some(self.size)
    }
}

/// The host's side.
pub(super) struct Ends {
    pub(super) incoming: Mutex<Incoming>,
    pub(super) output: Mutex<Box<dyn Write + Send>>,
    /// Bytes of the next request that are printed already: a pause came before its end.
    pub(super) printed: AtomicUsize,
    pub(super) counts: Counts,
}

impl Ends {
    pub(super) fn new(output: Box<dyn Write + Send>) -> Self {
        let (incoming, output) = (Mutex::default(), Mutex::new(output));
        Self { incoming, output, printed: AtomicUsize::default(), counts: Counts::default() }
    }
}
