// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Socket to a server, which may be broken or hostile. The socket carries Carom's requests and the server's answers. The socket also
//! carries the server's requests to read and write memory, and Carom's answers.
//!
//! One thread reads all messages. This thread passes each answer to the thread that waits for the answer, and serves DMA_READ and DMA_WRITE
//! itself. For these two requests, the reading thread takes no lock that a waiting thread may hold, because a server may access memory
//! before it answers. A thread waits for an answer only for a limited time.
//!
//! A server is *gone* if it breaks the protocol, is silent for too long, or closes the socket. Carom then logs the reason once, and all
//! waiting threads get an error. After this, Carom neither sends nor reads messages.
//!
//! Carom sends file descriptors to a server, but accepts none. Carom reads messages without a buffer for descriptors, so the kernel closes
//! descriptors that a server sends.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufReader, IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use log::error;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::wire::{ACCESS, Command, HEADER, Header, Kind, dma_access, parse_dma_access};
use crate::crash::{Claim, RingKind};
use crate::peer_timeouts::{Budget, Operation, Peer};
use crate::sandbox::{self, ThreadRole, calls};
use crate::sync::lock;

/// Role of the thread that reads the messages of the device's server, and copies memory for the server's DMA requests.
pub const ROLE: ThreadRole = ThreadRole { name: "vfio-user", calls: &[calls::MESSAGES] };

/// Maximum total time that a server may take for all its messages in one [`Operation`]. A vCPU may wait this long, with interrupts off in
/// the guest.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(5);
/// Ratio of a server's budget to the connection's time limit, as numerator and denominator. The budget is the total time that a server may
/// delay other threads before the connection ends. A server slowly regains used time.
const BUDGET: (u32, u32) = (3, 2);
/// Divisor of the connection's time limit. In each wait for an answer, the first 1/50 of this limit is not charged to the budget, because a
/// busy host can delay a server.
const FREE: u32 = 50;
/// Maximum number of descriptors in one message.
pub(super) const MOST_DESCRIPTORS: usize = 32;
/// Size of the read buffer in bytes.
const READ_AHEAD: usize = 16 << 10;

/// Reason why a request failed.
#[derive(Debug)]
pub(super) enum CallError {
    /// The server rejects the request with this error number, which may be 0.
    Refused(u32),
    /// The server is gone. The reason was logged already.
    Gone,
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(0) => f.write_str("the vfio-user server rejected the request without a reason"),
            Self::Refused(error) => write!(f, "the vfio-user server rejected the request: {}", errno(*error)),
            Self::Gone => f.write_str("the connection to the vfio-user server has ended"),
        }
    }
}

/// Converts a server's error number, which may be any number.
fn errno(error: u32) -> io::Error {
    i32::try_from(error).map_or_else(|_| io::ErrorKind::Other.into(), io::Error::from_raw_os_error)
}

impl From<CallError> for io::Error {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused(number) if number != 0 => errno(number),
            error => Self::other(error.to_string()),
        }
    }
}

/// Memory that a server accesses by DMA_READ and DMA_WRITE.
pub(super) trait DmaTarget: Send + Sync {
    /// Copies the memory at `iova` to `data`. Returns `false` if a part of the range may not be read.
    fn read(&self, iova: u64, data: &mut [u8]) -> bool;
    /// Copies `data` to the memory at `iova`. Returns `false` and writes nothing if a part of the range may not be written.
    fn write(&self, iova: u64, data: &[u8]) -> bool;
}

/// Request that waits for its answer.
struct PendingRequest {
    command: Command,
    /// Maximum size of an answer, in bytes.
    most: usize,
    answer: Option<Result<Vec<u8>, u32>>,
}

#[derive(Default)]
struct Requests {
    next: u16,
    waiting: BTreeMap<u16, PendingRequest>,
    /// Reason why the server is gone, or `None` if it is not gone.
    gone: Option<String>,
}

/// Requests that wait for their answers.
#[derive(Default)]
pub(super) struct Calls {
    requests: Mutex<Requests>,
    changed: Condvar,
}

impl Calls {
    /// Registers a request whose answer may have at most `most` bytes. Returns the number of the request.
    pub(super) fn expect(&self, command: Command, most: usize) -> Result<u16, CallError> {
        let mut requests = lock(&self.requests);
        if requests.gone.is_some() {
            return Err(CallError::Gone);
        }
        let first = requests.next;
        // Some number is always free, because each waiting thread uses one number, and this process has far fewer than 65536 threads.
        let number = (0..=u16::MAX).map(|step| first.wrapping_add(step));
        let free = number.into_iter().find(|id| !requests.waiting.contains_key(id)).ok_or(CallError::Gone)?;
        requests.next = free.wrapping_add(1);
        requests.waiting.insert(free, PendingRequest { command, most, answer: None });
        Ok(free)
    }

    /// Waits until `deadline` for the answer to request `id`. Returns `None` if no answer arrives in time.
    pub(super) fn wait(&self, id: u16, deadline: Instant) -> Option<Result<Vec<u8>, CallError>> {
        let mut requests = lock(&self.requests);
        loop {
            let answered = requests.waiting.get(&id).is_none_or(|waiting| waiting.answer.is_some());
            let left = deadline.saturating_duration_since(Instant::now());
            if answered || requests.gone.is_some() || left.is_zero() {
                let answer = requests.waiting.remove(&id).and_then(|waiting| waiting.answer);
                return match answer {
                    Some(answer) => Some(answer.map_err(CallError::Refused)),
                    None => requests.gone.is_some().then_some(Err(CallError::Gone)),
                };
            }
            let waited = self.changed.wait_timeout(requests, left);
            requests = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Checks the header of an answer. The error describes the fault.
    fn check(&self, header: &Header) -> Result<(), String> {
        let requests = lock(&self.requests);
        let waiting = requests.waiting.get(&header.id).filter(|waiting| waiting.answer.is_none());
        let Some(waiting) = waiting else { return Err("sent an answer to a request that is not pending".into()) };
        let name = waiting.command.name();
        if waiting.command.number() != header.command {
            return Err(format!("answered {name} with an answer to another command (number {})", header.command));
        }
        if header.payload > waiting.most {
            return Err(format!(
                "answered {name} with {} bytes, but at most {} are allowed",
                header.payload, waiting.most
            ));
        }
        Ok(())
    }

    /// Hands an answer to the thread that waits for it.
    fn answer(&self, id: u16, answer: Result<Vec<u8>, u32>) {
        if let Some(waiting) = lock(&self.requests).waiting.get_mut(&id) {
            waiting.answer = Some(answer);
        }
        self.changed.notify_all();
    }

    /// Marks the server as gone. Returns `false` if it was gone already.
    fn give_up(&self, reason: &str) -> bool {
        let mut requests = lock(&self.requests);
        let first = requests.gone.is_none();
        if first {
            requests.gone = Some(reason.to_string());
        }
        drop(requests);
        self.changed.notify_all();
        first
    }

    /// Returns the reason why the server is gone, or `None` if it is not gone.
    pub(super) fn gone(&self) -> Option<String> {
        lock(&self.requests).gone.clone()
    }
}

/// Reads one message. Hands an answer to the thread that waits for it. Serves a request, and answers it with `send` if the server wants an
/// answer. The error is the reason why the connection ends.
pub(super) fn take_message(
    input: &mut impl Read,
    calls: &Calls,
    dma: &dyn DmaTarget,
    send: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> Result<(), String> {
    let mut bytes = [0; HEADER];
    fill(input, &mut bytes)?;
    let header = Header::decode(&bytes)?;
    match header.kind {
        Kind::Reply { refused } => {
            calls.check(&header)?;
            let mut payload = vec![0; header.payload];
            fill(input, &mut payload)?;
            calls.answer(header.id, refused.map_or(Ok(payload), Err));
            Ok(())
        }
        Kind::Command { no_reply } => {
            let mut payload = vec![0; header.payload];
            fill(input, &mut payload)?;
            let answer = serve(&header, &payload, dma);
            if no_reply {
                Ok(())
            } else {
                send(&answer).map_err(|error| {
                    closed(&error).unwrap_or_else(|| format!("did not accept the answer to its own request: {error}"))
                })
            }
        }
    }
}

fn fill(input: &mut impl Read, bytes: &mut [u8]) -> Result<(), String> {
    input.read_exact(bytes).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => CLOSED.to_string(),
        _ => {
            closed(&error).unwrap_or_else(|| format!("is unreachable, because reading from its socket failed: {error}"))
        }
    })
}

/// Text of the reason if the server has closed the socket. The text is the same for every call that notices the closed socket.
const CLOSED: &str = "closed the connection";

/// Returns [`CLOSED`] if the error means that the server has closed the socket.
fn closed(error: &io::Error) -> Option<String> {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset).then(|| CLOSED.to_string())
}

/// Serves a request of the server. Returns the whole answer.
fn serve(header: &Header, payload: &[u8], dma: &dyn DmaTarget) -> Vec<u8> {
    let refuse = |error: i32| header.answer(Some(error.unsigned_abs()), 0).encode().to_vec();
    let is = |command: Command| header.command == command.number();
    let Some((iova, len)) = parse_dma_access(payload) else {
        let known = is(Command::DmaRead) || is(Command::DmaWrite);
        return refuse(if known { libc::EINVAL } else { libc::EOPNOTSUPP });
    };
    if is(Command::DmaRead) && payload.len() == ACCESS {
        let mut answer = header.answer(None, ACCESS + len).encode().to_vec();
        answer.extend(dma_access(iova, len));
        answer.resize(HEADER + ACCESS + len, 0);
        return if dma.read(iova, &mut answer[HEADER + ACCESS..]) { answer } else { refuse(libc::EFAULT) };
    }
    if is(Command::DmaWrite) && payload.len() == ACCESS + len {
        let mut answer = header.answer(None, ACCESS).encode().to_vec();
        answer.extend(dma_access(iova, len));
        return if dma.write(iova, &payload[ACCESS..]) { answer } else { refuse(libc::EFAULT) };
    }
    refuse(if is(Command::DmaRead) || is(Command::DmaWrite) { libc::EINVAL } else { libc::EOPNOTSUPP })
}

/// Exclusive right of a thread to send one whole message.
struct Turn<'c>(&'c SharedConnection);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *lock(&self.0.is_sending) = false;
        self.0.sent.notify_one();
    }
}

struct SharedConnection {
    peer: Peer,
    name: String,
    socket: UnixStream,
    /// True while a thread sends a message. The lock is not held while the message is sent, because a wait for a lock has no time limit.
    is_sending: Mutex<bool>,
    sent: Condvar,
    calls: Calls,
    /// Ring that records recent messages for crash reports. `None` if no ring was free.
    messages: Option<Claim>,
    limit: Duration,
    budget: Mutex<Budget>,
}

impl SharedConnection {
    /// Marks the server as gone, and logs the reason once.
    fn give_up(&self, reason: &str) {
        if self.calls.give_up(reason) {
            error!(
                "{}: the vfio-user server {reason}; the device no longer works: restart the server, then remove and add the device",
                self.name
            );
        }
        // The shutdown fails only if the other side is gone already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Waits for the right to send.
    fn turn(&self, deadline: Instant) -> io::Result<Turn<'_>> {
        let mut is_sending = lock(&self.is_sending);
        while *is_sending {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            is_sending = self.sent.wait_timeout(is_sending, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *is_sending = true;
        Ok(Turn(self))
    }

    /// Waits until the socket has room for more bytes.
    fn wait_for_room(&self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&self.socket, PollFlags::OUT)], Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends a message with its descriptors. The whole message must be sent by `deadline`.
    fn send(&self, message: &[u8], descriptors: &[BorrowedFd<'_>], deadline: Instant) -> io::Result<()> {
        let _turn = self.turn(deadline)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::Error::other("too many descriptors for one message"));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let mut sent = 0;
        while sent < message.len() {
            match sendmsg(&self.socket, &[IoSlice::new(&message[sent..])], &mut control, flags) {
                Ok(more) => {
                    sent += more;
                    // The descriptors were sent with the first byte, so do not send them again.
                    control.clear();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait_for_room(deadline)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Connection to a server. Dropping this value closes the socket. After that, the server cannot access memory by messages any more.
pub(super) struct Connection {
    shared: Arc<SharedConnection>,
    reader: Option<JoinHandle<()>>,
    /// Target of the server's DMA. The reading thread also holds a reference to the target. The reference in this field is dropped after
    /// the reading thread has ended. So the reading thread never drops the target, which would need system calls that its role does not
    /// allow.
    _dma: Arc<dyn DmaTarget>,
}

impl Connection {
    /// Creates a connection over `socket`, which must be blocking. `name` is the device's name in logs. `limit` is the maximum total time
    /// that the server may take for all answers of an operation.
    pub(super) fn new(name: &str, socket: UnixStream, dma: Arc<dyn DmaTarget>, limit: Duration) -> io::Result<Self> {
        let shared = Arc::new(SharedConnection {
            peer: Peer::new_server(),
            name: name.to_string(),
            socket,
            is_sending: Mutex::new(false),
            sent: Condvar::new(),
            calls: Calls::default(),
            messages: Claim::new(name, RingKind::Messages),
            limit,
            budget: Mutex::new(Budget::new(limit * BUDGET.0 / BUDGET.1, limit / FREE, Instant::now())),
        });
        let (for_reader, target) = (shared.clone(), dma.clone());
        let run = move || {
            let mut input = BufReader::with_capacity(READ_AHEAD, &for_reader.socket);
            let mut send = |answer: &[u8]| for_reader.send(answer, &[], Instant::now() + limit);
            loop {
                if let Err(reason) = take_message(&mut input, &for_reader.calls, &*target, &mut send) {
                    for_reader.give_up(&reason);
                    return;
                }
            }
        };
        let reader = sandbox::start(ROLE, ROLE.name.into(), run)?;
        Ok(Self { shared, reader: Some(reader), _dma: dma })
    }

    /// Sends a request to the server and waits for the answer. The answer may have at most `most` bytes. If the server does not answer in
    /// time, ends the connection.
    pub(super) fn call(
        &self,
        command: Command,
        payload: &[u8],
        descriptors: &[BorrowedFd<'_>],
        most: usize,
    ) -> Result<Vec<u8>, CallError> {
        let SharedConnection { calls, limit, peer, budget, messages, .. } = &*self.shared;
        let start = Instant::now();
        let of_operation = limit.saturating_sub(Operation::waited(*peer));
        let of_budget = lock(budget).allows(start);
        let deadline = start + of_operation.min(of_budget);
        let id = calls.expect(command, most)?;
        let kept = messages.as_ref().map(|claim| {
            let (kept, slot) = claim.ring().begin(id);
            slot.set_sizes(payload.len(), most);
            claim.ring().note(kept, u8::try_from(command.number()).unwrap_or(u8::MAX), 0);
            (claim.ring(), kept)
        });
        let mut message = Header::request(id, command, payload.len()).encode().to_vec();
        message.extend(payload);
        if let Err(error) = self.shared.send(&message, descriptors, deadline) {
            let reason = closed(&error)
                .unwrap_or_else(|| format!("did not receive the whole request {}: {error}", command.name()));
            self.shared.give_up(&reason);
        }
        let answer = calls.wait(id, deadline);
        if let Some((ring, kept)) = kept {
            match &answer {
                Some(Ok(answer)) => ring.end(kept, u32::try_from(answer.len()).unwrap_or(u32::MAX)),
                Some(Err(CallError::Refused(error))) => {
                    ring.set_status(kept, u8::try_from(*error).unwrap_or(u8::MAX));
                    ring.end(kept, 0);
                }
                Some(Err(CallError::Gone)) | None => {}
            }
        }
        let end = Instant::now();
        Operation::note(*peer, end.duration_since(start));
        lock(budget).pay(start, end);
        answer.unwrap_or_else(|| {
            let limit = limit.as_secs_f32();
            let why = if of_budget < of_operation {
                "is too slow: its recent answers delayed other threads for too long in total".to_string()
            } else {
                format!("did not answer {} in time (limit: {limit} s)", command.name())
            };
            self.shared.give_up(&why);
            Err(CallError::Gone)
        })
    }

    /// Ends the connection to a server that broke a rule.
    pub(super) fn give_up(&self, reason: &str) {
        self.shared.give_up(reason);
    }

    /// Returns the reason why the server is gone, or `None` if it is not gone.
    pub(super) fn gone(&self) -> Option<String> {
        self.shared.calls.gone()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Do not log this reason, because Carom itself ends the connection.
        self.shared.calls.give_up("was disconnected");
        let _ = self.shared.socket.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take()
            && reader.join().is_err()
        {
            error!("{}: the thread that reads messages of the vfio-user server panicked", self.shared.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::drop_reporter::DropReporter;

    impl DmaTarget for DropReporter {
        fn read(&self, _: u64, _: &mut [u8]) -> bool {
            false
        }
        fn write(&self, _: u64, _: &[u8]) -> bool {
            false
        }
    }

    #[test]
    fn reader_never_drops_the_dma_target() {
        let (reporter, dropped) = DropReporter::new();
        let (socket, other) = UnixStream::pair().unwrap();
        let connection = Connection::new("/run/x", socket, Arc::new(reporter), Duration::from_secs(60)).unwrap();
        drop(other);
        drop(connection);
        assert_eq!(dropped.recv(), Ok(thread::current().id()));
    }
}
