// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Channel of messages to the control thread. Mailboxes, clients and the signal thread send messages.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, OnceLock, Weak};

use carom_api::Call;
use devices::host_memory::Note;

use super::{ControlError, Reply};
use crate::mailbox::Mailbox;

/// Maximum number of client calls in the queue. If the queue is full, a call fails with [`ControlError::TooManyCalls`].
const MAX_CALLS: usize = 128;

/// Callback that receives the result of a call. It must not block, because the control thread runs it.
pub type Answer = Box<dyn FnOnce(Result<Reply, ControlError>) + Send>;

/// Message to the control thread.
pub(super) enum Message {
    /// The guest or the host left a note in the mailbox.
    Guest,
    /// A client made a call.
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
    /// The control thread sends on this channel when it begins to end the VM.
    pub(super) begun: Sender<()>,
}

impl Message {
    /// True if the message is a client's query, which changes nothing.
    pub(super) fn is_question(&self) -> bool {
        let Self::Call(call, _) = self else { return false };
        matches!(**call, Call::Info | Call::Counters | Call::Bounce | Call::Figures)
    }
}

/// Client that waits in the queue. If this value is dropped before the client has an answer, the client receives the error `Ending`. This
/// error is correct, because the queue is dropped only when the VMM ends.
pub(super) struct Caller {
    answer: Option<Answer>,
    calls: Arc<AtomicUsize>,
}

impl Caller {
    /// Answers the client and removes it from the queue.
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

/// State of the control thread that other threads can read.
pub(super) trait Readable: Send + Sync {
    /// Returns the answer to `vm.info` without waiting. Returns `None` while the control thread changes something, or while
    /// another thread holds a lock that the read needs.
    fn info_soon(&self) -> Option<Result<Reply, ControlError>>;
}

/// Handle of the control thread. It can be cloned for any number of threads.
#[derive(Clone)]
pub struct ControlHandle {
    sender: Sender<Message>,
    calls: Arc<AtomicUsize>,
    /// State that [`Self::info_soon`] reads. The state is set when the control thread begins to serve messages.
    read: Arc<OnceLock<Weak<dyn Readable>>>,
}

/// Creates the channel. Returns the handle, and the receiver for the control thread.
pub(super) fn channel() -> (ControlHandle, Receiver<Message>) {
    let (sender, receiver) = mpsc::channel();
    (ControlHandle { sender, calls: Arc::default(), read: Arc::default() }, receiver)
}

impl ControlHandle {
    /// Returns a handle whose calls are never served.
    #[cfg(test)]
    pub(crate) fn unanswered() -> Self {
        channel().0
    }

    /// Sets the state that [`Self::info_soon`] reads.
    pub(super) fn let_read<R: Readable + 'static>(&self, owned: &Arc<R>) {
        let owned: Weak<R> = Arc::downgrade(owned);
        self.read.get_or_init(|| owned);
    }

    /// Reads the answer to [`Call::Info`] in the calling thread. Returns `None` if reading would have to wait. In this case, use
    /// [`Self::call`]. The answer includes the effects of every call that has been answered.
    pub fn info_soon(&self) -> Option<Result<Reply, ControlError>> {
        self.read.get()?.upgrade()?.info_soon()
    }

    /// Queues a call. `answer` is called with the call's result. If the queue is full, `answer` gets an error immediately.
    pub fn call(&self, call: Call, answer: Answer) {
        let waiting = self.calls.fetch_add(1, Ordering::AcqRel);
        let caller = Caller { answer: Some(answer), calls: self.calls.clone() };
        if waiting >= MAX_CALLS {
            caller.answer(Err(ControlError::TooManyCalls));
        } else {
            // If the control thread has ended, `caller` is dropped here, and its drop answers the client.
            self.send(Message::Call(Box::new(call), caller));
        }
    }

    /// Queues a message that is not a client's call. Returns `false` if the control thread has ended.
    pub(super) fn send(&self, message: Message) -> bool {
        self.sender.send(message).is_ok()
    }

    /// Creates a mailbox for one VM.
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
    fn calls_beyond_the_queue_are_refused_until_one_is_served() {
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
