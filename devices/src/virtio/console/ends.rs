// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The host's side of a console. The device and its thread share this state.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use serde::{Deserialize, Serialize};

use super::counters::Counts;

/// Maximum number of bytes of input that wait for the driver.
pub(super) const MOST_INPUT: usize = 4 << 10;

/// Size of a terminal. Both fields are 0 if the size is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Size {
    /// Characters per line.
    pub columns: u16,
    /// Number of lines.
    pub rows: u16,
}

/// Input for the guest, and size of the host's terminal.
#[derive(Default)]
pub(super) struct Incoming {
    /// Input that the driver has not received yet, at most [`MOST_INPUT`] bytes.
    pub(super) input: VecDeque<u8>,
    /// True if a driver is active. If no driver is active, the device drops input.
    pub(super) driver: bool,
    /// Size of the terminal.
    pub(super) size: Size,
    /// Terminal size in the last notification to the driver. `None` before the first notification.
    pub(super) announced: Option<Size>,
}

impl Incoming {
    /// Returns the size of the terminal if the driver must be notified of this size.
    pub(super) fn news(&self) -> Option<Size> {
        // Before the first notification, the driver uses a size of its own choice. The driver needs no notification while the real size is
        // unknown.
        let known = self.announced.unwrap_or_default();
        (self.size != known).then_some(self.size)
    }
}

/// The host's side of a console.
pub(super) struct Ends {
    pub(super) incoming: Mutex<Incoming>,
    pub(super) output: Mutex<Box<dyn Write + Send>>,
    /// Number of bytes of the next print request that are already printed. The number is 0, unless a pause interrupted the request.
    pub(super) printed: AtomicUsize,
    pub(super) counts: Counts,
}

impl Ends {
    pub(super) fn new(output: Box<dyn Write + Send>) -> Self {
        let (incoming, output) = (Mutex::default(), Mutex::new(output));
        Self { incoming, output, printed: AtomicUsize::default(), counts: Counts::default() }
    }
}
