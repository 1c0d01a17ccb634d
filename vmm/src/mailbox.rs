// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Mailbox of a VM: its vCPUs, its devices and the host leave notes for the control thread.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use devices::platform::{HostListener, HostNotice};

/// Event of a guest that the VMM must handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestEvent {
    /// The guest powered off.
    PowerOff,
    /// The guest asked for a reset, or crashed in a way that resets a machine.
    Reset,
    /// The guest released a device or vCPU that it was asked to release.
    Left,
    /// The guest cannot continue, or KVM cannot run the guest.
    Failed(String),
}

/// Notices of the host about devices. Each map contains the PCI addresses of devices on the host, by device ID.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostNotes {
    /// Devices that had an uncorrectable error.
    pub(crate) failed: BTreeMap<String, String>,
    /// Devices that the host asks Carom to release.
    pub(crate) requested: BTreeMap<String, String>,
}

#[derive(Default)]
struct Notes {
    failed: Option<String>,
    power_off: bool,
    reset: bool,
    left: bool,
    host: HostNotes,
}

impl Notes {
    fn is_empty(&self) -> bool {
        let Self { failed, power_off, reset, left, host } = self;
        failed.is_none() && !power_off && !reset && !left && *host == HostNotes::default()
    }
}

/// Mailbox for notes to the control thread. The VM's vCPUs and the host side of its devices leave these notes. The mailbox holds at most
/// one event of each kind from the guest. From the host, it holds at most one notice of each kind for each device. So the mailbox does
/// not grow if a guest repeats a request endlessly. A vCPU that leaves a note never waits, because the control thread may be waiting for
/// this vCPU to pause.
pub struct Mailbox {
    notes: Mutex<Notes>,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl Mailbox {
    /// Creates an empty mailbox. When a note arrives in the empty mailbox, `wake` is called. `wake` must not wait.
    pub fn new(wake: Box<dyn Fn() + Send + Sync>) -> Self {
        Self { notes: Mutex::default(), wake }
    }

    fn lock(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a note.
    pub fn leave(&self, event: GuestEvent) {
        self.note(|notes| match event {
            GuestEvent::PowerOff => notes.power_off = true,
            GuestEvent::Reset => notes.reset = true,
            GuestEvent::Left => notes.left = true,
            GuestEvent::Failed(reason) => notes.failed = notes.failed.take().or(Some(reason)),
        });
    }

    /// Writes a note. The first note wakes the control thread, which takes all notes.
    fn note(&self, write: impl FnOnce(&mut Notes)) {
        let mut notes = self.lock();
        let was_empty = notes.is_empty();
        write(&mut notes);
        drop(notes);
        if was_empty {
            (self.wake)();
        }
    }

    /// Takes all notes. Returns the notes of the host, and the most serious event of the guest. The guest's other events are dropped.
    /// Dropping [`GuestEvent::Left`] loses nothing, because a reset or the end of the VM also closes released devices and vCPUs.
    pub(crate) fn take(&self) -> (HostNotes, Option<GuestEvent>) {
        let Notes { failed, power_off, reset, left, host } = std::mem::take(&mut *self.lock());
        let left = left.then_some(GuestEvent::Left);
        let reset = reset.then_some(GuestEvent::Reset);
        let power_off = power_off.then_some(GuestEvent::PowerOff);
        (host, failed.map(GuestEvent::Failed).or(power_off).or(reset).or(left))
    }

    /// Drops the note that asks for a reset. Called during a reset, which serves all earlier reset requests of the vCPUs.
    pub fn forget_resets(&self) {
        self.lock().reset = false;
    }

    /// Drops the host's notices about a closed device, because another device may get the same ID.
    pub(crate) fn forget_device(&self, id: &str) {
        let HostNotes { failed, requested } = &mut self.lock().host;
        failed.remove(id);
        requested.remove(id);
    }
}

impl HostListener for Mailbox {
    fn notify(&self, id: &str, host: &str, notice: HostNotice) {
        self.note(|notes| {
            let devices = match notice {
                HostNotice::Failed => &mut notes.host.failed,
                HostNotice::Requested => &mut notes.host.requested,
            };
            devices.insert(id.into(), host.into());
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Creates a mailbox, and a counter of its wake-ups.
    fn mailbox() -> (Mailbox, Arc<AtomicUsize>) {
        let rings = Arc::new(AtomicUsize::new(0));
        let counted = rings.clone();
        let wake = move || {
            counted.fetch_add(1, Ordering::Relaxed);
        };
        (Mailbox::new(Box::new(wake)), rings)
    }

    #[test]
    fn guest_that_asks_in_a_loop_wakes_control_once() {
        let (mailbox, rings) = mailbox();
        for _ in 0..1000 {
            mailbox.leave(GuestEvent::Reset);
        }
        assert_eq!(rings.swap(0, Ordering::Relaxed), 1);
        assert_eq!(mailbox.take().1, Some(GuestEvent::Reset));
        assert_eq!(mailbox.take().1, None);
    }

    #[test]
    fn most_serious_note_wins() {
        let (mailbox, _) = mailbox();
        mailbox.leave(GuestEvent::Reset);
        mailbox.leave(GuestEvent::PowerOff);
        mailbox.leave(GuestEvent::Failed("first".into()));
        mailbox.leave(GuestEvent::Failed("second".into()));
        assert_eq!(mailbox.take().1, Some(GuestEvent::Failed("first".into())));
        assert_eq!(mailbox.take().1, None);
    }

    #[test]
    fn forgotten_reset_leaves_the_rest() {
        let (mailbox, _) = mailbox();
        mailbox.leave(GuestEvent::Reset);
        mailbox.leave(GuestEvent::PowerOff);
        mailbox.forget_resets();
        assert_eq!(mailbox.take().1, Some(GuestEvent::PowerOff));
    }

    #[test]
    fn host_notes_wake_control_once_and_are_kept_with_guest_events() {
        let (mailbox, rings) = mailbox();
        for _ in 0..1000 {
            mailbox.notify("a", "0000:00:05.0", HostNotice::Requested);
            mailbox.notify("b", "0000:00:06.0", HostNotice::Failed);
            mailbox.notify("c", "0000:00:07.0", HostNotice::Failed);
        }
        mailbox.leave(GuestEvent::Reset);
        mailbox.forget_device("c");
        assert_eq!(rings.swap(0, Ordering::Relaxed), 1);
        let one = |id: &str, host: &str| BTreeMap::from([(id.to_string(), host.to_string())]);
        let host = HostNotes { failed: one("b", "0000:00:06.0"), requested: one("a", "0000:00:05.0") };
        assert_eq!(mailbox.take(), (host, Some(GuestEvent::Reset)));
        assert_eq!(mailbox.take(), (HostNotes::default(), None));
        mailbox.notify("b", "0000:00:06.0", HostNotice::Failed);
        assert_eq!(rings.swap(0, Ordering::Relaxed), 1);
    }
}
