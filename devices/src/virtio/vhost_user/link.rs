// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How a server is found and taken.

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
use crate::patience::{Budget, Operation};
use crate::sync::lock;

/// How long a server that is just being started may take until it listens.
const START_TIME: Duration = Duration::from_secs(2);
/// How long to wait between two tries.
const PAUSE: Duration = Duration::from_millis(50);
/// A budget is spent when it allows less than this part of the time for an operation.
const SPENT: u32 = 10;

/// Where the server of a device is, and what it is to be.
#[derive(Clone)]
pub(super) struct Address {
    pub(super) id: String,
    path: PathBuf,
    pub(super) model: Model,
    times: Times,
    /// How long its servers may hold others, one after the other.
    budget: Arc<Mutex<Budget>>,
    /// It is behind the virtio-iommu.
    translated: bool,
}

/// A connection to a server that has what the device needs.
pub(super) struct Connected {
    pub(super) link: Link,
    /// To learn of its end by.
    pub(super) socket: UnixStream,
    pub(super) back_channel: Option<BackChannel>,
}

impl Address {
    /// Where the server of device `id` is.
    pub(super) fn new(id: String, path: PathBuf, model: Model, times: Times, translated: bool) -> Self {
        Self { id, path, model, times, budget: times.budget(), translated }
    }

    /// Whether its servers have held others for nearly all the time that they may.
    pub(super) fn is_spent(&self) -> bool {
        lock(&self.budget).allows(Instant::now()) < self.times.other / SPENT
    }

    /// Connects to the server if it listens at this moment.
    pub(super) fn connect(&self) -> Result<Connected, ServerError> {
        let socket = connect_now(&self.path).map_err(|source| self.no_server(source))?;
        self.take(socket)
    }

    /// The same, with some time for it to start.
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
        let host = |source| ServerError::Host { what: "listening to a vhost-user server", source };
        let watched = socket.try_clone().map_err(host)?;
        let queues = self.model.queues.len();
        let mut connection = Connection::new(&self.id, socket, queues, self.times, self.budget.clone())?;
        // Whoever makes the device waits for this, and whoever removes it while a server is looked for.
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

/// Whether a server may just not be there yet.
fn may_come(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}
