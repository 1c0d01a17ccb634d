// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of vhost-user servers.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Error of a vhost-user server, or of a request to a vhost-user server.
#[derive(Debug, Error)]
pub enum ServerError {
    /// No server accepts a connection at the socket.
    #[error(
        "cannot connect to the vhost-user server: {source}; start the server first, and give carom access to the server's socket"
    )]
    NoServer {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the host kernel.
        source: io::Error,
    },
    /// The connection has ended: the server closed it, took too long to answer, or broke the protocol.
    #[error("the vhost-user server {0}; see the server's log")]
    Gone(String),
    /// The server refused a request.
    #[error("the vhost-user server refused the request {0}; see the server's log")]
    Refused(&'static str),
    /// The server lacks a capability that this device needs.
    #[error("the vhost-user server {0}")]
    Unfit(String),
    /// The host has no free thread or file descriptor, or the memory is not backed by a file.
    #[error("cannot {what}: {source}")]
    Host {
        /// Action that failed. The text continues "cannot …".
        what: &'static str,
        /// Error of the host kernel.
        source: io::Error,
    },
}

impl ServerError {
    /// Returns the error text without the subject "the vhost-user server".
    pub(super) fn reason(&self) -> String {
        let text = self.to_string();
        text.strip_prefix("the vhost-user server ").map_or(text.clone(), str::to_string)
    }
}
