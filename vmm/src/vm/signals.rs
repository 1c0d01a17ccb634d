// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Signals to the VMM: SIGTERM, SIGINT and SIGHUP end it in order, SIGUSR1 has the counters reported.

use std::sync::mpsc::SyncSender;
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use super::{VmError, VmEvent};

/// Starts the thread that turns signals into events.
pub(super) fn watch(events: SyncSender<VmEvent>) -> Result<(), VmError> {
    let fail = |source| VmError::Device { what: "watching for signals", source };
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM, SIGUSR1]).map_err(fail)?;
    let forward = move || {
        for signal in signals.forever() {
            let event = if signal == SIGUSR1 { VmEvent::ReportCounters } else { VmEvent::Terminate(signal) };
            if events.send(event).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("signals".into()).spawn(forward).map_err(fail)?;
    Ok(())
}
