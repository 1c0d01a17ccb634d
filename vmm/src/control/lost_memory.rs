// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The end of a VM whose guest memory is lost: the host cannot supply a page of it, or a page has a memory error.

use std::ops::ControlFlow;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use devices::host_memory::Note;

use super::channel::{ControlHandle, LostMemory, Message};
use super::{Booted, Control, State, tell_failure};
use crate::console::terminal;
use crate::error::VmError;
use crate::machine::Machine;
use crate::process::event_monitor::EventMonitor;
use crate::process::log_stream;

/// How long the control thread may take to begin with the end, and to finish it, where a thread is stuck with the locks that it holds.
const BEGIN: Duration = Duration::from_secs(2);
const FINISH: Duration = Duration::from_secs(10);
/// How long the last events may take to be written.
const LAST_EVENTS: Duration = Duration::from_secs(1);
/// Exit status for a failure.
const FAILURE: i32 = 1;

/// Has the VM stopped, by the control thread. If that thread does not end the program although some thread is stuck, this one does: the
/// control thread may wait for a lock, or may itself be stuck.
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
        tell_failure(monitor, &error);
        log::error!("the VMM ends at once: {error}");
        monitor.flush(LAST_EVENTS);
    }
    terminal::restore();
    log_stream::flush();
    std::process::exit(FAILURE);
}

impl<M: Machine> Control<M> {
    /// Ends the guest. Where a thread is stuck, nothing of the VM can be taken down in order, and the VMM ends with it.
    pub(super) fn lose_memory(&mut self, lost: &LostMemory) -> ControlFlow<Result<(), VmError>> {
        let LostMemory { note: Note { reason, is_stuck }, begun } = lost;
        let result = Err(VmError::Guest(reason.clone()));
        if !is_stuck {
            let is_booted = self.created.as_ref().is_some_and(|created| created.booted.is_some());
            return if is_booted { self.end_of_guest(result) } else { ControlFlow::Continue(()) };
        }
        // The receiver is gone if this took too long.
        let _ = begun.send(());
        if let Err(error) = &result {
            tell_failure(&self.monitor, error);
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
