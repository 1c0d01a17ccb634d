// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Server that a test controls. The server records requests. The server can also refuse a request, send a wrong answer, send no answer, or
//! close the connection.

use std::collections::BTreeMap;
use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::sync::lock;

/// Numbers of requests (vhost-user, "Front-end message types").
pub(super) mod request {
    pub(in super::super) const GET_FEATURES: u32 = 1;
    pub(in super::super) const SET_FEATURES: u32 = 2;
    pub(in super::super) const SET_OWNER: u32 = 3;
    pub(in super::super) const SET_MEM_TABLE: u32 = 5;
    pub(in super::super) const SET_VRING_NUM: u32 = 8;
    pub(in super::super) const SET_VRING_ADDR: u32 = 9;
    pub(in super::super) const SET_VRING_BASE: u32 = 10;
    pub(in super::super) const GET_VRING_BASE: u32 = 11;
    pub(in super::super) const SET_VRING_KICK: u32 = 12;
    pub(in super::super) const SET_VRING_CALL: u32 = 13;
    pub(in super::super) const SET_VRING_ERR: u32 = 14;
    pub(in super::super) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(in super::super) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(in super::super) const GET_QUEUE_NUM: u32 = 17;
    pub(in super::super) const SET_VRING_ENABLE: u32 = 18;
    pub(in super::super) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(in super::super) const IOTLB_MSG: u32 = 22;
    pub(in super::super) const GET_CONFIG: u32 = 24;
    pub(in super::super) const SET_CONFIG: u32 = 25;
    pub(in super::super) const GET_INFLIGHT_FD: u32 = 31;
    pub(in super::super) const SET_INFLIGHT_FD: u32 = 32;
    pub(in super::super) const GET_MAX_MEM_SLOTS: u32 = 36;
    pub(in super::super) const ADD_MEM_REG: u32 = 37;
    pub(in super::super) const REM_MEM_REG: u32 = 38;
}
use request::*;

/// Protocol features.
pub(super) const MQ: u64 = 1 << 0;
pub(super) const REPLY_ACK: u64 = 1 << 3;
pub(super) const BACKEND_REQ: u64 = 1 << 5;
pub(super) const CONFIG: u64 = 1 << 9;
pub(super) const INFLIGHT: u64 = 1 << 12;
pub(super) const MEM_SLOTS: u64 = 1 << 15;

/// Way in which a server misbehaves at a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Vice {
    /// The server does not answer.
    Silent,
    /// The server closes the connection.
    Close,
    /// The server refuses the request.
    Refuse,
    /// The server answers with these bytes.
    Answer(Vec<u8>),
    /// The server answers correctly, but byte by byte, with this pause before each byte.
    Dribble(Duration),
}

/// Capabilities and behaviour of a server.
#[derive(Clone)]
pub(super) struct Manner {
    pub(super) features: u64,
    pub(super) protocol: u64,
    pub(super) queues: u64,
    pub(super) regions: u64,
    pub(super) config: Vec<u8>,
    /// Answer to GET_VRING_BASE.
    pub(super) base: u32,
    pub(super) vices: BTreeMap<u32, Vice>,
}

impl Default for Manner {
    /// Returns a correct server that has all capabilities.
    fn default() -> Self {
        Self {
            features: 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28,
            protocol: MQ | REPLY_ACK | CONFIG | MEM_SLOTS | BACKEND_REQ,
            queues: 8,
            regions: 32,
            config: (0..=255).collect(),
            base: 0,
            vices: BTreeMap::new(),
        }
    }
}

/// Request that the server received.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) request: u32,
    pub(super) payload: Vec<u8>,
    pub(super) files: Vec<OwnedFd>,
}

impl Asked {
    /// Returns the 64-bit number at offset `place` of the payload.
    pub(super) fn number(&self, place: usize) -> u64 {
        u64::from_le_bytes(self.payload[place..place + 8].try_into().unwrap())
    }
}

#[derive(Default)]
struct Log {
    asked: Mutex<Vec<Asked>>,
    changed: Condvar,
    /// If true, the server reads nothing until the connection is closed.
    sleeps: AtomicBool,
    /// Current connection.
    socket: Mutex<Option<UnixStream>>,
    /// Number of connections that have ended.
    ended: AtomicU32,
}

/// Server. Dropping the value closes the connection.
pub(super) struct Server {
    dir: tempfile::TempDir,
    log: Arc<Log>,
}

impl Server {
    pub(super) fn start(manner: Manner) -> Self {
        let server = Self { dir: tempfile::tempdir().unwrap(), log: Arc::default() };
        server.listen(manner);
        server
    }

    /// Listens at the server's socket for one client, and serves this client. No other listener may be active.
    pub(super) fn listen(&self, manner: Manner) {
        let path = self.socket();
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(path).unwrap();
        let log = self.log.clone();
        std::thread::spawn(move || {
            let Ok((socket, _)) = listener.accept() else { return };
            drop(listener);
            *lock(&log.socket) = Some(socket.try_clone().unwrap());
            serve(&socket, &manner, &log);
            log.ended.fetch_add(1, Ordering::SeqCst);
        });
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Closes the current connection.
    pub(super) fn close(&self) {
        self.log.sleeps.store(false, Ordering::SeqCst);
        if let Some(socket) = lock(&self.log.socket).take() {
            socket.shutdown(std::net::Shutdown::Both).unwrap();
        }
    }

    /// Returns the number of connections that either side has ended.
    pub(super) fn ended(&self) -> u32 {
        self.log.ended.load(Ordering::SeqCst)
    }

    /// Makes the server stop reading after the next message, until the current connection is closed.
    pub(super) fn stop_reading(&self) {
        self.log.sleeps.store(true, Ordering::SeqCst);
    }

    /// Removes all requests from the record, and returns these requests.
    pub(super) fn take(&self) -> Vec<Asked> {
        std::mem::take(&mut *lock(&self.log.asked))
    }

    /// Removes all requests from the record. Returns the numbers of these requests.
    pub(super) fn requests(&self) -> Vec<u32> {
        self.take().iter().map(|asked| asked.request).collect()
    }

    /// Waits until the server has received `request`. Then removes all requests from the record, and returns these requests.
    pub(super) fn wait_for(&self, request: u32) -> Vec<Asked> {
        let asked = lock(&self.log.asked);
        let missing = |asked: &mut Vec<Asked>| asked.iter().all(|one| one.request != request);
        let limit = Duration::from_secs(60);
        let (mut asked, result) = self.log.changed.wait_timeout_while(asked, limit, missing).unwrap();
        assert!(!result.timed_out(), "request {request} did not come: {asked:?}");
        std::mem::take(&mut *asked)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close();
    }
}

/// Reads a header, and the files that are attached to the header. Returns `None` at the end of the connection.
fn receive(socket: &UnixStream, bytes: &mut [u8]) -> io::Result<Option<Vec<OwnedFd>>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let count = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?.bytes;
    if count == 0 {
        return Ok(None);
    }
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files.collect::<Vec<_>>()),
        _ => None,
    });
    let files = rights.flatten().collect();
    (&*socket).read_exact(&mut bytes[count..])?;
    Ok(Some(files))
}

fn serve(socket: &UnixStream, manner: &Manner, log: &Log) {
    let mut header = [0; 12];
    while let Ok(Some(files)) = receive(socket, &mut header) {
        let word = |place: usize| u32::from_le_bytes(header[place..place + 4].try_into().unwrap());
        let (request, flags, size) = (word(0), word(4), word(8));
        let mut payload = vec![0; size.try_into().unwrap()];
        if (&*socket).read_exact(&mut payload).is_err() {
            return;
        }
        let answer = answer(manner, request, flags, &payload);
        lock(&log.asked).push(Asked { request, payload, files });
        log.changed.notify_all();
        while log.sleeps.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        match manner.vices.get(&request) {
            Some(Vice::Silent) => continue,
            Some(Vice::Close) => {
                let _ = socket.shutdown(std::net::Shutdown::Both);
                return;
            }
            Some(Vice::Answer(bytes)) => {
                let _ = (&*socket).write_all(bytes);
                continue;
            }
            Some(Vice::Refuse) => {
                let _ = (&*socket).write_all(&message(request, &1u64.to_le_bytes()));
                continue;
            }
            Some(Vice::Dribble(pause)) => {
                let message = answer.map(|payload| message(request, &payload));
                for byte in message.unwrap_or_default() {
                    std::thread::sleep(*pause);
                    if (&*socket).write_all(&[byte]).is_err() {
                        return;
                    }
                }
                continue;
            }
            None => {}
        }
        if request == GET_INFLIGHT_FD {
            send_inflight(socket, request);
        } else if let Some(payload) = answer
            && (&*socket).write_all(&message(request, &payload)).is_err()
        {
            return;
        }
    }
}

/// Returns an answer to `request`.
pub(super) fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).unwrap();
    [[request, 5, size].map(u32::to_le_bytes).as_flattened(), payload].concat()
}

fn answer(manner: &Manner, request: u32, flags: u32, payload: &[u8]) -> Option<Vec<u8>> {
    let number = |number: u64| Some(number.to_le_bytes().to_vec());
    match request {
        GET_FEATURES => number(manner.features),
        GET_PROTOCOL_FEATURES => number(manner.protocol),
        GET_QUEUE_NUM => number(manner.queues),
        GET_MAX_MEM_SLOTS => number(manner.regions),
        GET_VRING_BASE => Some([&payload[..4], &manner.base.to_le_bytes()].concat()),
        GET_CONFIG => {
            let len = payload.len() - 12;
            Some([&payload[..12], &manner.config[..len]].concat())
        }
        GET_INFLIGHT_FD => None,
        _ if flags & 8 != 0 => number(0),
        _ => None,
    }
}

fn send_inflight(socket: &UnixStream, request: u32) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::os::fd::AsFd;
    let file = tempfile::tempfile().unwrap();
    let payload = [&4096u64.to_le_bytes()[..], &0u64.to_le_bytes(), &2u16.to_le_bytes(), &64u16.to_le_bytes(), &[0; 4]];
    let bytes = message(request, &payload.concat());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd()];
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
    sendmsg(socket, &[io::IoSlice::new(&bytes)], &mut ancillary, SendFlags::empty()).unwrap();
}
