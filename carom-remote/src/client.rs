// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Client of the REST API.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tokio::time::timeout;

/// Maximum wait for an answer. This limit is long, because the VMM may pin a lot of memory while it boots a VM.
const ANSWER_TIME: Duration = Duration::from_secs(300);

/// Error of an API call. Its text is one line for the user.
#[derive(Debug, Error)]
pub(crate) enum CallError {
    /// The client cannot connect to the socket.
    #[error("--api-socket {}: {source}; check that carom runs with this --api-socket and that you may connect to the socket", path.display())]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// Error from the kernel.
        source: io::Error,
    },
    /// The VMM rejected the call.
    #[error("{message} (status {status})")]
    Refused {
        /// Messages of the VMM.
        message: String,
        /// HTTP status.
        status: u16,
    },
    /// The VMM did not answer, or the answer is not valid HTTP or JSON.
    #[error("{name}: {what}")]
    NoAnswer {
        /// Name of the operation.
        name: String,
        /// Reason.
        what: String,
    },
}

/// Client of one VMM.
pub(crate) struct Client {
    socket: PathBuf,
    runtime: Runtime,
}

impl Client {
    /// Creates a client of the VMM that serves `socket`.
    ///
    /// # Errors
    /// The process has no free file descriptor.
    pub(crate) fn new(socket: &Path) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        Ok(Self { socket: socket.to_path_buf(), runtime })
    }

    /// Sends a GET request, and returns the answer unchanged. `name` is the part of the path after `/api/v1/`, or the whole path if it
    /// starts with a slash.
    ///
    /// # Errors
    /// The call failed: see [`CallError`].
    pub(crate) fn get(&self, name: &str) -> Result<Bytes, CallError> {
        self.call(Method::GET, name, None)
    }

    /// Sends a GET request, and parses the answer.
    ///
    /// # Errors
    /// The call failed: see [`CallError`].
    pub(crate) fn get_as<T: DeserializeOwned>(&self, name: &str) -> Result<T, CallError> {
        serde_json::from_slice(&self.get(name)?)
            .map_err(|error| CallError::NoAnswer { name: name.into(), what: format!("unexpected answer: {error}") })
    }

    /// Sends a PUT request, with or without a body.
    ///
    /// # Errors
    /// The call failed: see [`CallError`].
    pub(crate) fn put(&self, name: &str, body: Option<Vec<u8>>) -> Result<Bytes, CallError> {
        self.call(Method::PUT, name, body)
    }

    fn call(&self, method: Method, name: &str, body: Option<Vec<u8>>) -> Result<Bytes, CallError> {
        let no_answer = |what: String| CallError::NoAnswer { name: name.into(), what };
        self.runtime.block_on(async {
            let stream = UnixStream::connect(&self.socket)
                .await
                .map_err(|source| CallError::Connect { path: self.socket.clone(), source })?;
            timeout(ANSWER_TIME, exchange(stream, method, name, body))
                .await
                .map_err(|_| no_answer(format!("no answer within {} s; see the log of carom", ANSWER_TIME.as_secs())))?
                .map_err(|error| no_answer(error.to_string()))
                .and_then(|(status, body)| match status {
                    200..300 => Ok(body),
                    status => Err(CallError::Refused { message: message(&body), status }),
                })
        })
    }
}

async fn exchange(
    stream: UnixStream,
    method: Method,
    name: &str,
    body: Option<Vec<u8>>,
) -> Result<(u16, Bytes), Box<dyn std::error::Error + Send + Sync>> {
    let path = if name.starts_with('/') { name.into() } else { format!("{}{name}", carom_api::operations::ROOT) };
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, "localhost")
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body.unwrap_or_default())))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let response = sender.send_request(request).await?;
    let status = response.status().as_u16();
    let body = response.into_body().collect().await?.to_bytes();
    // Close the connection before the program writes the answer to its output. The server limits the number of connections, and the reader
    // of the output may be slow.
    drop(sender);
    let _ = connection.await;
    Ok((status, body))
}

/// Joins the messages in the body of an error response into one line.
fn message(body: &[u8]) -> String {
    let messages: Vec<String> =
        serde_json::from_slice(body).unwrap_or_else(|_| vec![String::from_utf8_lossy(body).trim().into()]);
    messages.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_become_one_line() {
        assert_eq!(message(br#"["outer","inner"]"#), "outer: inner");
        assert_eq!(message(b"plain\n"), "plain");
    }

    #[test]
    fn failed_connection_names_the_socket_option() {
        let dir = tempfile::tempdir().unwrap();
        let error = Client::new(&dir.path().join("none")).unwrap().get("vmm.ping").unwrap_err();
        assert!(error.to_string().starts_with("--api-socket /"), "{error}");
    }
}
