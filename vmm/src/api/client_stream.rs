// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connection of a client. The connection limits the time of each request, and receives the file descriptors that the client sends with a
//! request.
//!
//! Some clients of the API keep one connection for as long as the VM lives and never reconnect. So the API's socket has no limit on the
//! silence between two requests. The metrics address has such a limit, because any network client can connect to the metrics address. Both
//! listeners limit the time from the first byte of a request to its last byte.

use std::future::Future;
use std::io;
use std::mem;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, Sleep, sleep};

use super::descriptors::{self, MAX_DESCRIPTORS};

/// Maximum time to receive the head of a request. For the first request, this time starts when the client connects.
const HEAD_TIME: Duration = Duration::from_secs(30);

/// Connection that may carry descriptors.
pub(super) trait ClientSocket: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Reads bytes into `buf`, and the descriptors that were sent with the bytes into `descriptors`. The result is `false` if descriptors
    /// were lost. Returns `None` if this kind of socket carries no descriptors.
    fn poll_receive(
        &self,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Option<Poll<io::Result<bool>>> {
        let _ = (context, buf, descriptors);
        None
    }
}

impl ClientSocket for UnixStream {
    fn poll_receive(
        &self,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Option<Poll<io::Result<bool>>> {
        Some(descriptors::poll_receive(self, context, buf, descriptors))
    }
}

/// TCP carries no descriptors.
impl ClientSocket for TcpStream {}

/// Current activity of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No byte of the next request has arrived.
    Idle,
    /// The head of a request is arriving.
    Head,
    /// A request is being served. `respond` limits the time of the request's body.
    Serving,
}

/// State that a connection and its current request share.
struct Progress {
    phase: Phase,
    descriptors: Vec<OwnedFd>,
    /// True if descriptors were lost: the client sent more than [`MAX_DESCRIPTORS`], or the process reached its limit of open files.
    lost: bool,
}

/// State of a connection, shared by the connection and the code that answers its requests.
#[derive(Clone)]
pub(super) struct Requests(Arc<Mutex<Progress>>);

impl Requests {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the head of a request is complete.
    pub(super) fn begin(&self) {
        self.lock().phase = Phase::Serving;
    }

    /// Takes the descriptors that the client sent with the request. Must be called after the body is complete. Returns `None` if
    /// descriptors were lost.
    pub(super) fn take_descriptors(&self) -> Option<Vec<OwnedFd>> {
        let mut progress = self.lock();
        let descriptors = mem::take(&mut progress.descriptors);
        (!mem::take(&mut progress.lost)).then_some(descriptors)
    }

    /// Records that the request is answered. Closes descriptors that were not taken.
    pub(super) fn end(&self) {
        let mut progress = self.lock();
        progress.phase = Phase::Idle;
        progress.descriptors.clear();
        progress.lost = false;
    }
}

/// Connection of a client, with time limits.
pub(super) struct ClientStream<S> {
    socket: S,
    requests: Requests,
    /// Maximum silence between two requests. `None` means no limit.
    idle_time: Option<Duration>,
    /// Phase that `deadline` limits.
    limited: Phase,
    /// Deadline for the end of the head that is arriving, or for the first byte of the next request.
    deadline: Pin<Box<Sleep>>,
}

impl<S: ClientSocket> ClientStream<S> {
    /// Wraps `socket`, which has just connected. `idle_time` limits the silence between two requests. Must be called within a tokio
    /// runtime.
    pub(super) fn new(socket: S, idle_time: Option<Duration>) -> Self {
        let progress = Progress { phase: Phase::Head, descriptors: Vec::new(), lost: false };
        let requests = Requests(Arc::new(Mutex::new(progress)));
        Self { socket, requests, idle_time, limited: Phase::Head, deadline: Box::pin(sleep(HEAD_TIME)) }
    }

    /// Returns the connection's shared state, for the code that answers the requests.
    pub(super) fn requests(&self) -> Requests {
        self.requests.clone()
    }

    /// Makes `phase` the limited phase, which must end within `time` from now on.
    fn limit(&mut self, phase: Phase, time: Duration) {
        self.limited = phase;
        self.deadline.as_mut().reset(Instant::now() + time);
    }

    fn poll_socket(&mut self, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut came = Vec::new();
        let Some(received) = self.socket.poll_receive(context, buf, &mut came) else {
            return Pin::new(&mut self.socket).poll_read(context, buf);
        };
        let whole = ready!(received)?;
        let mut progress = self.requests.lock();
        let room = MAX_DESCRIPTORS - progress.descriptors.len();
        progress.lost |= !whole || came.len() > room;
        progress.descriptors.extend(came.into_iter().take(room));
        Poll::Ready(Ok(()))
    }
}

impl<S: ClientSocket> AsyncRead for ClientStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let outcome = self.poll_socket(context, buf);
        let phase = self.requests.lock().phase;
        match outcome {
            Poll::Ready(Ok(())) if phase == Phase::Idle && buf.filled().len() > before => {
                self.requests.lock().phase = Phase::Head;
                self.limit(Phase::Head, HEAD_TIME);
                outcome
            }
            Poll::Pending => {
                match (phase, self.idle_time) {
                    (Phase::Head, _) => {}
                    (Phase::Idle, Some(time)) if self.limited != Phase::Idle => self.limit(Phase::Idle, time),
                    (Phase::Idle, Some(_)) => {}
                    (Phase::Idle, None) | (Phase::Serving, _) => return outcome,
                }
                ready!(self.deadline.as_mut().poll(context));
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
            outcome => outcome,
        }
    }
}

impl<S: ClientSocket> AsyncWrite for ClientStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn run(test: impl Future<Output = ()>) {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_io().enable_time().start_paused(true).build();
        runtime.unwrap().block_on(test);
    }

    #[test]
    fn head_that_stops_half_way_ends_the_connection() {
        run(async {
            let (mut client, server) = UnixStream::pair().unwrap();
            let mut stream = ClientStream::new(server, None);
            let mut buf = [0; 64];
            client.write_all(b"GET").await.unwrap();
            assert_eq!(stream.read(&mut buf).await.unwrap(), 3);
            assert_eq!(stream.read(&mut buf).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        });
    }

    #[test]
    fn connection_of_a_silent_new_client_ends() {
        run(async {
            let (_client, server) = UnixStream::pair().unwrap();
            let mut stream = ClientStream::new(server, None);
            assert_eq!(stream.read(&mut [0; 64]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        });
    }

    #[test]
    fn silence_between_requests_ends_a_limited_connection() {
        run(async {
            let idle_time = 3 * HEAD_TIME;
            let (mut client, server) = UnixStream::pair().unwrap();
            let mut stream = ClientStream::new(server, Some(idle_time));
            let requests = stream.requests();
            let mut buf = [0; 64];
            for _ in 0..3 {
                client.write_all(b"GET").await.unwrap();
                stream.read_exact(&mut buf[..3]).await.unwrap();
                requests.begin();
                sleep(10 * idle_time).await;
                requests.end();
                // The request ended the earlier silence, so the time limit starts again.
                let silence = tokio::time::timeout(idle_time - HEAD_TIME, stream.read(&mut buf)).await;
                assert!(silence.is_err(), "{silence:?}");
            }
            let start = Instant::now();
            assert_eq!(stream.read(&mut buf).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
            assert!(start.elapsed() <= 2 * HEAD_TIME);
        });
    }

    #[test]
    fn silence_between_requests_has_no_limit() {
        run(async {
            let (mut client, server) = UnixStream::pair().unwrap();
            let mut stream = ClientStream::new(server, None);
            let requests = stream.requests();
            let mut buf = [0; 64];
            client.write_all(b"GET").await.unwrap();
            stream.read_exact(&mut buf[..3]).await.unwrap();
            requests.begin();
            requests.end();
            tokio::join!(async { assert_eq!(stream.read(&mut buf).await.unwrap(), 1) }, async {
                sleep(100 * HEAD_TIME).await;
                client.write_all(b"P").await.unwrap();
            });
            // The `P` starts the next head, and the rest of this head does not arrive in time.
            assert_eq!(stream.read(&mut buf).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        });
    }
}
