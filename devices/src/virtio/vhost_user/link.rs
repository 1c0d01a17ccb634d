// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connects to a server, and negotiates the capabilities that the front end uses.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;

use super::back_channel::BackChannel;
use super::connection::{Connection, Times};
use super::error::ServerError;
use super::model::Model;
use super::offer::Offer;
use super::session::Link;
use crate::local_socket::connect_now;
use crate::peer_timeouts::{Budget, Operation};
use crate::sync::lock;

/// Maximum time to wait until a starting server listens at its socket.
const START_TIME: Duration = Duration::from_secs(2);
/// Pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(50);
/// A budget counts as spent when its remaining time is less than 1/`SPENT` of an operation's time limit.
const SPENT: u32 = 10;

/// Address of a device's server, and the requirements of the device.
#[derive(Clone)]
pub(super) struct Address {
    pub(super) id: String,
    path: PathBuf,
    pub(super) model: Model,
    times: Times,
    /// Budget: time for which all servers of the device together may block threads.
    budget: Arc<Mutex<Budget>>,
    /// True if the device is behind the virtio-iommu.
    translated: bool,
}

/// Connection to a server that has all capabilities that the device needs.
pub(super) struct Connected {
    pub(super) link: Link,
    /// Copy of the socket, to detect the end of the connection.
    pub(super) socket: UnixStream,
    pub(super) back_channel: Option<BackChannel>,
}

impl Address {
    /// Returns the address of the server of device `id`.
    pub(super) fn new(id: String, path: PathBuf, model: Model, times: Times, translated: bool) -> Self {
        Self { id, path, model, times, budget: times.budget(), translated }
    }

    /// True if the budget of the device's servers is nearly spent.
    pub(super) fn is_spent(&self) -> bool {
        lock(&self.budget).allows(Instant::now()) < self.times.other / SPENT
    }

    /// Connects to the server. Fails immediately if the server does not listen.
    pub(super) fn connect(&self) -> Result<Connected, ServerError> {
        let socket = connect_now(&self.path).map_err(|source| self.no_server(source))?;
        self.take(socket)
    }

    /// Connects to the server. Retries for [`START_TIME`] if the server does not listen yet.
    pub(super) fn connect_first(&self) -> Result<Connected, ServerError> {
        let start = Instant::now();
        loop {
            match connect_now(&self.path) {
                Ok(socket) => return self.take(socket),
                Err(error) if start.elapsed() < START_TIME && may_come(&error) => thread::sleep(PAUSE),
                Err(error) => return Err(self.no_server(error)),
            }
        }
    }

    fn no_server(&self, source: io::Error) -> ServerError {
        ServerError::NoServer { path: self.path.clone(), source }
    }

    fn take(&self, socket: UnixStream) -> Result<Connected, ServerError> {
        let host = |source| ServerError::Host { what: "set up the connection to the vhost-user server", source };
        let watched = socket.try_clone().map_err(host)?;
        let queues = self.model.queues.len();
        let mut connection = Connection::new(&self.id, socket, queues, self.times, self.budget.clone())?;
        // Two threads may wait for this negotiation: a thread that creates the device, and a thread that removes the device during a
        // reconnection. To bound this wait, the whole negotiation shares the time limit of one operation.
        let _operation = Operation::begin();
        let offer = Offer::agree(&mut connection, &self.model, self.translated)?;
        let mut back_channel = None;
        if offer.has(Protocol::BACKEND_REQ) {
            let (channel, theirs) = BackChannel::new().map_err(host)?;
            connection.set_back_channel(&theirs)?;
            back_channel = Some(channel);
        }
        Ok(Connected { link: Link { connection, offer }, socket: watched, back_channel })
    }
}

/// True if the error shows that the server may not have started yet.
fn may_come(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}
