// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How the other threads reach the control thread: guests leave notes, clients call, signals knock.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use devices::platform::{HostListener, HostNotice};

use super::{Call, ControlError, Reply};

/// Most calls of clients that may wait for the control thread; whoever comes then is told to try again.
const MAX_CALLS: usize = 128;

/// What a call is answered with, on the control thread: it must not block.
pub type Answer = Box<dyn FnOnce(Result<Reply, ControlError>) + Send>;

/// What the control thread wakes up for.
pub(super) enum Message {
    /// A guest, or the host of its devices, left a note.
    Guest,
    /// A client calls.
    Call(Call, Caller),
    /// A signal asks the VMM to end.
    Terminate(i32),
    /// A signal asks for the counters.
    ReportCounters,
}

impl Message {
    /// Whether a client asks something, which changes nothing.
    pub(super) fn is_question(&self) -> bool {
        matches!(self, Self::Call(Call::Info | Call::Counters | Call::Bounce | Call::Snapshot, _))
    }
}

/// A client that waits in the queue. One that is dropped without an answer is told that the VMM ends: that is when what
/// waits in the queue is dropped.
pub(super) struct Caller {
    answer: Option<Answer>,
    calls: Arc<AtomicUsize>,
}

impl Caller {
    /// Answers the client, which leaves the queue by that.
    pub(super) fn answer(mut self, outcome: Result<Reply, ControlError>) {
        if let Some(answer) = self.answer.take() {
            answer(outcome);
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.calls.fetch_sub(1, Ordering::AcqRel);
        if let Some(answer) = self.answer.take() {
            answer(Err(ControlError::Ending));
        }
    }
}

/// What the control thread owns, as others may read it.
pub(super) trait Readable: Send + Sync {
    /// What `vm.info` is answered with, at once or not at all: `None` while the control thread changes something, or where
    /// reading would have to wait for somebody else.
    fn info_soon(&self) -> Option<Result<Reply, ControlError>>;
}

/// The way to the control thread, for as many threads as want it.
#[derive(Clone)]
pub struct ControlHandle {
    sender: Sender<Message>,
    calls: Arc<AtomicUsize>,
    /// There while the control thread serves.
    read: Arc<OnceLock<Weak<dyn Readable>>>,
}

/// Makes the way to the control thread, and its end.
pub(super) fn channel() -> (ControlHandle, Receiver<Message>) {
    let (sender, receiver) = mpsc::channel();
    (ControlHandle { sender, calls: Arc::default(), read: Arc::default() }, receiver)
}

impl ControlHandle {
    /// What is read by [`Self::info_soon`] from now on.
    pub(super) fn let_read<R: Readable + 'static>(&self, owned: &Arc<R>) {
        let owned: Weak<R> = Arc::downgrade(owned);
        self.read.get_or_init(|| owned);
    }

    /// What [`Call::Info`] is answered with, as it is now, read by this thread. `None` if that is not to be had at once: then it
    /// takes a call. Whoever has had an answer to a call sees here what that did.
    pub fn info_soon(&self) -> Option<Result<Reply, ControlError>> {
        self.read.get()?.upgrade()?.info_soon()
    }

    /// Hands a call over; `answer` is called with what came of it, at once if the call cannot even wait.
    pub fn call(&self, call: Call, answer: Answer) {
        let waiting = self.calls.fetch_add(1, Ordering::AcqRel);
        let caller = Caller { answer: Some(answer), calls: self.calls.clone() };
        if waiting >= MAX_CALLS {
            caller.answer(Err(ControlError::TooManyCalls));
        } else {
            // Where the control thread has ended, the caller is dropped here.
            self.send(Message::Call(call, caller));
        }
    }

    /// Hands over what is no client's call; `false` once the control thread has ended.
    pub(super) fn send(&self, message: Message) -> bool {
        self.sender.send(message).is_ok()
    }

    /// A mailbox for one VM.
    pub fn mailbox(&self) -> Arc<Mailbox> {
        Arc::new(Mailbox { notes: Mutex::default(), control: self.clone() })
    }
}

/// What a guest did that is the VMM's concern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestEvent {
    /// It powered off.
    PowerOff,
    /// It asked for a reset, or crashed such that a machine resets.
    Reset,
    /// It let go of a device that it was asked for.
    DeviceLeft,
    /// It, or KVM on its behalf, cannot go on.
    Failed(String),
}

/// What the host told of devices: their names, and their addresses in the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HostNotes {
    /// Those that had an uncorrectable error.
    pub(super) failed: BTreeMap<String, String>,
    /// Those that the host wants back.
    pub(super) requested: BTreeMap<String, String>,
}

#[derive(Default)]
struct Notes {
    failed: Option<String>,
    power_off: bool,
    reset: bool,
    device_left: bool,
    host: HostNotes,
}

impl Notes {
    fn is_empty(&self) -> bool {
        let Self { failed, power_off, reset, device_left, host } = self;
        failed.is_none() && !power_off && !reset && !device_left && *host == HostNotes::default()
    }
}

/// Where a VM's vCPUs and the host of its devices leave notes for the control thread. It holds at most one of each kind (and
/// device), so a guest that asks in a loop takes no memory, and leaving a note never waits: the control thread may itself be
/// waiting for the vCPU to pause.
pub struct Mailbox {
    notes: Mutex<Notes>,
    control: ControlHandle,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a note.
    pub fn leave(&self, event: GuestEvent) {
        self.note(|notes| match event {
            GuestEvent::PowerOff => notes.power_off = true,
            GuestEvent::Reset => notes.reset = true,
            GuestEvent::DeviceLeft => notes.device_left = true,
            GuestEvent::Failed(reason) => notes.failed = notes.failed.take().or(Some(reason)),
        });
    }

    /// The first note wakes the control thread up, which takes all.
    fn note(&self, write: impl FnOnce(&mut Notes)) {
        let mut notes = self.lock();
        let was_empty = notes.is_empty();
        write(&mut notes);
        drop(notes);
        if was_empty {
            self.control.send(Message::Guest);
        }
    }

    /// Takes all notes out: those of the host, and the gravest of the guest's, which makes its others pointless (with each of
    /// them, devices are closed too).
    pub(super) fn take(&self) -> (HostNotes, Option<GuestEvent>) {
        let Notes { failed, power_off, reset, device_left, host } = std::mem::take(&mut *self.lock());
        let left = device_left.then_some(GuestEvent::DeviceLeft);
        let reset = reset.then_some(GuestEvent::Reset);
        let power_off = power_off.then_some(GuestEvent::PowerOff);
        (host, failed.map(GuestEvent::Failed).or(power_off).or(reset).or(left))
    }

    /// Forgets requests for a reset, which is being done: several vCPUs, or one that insists, may have asked for it.
    pub fn forget_resets(&self) {
        self.lock().reset = false;
    }

    /// Forgets what the host told of a device that is closed: another may get its name.
    pub(super) fn forget_device(&self, id: &str) {
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
    use super::*;

    #[test]
    fn guest_that_asks_in_a_loop_rings_once() {
        let (handle, receiver) = channel();
        let mailbox = handle.mailbox();
        for _ in 0..1000 {
            mailbox.leave(GuestEvent::Reset);
        }
        assert_eq!(receiver.try_iter().count(), 1);
        assert_eq!(mailbox.take().1, Some(GuestEvent::Reset));
        assert_eq!(mailbox.take().1, None);
    }

    #[test]
    fn gravest_note_counts() {
        let (handle, _receiver) = channel();
        let mailbox = handle.mailbox();
        mailbox.leave(GuestEvent::Reset);
        mailbox.leave(GuestEvent::PowerOff);
        mailbox.leave(GuestEvent::Failed("first".into()));
        mailbox.leave(GuestEvent::Failed("second".into()));
        assert_eq!(mailbox.take().1, Some(GuestEvent::Failed("first".into())));
        assert_eq!(mailbox.take().1, None);
    }

    #[test]
    fn forgotten_reset_leaves_the_rest() {
        let (handle, _receiver) = channel();
        let mailbox = handle.mailbox();
        mailbox.leave(GuestEvent::Reset);
        mailbox.leave(GuestEvent::PowerOff);
        mailbox.forget_resets();
        assert_eq!(mailbox.take().1, Some(GuestEvent::PowerOff));
    }

    #[test]
    fn notes_of_the_host_ring_once_and_are_taken_beside_the_guests() {
        let (handle, receiver) = channel();
        let mailbox = handle.mailbox();
        for _ in 0..1000 {
            mailbox.notify("a", "0000:00:05.0", HostNotice::Requested);
            mailbox.notify("b", "0000:00:06.0", HostNotice::Failed);
            mailbox.notify("c", "0000:00:07.0", HostNotice::Failed);
        }
        mailbox.leave(GuestEvent::Reset);
        mailbox.forget_device("c");
        assert_eq!(receiver.try_iter().count(), 1);
        let one = |id: &str, host: &str| BTreeMap::from([(id.to_string(), host.to_string())]);
        let host = HostNotes { failed: one("b", "0000:00:06.0"), requested: one("a", "0000:00:05.0") };
        assert_eq!(mailbox.take(), (host, Some(GuestEvent::Reset)));
        assert_eq!(mailbox.take(), (HostNotes::default(), None));
        mailbox.notify("b", "0000:00:06.0", HostNotice::Failed);
        assert_eq!(receiver.try_iter().count(), 1);
    }

    #[test]
    fn calls_beyond_the_queue_are_refused_and_places_come_back() {
        let (handle, receiver) = channel();
        let refused = Arc::new(AtomicUsize::new(0));
        let call = |handle: &ControlHandle| {
            let refused = refused.clone();
            handle.call(
                Call::Info,
                Box::new(move |outcome| {
                    if matches!(outcome, Err(ControlError::TooManyCalls)) {
                        refused.fetch_add(1, Ordering::Relaxed);
                    }
                }),
            );
        };
        for _ in 0..MAX_CALLS + 3 {
            call(&handle);
        }
        assert_eq!(refused.load(Ordering::Relaxed), 3);
        drop(receiver.recv());
        call(&handle);
        assert_eq!(refused.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn call_to_an_ended_control_thread_is_answered() {
        let (handle, receiver) = channel();
        drop(receiver);
        let (sender, answers) = mpsc::channel();
        handle.call(Call::Info, Box::new(move |outcome| sender.send(outcome).unwrap()));
        assert!(matches!(answers.recv().unwrap(), Err(ControlError::Ending)));
    }
}
