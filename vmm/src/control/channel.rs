// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How the other threads reach the control thread: a mailbox wakes it, clients call it, signals are handed to it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, OnceLock, Weak};

use carom_api::Call;
use devices::host_memory::Note;

use super::{ControlError, Reply};
use crate::mailbox::Mailbox;

/// Most calls of clients that may wait for the control thread; whoever comes then is told to try again.
const MAX_CALLS: usize = 128;

/// What a call is answered with, on the control thread: it must not block.
pub type Answer = Box<dyn FnOnce(Result<Reply, ControlError>) + Send>;

/// What the control thread wakes up for.
pub(super) enum Message {
    /// A guest, or the host of its devices, left a note.
    Guest,
    /// A client calls.
    Call(Box<Call>, Caller),
    /// A signal asks the VMM to end.
    Terminate(i32),
    /// A signal asks for the counters.
    ReportCounters,
    /// The host has lost guest memory.
    LostMemory(LostMemory),
}

/// A note about lost guest memory, for the control thread.
pub(super) struct LostMemory {
    pub(super) note: Note,
    /// Gets a message when the control thread has begun with the end of the VM.
    pub(super) begun: Sender<()>,
}

impl Message {
    /// Whether a client asks something, which changes nothing.
    pub(super) fn is_question(&self) -> bool {
        let Self::Call(call, _) = self else { return false };
        matches!(**call, Call::Info | Call::Counters | Call::Bounce | Call::Figures)
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
    /// A handle whose calls get no answer.
    #[cfg(test)]
    pub(crate) fn unanswered() -> Self {
        channel().0
    }

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
            self.send(Message::Call(Box::new(call), caller));
        }
    }

    /// Hands over what is no client's call; `false` once the control thread has ended.
    pub(super) fn send(&self, message: Message) -> bool {
        self.sender.send(message).is_ok()
    }

    /// A mailbox for one VM.
    pub fn mailbox(&self) -> Arc<Mailbox> {
        let control = self.clone();
        let wake = move || {
            control.send(Message::Guest);
        };
        Arc::new(Mailbox::new(Box::new(wake)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
