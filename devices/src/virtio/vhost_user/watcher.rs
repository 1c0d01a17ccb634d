// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Thread that detects the loss of a server, connects to the next server, and serves the server's requests.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use log::{error, warn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::ROLE;
use super::back_channel::{BackChannel, Request};
use super::error::ServerError;
use super::events::QueueEvents;
use super::link::{Address, Connected};
use super::precedence::{FirstGuard, Precedence};
use super::session::Session;
use crate::event_fd;
use crate::peer_timeouts::Operation;
use crate::sandbox;
use crate::sync::lock;
use crate::throttle::Throttle;

/// Pause between two attempts to connect to a server.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// Pause between two attempts to connect if the server is unusable, or if the servers' time budget is spent.
const LOOK_LATER: Duration = Duration::from_secs(5);

/// State that the thread and the device share.
pub(super) struct Shared {
    session: Mutex<Session>,
    /// Precedence for the session's lock: the VMM's threads take precedence over the watcher thread.
    precedence: Precedence,
    /// Device configuration.
    pub(super) config: Mutex<Vec<u8>>,
    wake: EventFd,
    ends: AtomicBool,
}

impl Shared {
    pub(super) fn new(session: Session, config: Vec<u8>) -> io::Result<Self> {
        let wake = EventFd::new(EFD_NONBLOCK)?;
        Ok(Self {
            session: Mutex::new(session),
            precedence: Precedence::default(),
            config: Mutex::new(config),
            wake,
            ends: AtomicBool::new(false),
        })
    }

    /// Locks the session for a thread of the VMM. Such a thread takes precedence over the watcher thread.
    pub(super) fn session_first(&self) -> FirstGuard<'_, Session> {
        self.precedence.lock_first(&self.session)
    }

    /// Locks the session for the watcher thread, after threads of the VMM that wait for the session. See [`Precedence`].
    fn session_last(&self) -> MutexGuard<'_, Session> {
        self.precedence.lock_last(&self.session)
    }
}

/// Handle of the thread. Dropping the handle ends the thread.
pub(super) struct Watcher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Starts the thread. The thread watches the server on `socket`. After a loss, the thread connects to the next server at `address`.
    pub(super) fn spawn(
        shared: Arc<Shared>,
        address: Address,
        socket: UnixStream,
        back_channel: Option<BackChannel>,
    ) -> io::Result<Self> {
        let (events, errors) = {
            let session = lock(&shared.session);
            (session.events.clone(), session.errors.clone())
        };
        let name = format!("{}_server", address.id);
        let watch = Watch {
            shared: shared.clone(),
            address,
            events,
            errors,
            socket: Some(socket),
            back_channel,
            next_look: Instant::now(),
            throttle: Throttle::default(),
        };
        let thread = sandbox::start(ROLE, name, move || watch.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Release);
        // The write fails only if the eventfd's counter would overflow. The thread is then already woken.
        let _ = self.shared.wake.write(1);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            error!("the thread that watches a vhost-user server panicked");
        }
    }
}

/// State of the thread.
struct Watch {
    shared: Arc<Shared>,
    address: Address,
    events: Arc<Vec<QueueEvents>>,
    errors: Arc<EventFd>,
    /// Socket of the server, or `None` while no server is connected.
    socket: Option<UnixStream>,
    back_channel: Option<BackChannel>,
    /// Time of the next attempt to connect, while no server is connected.
    next_look: Instant,
    throttle: Throttle,
}

impl Watch {
    fn run(mut self) {
        while !self.shared.ends.load(Ordering::Acquire) {
            if !self.wait() {
                return;
            }
            self.serve_events();
            if self.socket.as_ref().is_some_and(is_closed) {
                (self.socket, self.back_channel) = (None, None);
                lock(&self.shared.session).lost();
                // A server that has spent the budget must not block the session again and again.
                self.look_after(if self.address.is_spent() { LOOK_LATER } else { LOOK_AGAIN });
            } else if self.is_to_look() && !self.shared.ends.load(Ordering::Acquire) {
                self.look();
            }
            self.serve_back_channel();
        }
    }

    fn look_after(&mut self, pause: Duration) {
        self.next_look = Instant::now() + pause;
    }

    /// True if it is time to connect to a server. A lost server can still write eventfds and so wake this thread. The check of the time
    /// prevents an early attempt after such a wake-up.
    fn is_to_look(&self) -> bool {
        self.socket.is_none() && Instant::now() >= self.next_look
    }

    /// Waits for an event. Returns false if `poll` fails.
    fn wait(&self) -> bool {
        let events = self.events.iter().map(|events| event_fd::borrow(&events.call));
        let mut files: Vec<_> = events.collect();
        files.extend([event_fd::borrow(&self.shared.wake), event_fd::borrow(&self.errors)]);
        files.extend(self.back_channel.iter().map(BackChannel::socket));
        let mut files: Vec<_> = files.iter().map(|file| PollFd::new(file, PollFlags::IN)).collect();
        // On the socket, wait only for the end of the connection. Replies need no event here, because the thread that sends a request also
        // reads the reply.
        files.extend(self.socket.iter().map(|socket| PollFd::new(socket, PollFlags::RDHUP)));
        let pause = self.next_look.saturating_duration_since(Instant::now());
        let time = self.socket.is_none().then(|| Timespec::try_from(pause).ok()).flatten();
        match poll(&mut files, time.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => true,
            Err(error) => {
                error!("{}: cannot wait for events of the vhost-user server: {error}", self.address.id);
                false
            }
        }
    }

    fn serve_events(&self) {
        for (index, events) in (0..).zip(self.events.iter()) {
            if take(&events.call) {
                lock(&self.shared.session).queue_used(index);
            }
        }
        if take(&self.errors) {
            lock(&self.shared.session).queue_broken();
        }
    }

    /// Tries to connect to another server.
    fn look(&mut self) {
        match self.address.connect() {
            Ok(Connected { link, socket, back_channel }) => {
                (self.socket, self.back_channel) = (Some(socket), back_channel);
                let config = link.offer.config.clone();
                let changed = std::mem::replace(&mut *lock(&self.shared.config), config.clone()) != config;
                // All requests to the new server share the time limit of one operation. So no thread waits longer than this limit for the
                // session.
                let _operation = Operation::begin();
                let mut session = self.shared.session_last();
                session.adopt(link);
                if changed {
                    session.config_changed();
                }
            }
            Err(ServerError::NoServer { .. }) => self.look_after(LOOK_AGAIN),
            Err(error) => {
                self.look_after(LOOK_LATER);
                if self.throttle.pass() {
                    warn!("{}: {error}", self.address.id);
                }
            }
        }
    }

    fn serve_back_channel(&mut self) {
        let Some(channel) = &mut self.back_channel else { return };
        // Serve one request at a time. Between two requests, threads that wait for the session can lock the session.
        let done = match channel.take() {
            Request::None => return,
            Request::End => {
                self.back_channel = None;
                return;
            }
            Request::ConfigChanged => {
                let mut session = self.shared.session_last();
                if let Some(config) = session.read_config() {
                    *lock(&self.shared.config) = config;
                    session.config_changed();
                }
                true
            }
            Request::Miss(iova, access) => self.shared.session_last().translate(iova, access),
            Request::Stopped(iova, access) => {
                self.shared.session_last().stopped(iova, access);
                true
            }
        };
        if !channel.answer(done) {
            self.back_channel = None;
        }
    }
}

/// Clears an eventfd. Returns true if the eventfd was written. The server has a copy of the eventfd and could clear it first. So this
/// function must not use a read that can block.
fn take(event: &EventFd) -> bool {
    let fired = event_fd::has_fired(event);
    if fired {
        event_fd::forget(event);
    }
    fired
}

/// True if this side or the server has closed the socket.
fn is_closed(socket: &UnixStream) -> bool {
    let file = socket.as_fd();
    let mut files = [PollFd::new(&file, PollFlags::RDHUP)];
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    poll(&mut files, Some(&Timespec::default())).is_ok() && files[0].revents().intersects(gone)
}
