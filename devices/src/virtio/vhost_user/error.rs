// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why a server cannot be used.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a server does not do what it is asked for.
#[derive(Debug, Error)]
pub enum ServerError {
    /// Nobody can be reached at the socket.
    #[error("no vhost-user server: {source}")]
    NoServer {
        /// The socket.
        path: PathBuf,
        /// What the host said.
        source: io::Error,
    },
    /// The server is gone: it closed the connection, was silent for too long, or broke the protocol.
    #[error("the vhost-user server {0}")]
    Gone(String),
    /// The server says no.
    #[error("the vhost-user server refuses {0}")]
    Refused(&'static str),
    /// The server cannot do what this device needs.
    #[error("the vhost-user server {0}")]
    Unfit(String),
    /// The host gives no thread or no descriptor.
    #[error("{what}: {source}")]
    Host {
        /// What was being done.
        what: &'static str,
        /// What the host said.
        source: io::Error,
    },
}

impl ServerError {
    /// The same as what became of the server, to stand behind its name.
    pub(super) fn reason(&self) -> String {
        let text = self.to_string();
        text.strip_prefix("the vhost-user server ").map_or(text.clone(), str::to_string)
    }
}
