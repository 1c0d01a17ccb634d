// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host's notices about a passed-through function. VFIO sends these notices as two extra interrupts. One interrupt reports an error of the
//! device. The other interrupt asks this process to close the device.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use log::{error, warn};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vmm_sys_util::poll::PollContext;

use super::host_function::{HostFunction, IrqKind};
use crate::platform::{HostListener, HostNotice};
use crate::sandbox::{self, ThreadRole, calls};

/// Role of the thread that waits for the host's notices about a device.
pub const NOTICES_ROLE: ThreadRole = ThreadRole { name: "vfio-notices", calls: &[calls::WAITING] };

/// Token of the event that stops the thread. The token of any other event is its index in `sources`.
const STOP: usize = usize::MAX;

/// Thread that waits for notices. Dropping this value stops the thread.
pub(crate) struct HostWatch {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl HostWatch {
    /// Starts to wait for notices about a function. `id` is the function's name for the listener, and `name` is the function's address in
    /// the host. Returns `None` if the host sends no notices about the function.
    ///
    /// # Errors
    /// The host cannot create an event or a thread.
    pub(crate) fn start(
        id: &str,
        name: &str,
        host: &dyn HostFunction,
        listener: Arc<dyn HostListener>,
    ) -> io::Result<Option<Self>> {
        let mut sources = Vec::new();
        for (kind, notice) in [(IrqKind::Error, HostNotice::Failed), (IrqKind::Request, HostNotice::Requested)] {
            if host.irq_count(kind) != 0 {
                let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
                match host.enable_irqs(kind, vec![&event]) {
                    Ok(()) => sources.push((event, notice)),
                    // Continue without this notice, because the other notice may still work.
                    Err(error) => {
                        warn!(
                            "{name}: Carom will miss the host's {kind:?} notices about this device, because Carom cannot register for the notices: {error}"
                        );
                    }
                }
            }
        }
        if sources.is_empty() {
            return Ok(None);
        }
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let poll = PollContext::new()?;
        poll.add(&stop, STOP)?;
        for (place, (event, _)) in sources.iter().enumerate() {
            poll.add(event, place)?;
        }
        let (id, name) = (id.to_string(), name.to_string());
        let run = move || {
            if let Err(error) = relay(&poll, &sources, |notice| listener.notify(&id, &name, notice)) {
                error!(
                    "{name}: from now on, this process misses device errors and removal requests that the host reports: {error}"
                );
            }
        };
        let thread = sandbox::start(NOTICES_ROLE, NOTICES_ROLE.name.into(), run)?;
        Ok(Some(Self { stop, thread: Some(thread) }))
    }
}

impl Drop for HostWatch {
    fn drop(&mut self) {
        // This is the first write to the event, so the event's counter cannot overflow.
        let stopping = self.stop.write(1).is_ok();
        if let (true, Some(thread)) = (stopping, self.thread.take()) {
            // The thread logs its failures itself.
            let _ = thread.join();
        }
    }
}

/// Forwards notices until the thread is stopped. If a notice occurs several times before the thread reads its event, the notice is
/// forwarded once.
fn relay(poll: &PollContext<usize>, sources: &[(EventFd, HostNotice)], report: impl Fn(HostNotice)) -> io::Result<()> {
    loop {
        for ready in poll.wait()?.iter_readable() {
            let Some((event, notice)) = sources.get(ready.token()) else { return Ok(()) };
            if event.read().is_ok() {
                report(*notice);
            }
        }
    }
}
