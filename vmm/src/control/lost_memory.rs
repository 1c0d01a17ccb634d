// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Ends a VM that has lost guest memory: the host cannot supply a page, or a page has a memory error.

use std::ops::ControlFlow;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use devices::host_memory::Note;

use super::channel::{ControlHandle, LostMemory, Message};
use super::{Booted, Control, State, emit_failure};
use crate::console::terminal;
use crate::error::VmError;
use crate::machine::Machine;
use crate::process::event_monitor::EventMonitor;
use crate::process::log_stream;

/// Maximum time until the control thread begins to end the VM, if another thread is stuck. The stuck thread may hold locks that the
/// control thread needs.
const BEGIN: Duration = Duration::from_secs(2);
/// Maximum time until the control thread has ended the VM and the program, after it has begun to end the VM.
const FINISH: Duration = Duration::from_secs(10);
/// Maximum time to write the last events.
const LAST_EVENTS: Duration = Duration::from_secs(1);
/// Exit status for a failure.
const FAILURE: i32 = 1;

/// Makes the control thread stop the VM. If a thread is stuck, the control thread may also be stuck, or wait for a lock. If the control
/// thread then does not end the program in time, the calling thread ends the program.
pub(super) fn stop(control: &ControlHandle, monitor: &EventMonitor, note: Note) {
    let (begun, has_begun) = mpsc::channel();
    let sent = control.send(Message::LostMemory(LostMemory { note: note.clone(), begun }));
    if !note.is_stuck {
        return;
    }
    if sent && has_begun.recv_timeout(BEGIN).is_ok() {
        thread::sleep(FINISH);
    } else {
        let error = VmError::Guest(note.reason);
        emit_failure(monitor, &error);
        log::error!("{error}; the VMM ends now, and does not shut down the VM");
        monitor.flush(LAST_EVENTS);
    }
    terminal::restore();
    log_stream::flush();
    std::process::exit(FAILURE);
}

impl<M: Machine> Control<M> {
    /// Ends the guest. If a thread is stuck, the VM cannot be shut down cleanly, and the VMM ends too.
    pub(super) fn lose_memory(&mut self, lost: &LostMemory) -> ControlFlow<Result<(), VmError>> {
        let LostMemory { note: Note { reason, is_stuck }, begun } = lost;
        let result = Err(VmError::Guest(reason.clone()));
        if !is_stuck {
            let is_booted = self.created.as_ref().is_some_and(|created| created.booted.is_some());
            return if is_booted { self.end_of_guest(result) } else { ControlFlow::Continue(()) };
        }
        // Sending fails if the receiver has stopped waiting after `BEGIN`.
        let _ = begun.send(());
        if let Err(error) = &result {
            emit_failure(&self.monitor, error);
        }
        if let Some(created) = &mut self.created
            && let Some(Booted { vm, .. }) = created.booted.take()
        {
            vm.abandon();
            created.state = State::Shutdown;
        }
        ControlFlow::Break(result)
    }
}
