// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Server for tests. The server follows the protocol, except where the [`Rule`] of a test breaks it.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use super::wire::{ACCESS, CONFIG_REGION, Command, HEADER, Header, Kind, MSI_IRQS};
use crate::pci::regs;

/// Offset of the MSI capability of the server's device.
pub(super) const MSI: u16 = 0x40;

/// Request that the server got.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) command: u16,
    pub(super) payload: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// Way to break the protocol.
pub(super) enum Instead {
    /// The server rejects the request with this error number.
    Refuse(u32),
    /// The server does not answer.
    Silence,
    /// The server closes the connection.
    Close,
    /// The server answers with this payload.
    Answer(Vec<u8>),
    /// The server sends these bytes instead of an answer.
    Bytes(Vec<u8>),
    /// The server answers correctly, but one byte at a time, with this pause before each byte.
    Dribble(Duration),
}

/// Function that decides for each request if the server breaks the protocol, and how.
pub(super) type Rule = Box<dyn Fn(&Header, &[u8]) -> Option<Instead> + Send>;

/// Scripted server. The server ends when the client disconnects.
pub(super) struct Server {
    socket: UnixStream,
    /// Requests that the server got so far.
    received: Arc<Mutex<Vec<Received>>>,
    /// Answers to the server's own requests.
    answers: Receiver<(Header, Vec<u8>)>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts a server with this rule. Returns the server, and the client's end of the socket.
    pub(super) fn start(rule: Rule) -> (Self, UnixStream) {
        let (client, socket) = UnixStream::pair().unwrap();
        let (sender, answers) = channel();
        let received = Arc::new(Mutex::new(Vec::new()));
        let (for_thread, book) = (socket.try_clone().unwrap(), received.clone());
        let thread = thread::spawn(move || serve(&for_thread, &rule, &book, &sender));
        (Self { socket, received, answers, thread: Some(thread) }, client)
    }

    /// Starts a server that follows the protocol.
    pub(super) fn good() -> (Self, UnixStream) {
        Self::start(Box::new(|_, _| None))
    }

    /// Starts a server that does `instead` for each request with this command.
    pub(super) fn that(command: Command, instead: impl Fn() -> Instead + Send + 'static) -> (Self, UnixStream) {
        Self::start(Box::new(move |header, _| (header.command == command.number()).then(&instead)))
    }

    /// Returns the requests that the server got since the last call of this function.
    pub(super) fn received(&self) -> Vec<Received> {
        std::mem::take(&mut self.received.lock().unwrap())
    }

    /// Sends these bytes to the client.
    pub(super) fn send(&self, bytes: &[u8]) {
        // Ignore an error. The client may be gone, and the test notices this elsewhere.
        let _ = (&self.socket).write_all(bytes);
    }

    /// Sends bytes with a descriptor.
    pub(super) fn send_with(&self, bytes: &[u8], file: &impl AsFd) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    }

    /// Returns the client's next answer.
    pub(super) fn answer(&self) -> (Header, Vec<u8>) {
        self.answers.recv_timeout(Duration::from_secs(60)).expect("the client answers")
    }

    /// Sends a request to the client, and returns its answer.
    pub(super) fn ask(&self, command: Command, payload: &[u8]) -> (Header, Vec<u8>) {
        let mut message = Header::request(0x7777, command, payload.len()).encode().to_vec();
        message.extend(payload);
        self.send(&message);
        self.answer()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// Receives `len` bytes. Returns `None` at the end of the stream.
fn receive(socket: &UnixStream, len: usize, descriptors: &mut Vec<OwnedFd>) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut done = 0;
    while done < len {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes[done..])];
        let got = recvmsg(socket.as_fd(), &mut parts, &mut control, RecvFlags::empty()).ok()?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                descriptors.extend(files);
            }
        }
        done += got.bytes;
        if got.bytes == 0 {
            return None;
        }
    }
    Some(bytes)
}

fn serve(socket: &UnixStream, rule: &Rule, book: &Mutex<Vec<Received>>, answers: &Sender<(Header, Vec<u8>)>) {
    let mut config = config();
    loop {
        let mut descriptors = Vec::new();
        let Some(bytes) = receive(socket, HEADER, &mut descriptors) else { return };
        let header = Header::decode(bytes.first_chunk().unwrap()).unwrap();
        let Some(payload) = receive(socket, header.payload, &mut descriptors) else { return };
        if header.kind != (Kind::Command { no_reply: false }) {
            let _ = answers.send((header, payload));
            continue;
        }
        let instead = rule(&header, &payload);
        let good = || answer(&header, &payload, &mut config.clone());
        let mut pause = None;
        let message = match instead {
            Some(Instead::Refuse(error)) => header.answer(Some(error), 0).encode().to_vec(),
            Some(Instead::Silence) => Vec::new(),
            Some(Instead::Close) => {
                let _ = socket.shutdown(Shutdown::Both);
                return;
            }
            Some(Instead::Answer(payload)) => whole(&header, payload),
            Some(Instead::Bytes(bytes)) => bytes,
            Some(Instead::Dribble(time)) => {
                pause = Some(time);
                whole(&header, good())
            }
            None if header.command == Command::RegionWrite.number() => {
                let answer = answer(&header, &payload, &mut config);
                whole(&header, answer)
            }
            None => whole(&header, good()),
        };
        book.lock().unwrap().push(Received { command: header.command, payload, descriptors });
        if send(socket, &message, pause).is_err() {
            return;
        }
    }
}

/// Sends a message, either whole or byte by byte with `pause` before each byte.
fn send(mut socket: &UnixStream, message: &[u8], pause: Option<Duration>) -> io::Result<()> {
    let Some(pause) = pause else { return socket.write_all(message) };
    for byte in message {
        thread::sleep(pause);
        socket.write_all(&[*byte])?;
    }
    Ok(())
}

fn whole(header: &Header, payload: Vec<u8>) -> Vec<u8> {
    let mut message = header.answer(None, payload.len()).encode().to_vec();
    message.extend(payload);
    message
}

/// Creates the configuration space of a function with one BAR of 1 MiB and one MSI vector.
fn config() -> Vec<u8> {
    // The buffer is larger than the reported configuration space.
    let mut config = vec![0; 4096];
    config[..4].copy_from_slice(&0x11e8_1234u32.to_le_bytes());
    config[usize::from(regs::STATUS)] = 0x10;
    config[usize::from(regs::CAPABILITIES)] = MSI.to_le_bytes()[0];
    config[usize::from(MSI)..][..4].copy_from_slice(&[regs::CAP_MSI, 0, 0x80, 0]);
    config
}

/// Creates the answer of a server that follows the protocol.
fn answer(header: &Header, payload: &[u8], config: &mut [u8]) -> Vec<u8> {
    let long = |at: usize| u32::from_ne_bytes(*payload[at..].first_chunk().unwrap());
    let numbers = |numbers: &[u32]| numbers.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<u8>>();
    let is = |command: Command| header.command == command.number();
    if is(Command::Version) {
        let mut answer = vec![0, 0, 1, 0];
        answer.extend(br#"{"capabilities":{"max_msg_fds":8,"max_dma_maps":6}}"#);
        answer.push(0);
        return answer;
    }
    if is(Command::DeviceInfo) {
        return numbers(&[16, 3, 9, 5]);
    }
    if is(Command::RegionInfo) {
        let index = long(8);
        let size = match index {
            0 => 1 << 20,
            CONFIG_REGION => 256,
            _ => 0,
        };
        return numbers(&[32, 3, index, 0, size, 0, 0, 0]);
    }
    if is(Command::IrqInfo) {
        return numbers(&[16, 1, long(8), u32::from(long(8) == MSI_IRQS)]);
    }
    if is(Command::RegionRead) || is(Command::RegionWrite) {
        let (at, len) = (usize::try_from(long(0)).unwrap(), usize::try_from(long(12)).unwrap());
        let mut answer = payload[..ACCESS].to_vec();
        match (long(8), is(Command::RegionRead)) {
            (CONFIG_REGION, true) => answer.extend(&config[at..at + len]),
            (CONFIG_REGION, false) => config[at..at + len].copy_from_slice(&payload[ACCESS..]),
            (_, true) => answer.extend((at..at + len).map(|at| at.to_le_bytes()[0])),
            _ => {}
        }
        return answer;
    }
    Vec::new()
}
