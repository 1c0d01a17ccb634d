// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Signals to the VMM: SIGTERM, SIGINT and SIGHUP end it in order, SIGUSR1 has the counters reported.

use std::io;

use devices::sandbox;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use super::channel::{ControlHandle, Message};
use crate::thread_roles::SIGNALS;

/// Starts the thread that turns signals into messages.
pub(super) fn watch(control: ControlHandle) -> io::Result<()> {
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM, SIGUSR1])?;
    let forward = move || {
        for signal in signals.forever() {
            let message = if signal == SIGUSR1 { Message::ReportCounters } else { Message::Terminate(signal) };
            if !control.send(message) {
                return;
            }
        }
    };
    sandbox::start(SIGNALS, "signals".into(), forward)?;
    Ok(())
}
