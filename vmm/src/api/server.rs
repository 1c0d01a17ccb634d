// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The HTTP server: one thread for all clients.
//!
//! A client may send slowly, may send nothing, or may never read its answers. Such a client blocks only its own connection, and only for a
//! limited time. The control thread executes calls. The server itself answers `vm.info` if it can do so without waiting. If a client
//! disconnects, its call is still executed.

use std::convert::Infallible;
use std::io;
use std::net::TcpListener as StdTcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use devices::listening_socket::ListeningSocket;
use devices::sandbox;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::timeout;
use tokio_io_timeout::TimeoutStream;

use super::client_stream::{ClientSocket, ClientStream};
use super::listener::ApiListener;
use super::respond::respond;
use super::shared::SharedApi;
use crate::process::thread_roles::API;
use crate::process::time_slice::ShortSlice;

/// Maximum time that the server waits for a client that reads no part of its answer.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// Maximum time to send the last answers when the VMM ends.
const LAST_ANSWERS: Duration = Duration::from_millis(500);
/// Delay before the next attempt if the server cannot accept a connection, for example because the process has no free descriptor.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// Response to a client beyond the maximum number of clients.
const BUSY: &[u8] = b"HTTP/1.1 429 \r\nContent-Type: application/json\r\nContent-Length: 51\r\n\
    Connection: close\r\n\r\n[\"too many clients are connected: try again later\"]";

/// Running server. Dropping it sends the last answers, ends the server and removes the socket.
pub struct ApiServer {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    // Dropped after the thread has ended, so that the socket's file is removed only when the server no longer serves the socket.
    _socket: Option<ListeningSocket>,
}

impl ApiServer {
    /// Starts the server, which serves all operations on `socket` and only metrics on `metrics`.
    ///
    /// # Errors
    /// A listener cannot be used, or the process has reached its limit of descriptors or threads.
    pub fn start(
        socket: Option<ListeningSocket>,
        metrics: Option<StdTcpListener>,
        shared: SharedApi,
    ) -> io::Result<Self> {
        let api = socket.as_ref().map(|socket| socket.listener().try_clone()).transpose()?;
        api.as_ref().map_or(Ok(()), |listener| listener.set_nonblocking(true))?;
        metrics.as_ref().map_or(Ok(()), |listener| listener.set_nonblocking(true))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        // The listeners are registered with the runtime before the thread starts, so that `start` can return the errors.
        let entered = runtime.enter();
        let api = api.map(UnixListener::from_std).transpose()?;
        let metrics = metrics.map(TcpListener::from_std).transpose()?;
        drop(entered);
        let (stop, stopped) = oneshot::channel();
        let thread = sandbox::start(API, "api".into(), move || {
            sandbox::give_up_files();
            // The thread keeps its short time slice until the thread ends.
            let _ = ShortSlice::take();
            runtime.block_on(serve(api, metrics, Arc::new(shared), stopped));
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread), _socket: socket })
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the API's thread panicked");
        }
    }
}

/// Source of connections.
trait Listener {
    /// Connection of a client.
    type Stream: ClientSocket;
    /// Waits for the next client, and returns its connection.
    async fn next(&self) -> io::Result<Self::Stream>;
    /// Sends as many bytes as fit into the connection's buffer, without waiting.
    fn send_now(stream: &Self::Stream, bytes: &[u8]) -> io::Result<usize>;
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn next(&self) -> io::Result<UnixStream> {
        self.accept().await.map(|(stream, _)| stream)
    }

    fn send_now(stream: &UnixStream, bytes: &[u8]) -> io::Result<usize> {
        stream.try_write(bytes)
    }
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<TcpStream> {
        self.accept().await.map(|(stream, _)| stream)
    }

    fn send_now(stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
        stream.try_write(bytes)
    }
}

async fn serve(
    api: Option<UnixListener>,
    metrics: Option<TcpListener>,
    shared: Arc<SharedApi>,
    stopped: oneshot::Receiver<()>,
) {
    let (stop, stopping) = watch::channel(false);
    let clients = |kind: ApiListener| Arc::new(Semaphore::new(kind.places()));
    let (api_clients, metrics_clients) = (clients(ApiListener::Api), clients(ApiListener::Metrics));
    tokio::select! {
        () = accept(api, ApiListener::Api, &api_clients, &shared, &stopping) => {}
        () = accept(metrics, ApiListener::Metrics, &metrics_clients, &shared, &stopping) => {}
        // `ApiServer` holds the sender of `stopped`, so dropping the `ApiServer` ends the server.
        _ = stopped => {}
    }
    let _ = stop.send(true);
    let all = |kind: ApiListener| u32::try_from(kind.places()).expect("a small constant");
    let _ = timeout(LAST_ANSWERS, async {
        let _ = tokio::join!(
            api_clients.acquire_many(all(ApiListener::Api)),
            metrics_clients.acquire_many(all(ApiListener::Metrics)),
        );
    })
    .await;
}

/// Accepts clients for ever.
async fn accept<L: Listener>(
    listener: Option<L>,
    kind: ApiListener,
    clients: &Arc<Semaphore>,
    shared: &Arc<SharedApi>,
    stopping: &watch::Receiver<bool>,
) {
    let Some(listener) = listener else { return std::future::pending().await };
    loop {
        match listener.next().await {
            Ok(stream) => match clients.clone().try_acquire_owned() {
                Ok(place) => {
                    let connection = connection(stream, kind, shared.clone(), stopping.clone());
                    tokio::spawn(async move {
                        connection.await;
                        drop(place);
                    });
                }
                // If the connection's buffer has no room for this response, the client only sees that the connection is closed.
                Err(_) => drop(L::send_now(&stream, BUSY)),
            },
            Err(error) => {
                log::warn!(
                    "{}: cannot accept a client: {error}; if the process has too many open files, raise the limit (ulimit -n)",
                    kind.option()
                );
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

async fn connection<S: ClientSocket>(
    stream: S,
    kind: ApiListener,
    shared: Arc<SharedApi>,
    mut stopping: watch::Receiver<bool>,
) {
    let stream = ClientStream::new(stream, kind.idle_time());
    let requests = stream.requests();
    let service = service_fn(|request| {
        let (shared, requests) = (shared.clone(), requests.clone());
        async move {
            requests.begin();
            let response = respond(kind, &shared, request, &requests).await;
            requests.end();
            Ok::<_, Infallible>(response)
        }
    });
    let mut stream = TimeoutStream::new(stream);
    // Reads need no timeout here, because heads and bodies have their own time limits.
    stream.set_write_timeout(Some(ANSWER_TIME));
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        // A client that has closed its sending side still gets the answer, because the request was executed.
        .half_close(true)
        // Header names are spelled as in Cloud Hypervisor, because Cloud Hypervisor's clients compare the names case-sensitively.
        .title_case_headers(true)
        // [`ClientStream`] limits the time for a head. hyper's own limit would also end idle connections.
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(Box::pin(stream)), service);
    tokio::pin!(connection);
    let result = tokio::select! {
        result = &mut connection => result,
        _ = stopping.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        log::debug!("API: the connection of a client failed: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use carom_api::cli::Program;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::{advance, pause};

    use super::*;
    use crate::control::ControlHandle;

    /// Maximum time of a step. A test that hangs fails after this time.
    const LONG: Duration = Duration::from_secs(120);

    /// Returns the first 12 characters of an answer, which end with the status code.
    async fn status(client: &mut TcpStream) -> io::Result<String> {
        let mut answer = vec![0; 1024];
        let len = client.read(&mut answer).await?;
        Ok(String::from_utf8_lossy(&answer[..len]).chars().take(12).collect())
    }

    /// Sends one request on a connection that stays open. Returns the start of the answer.
    async fn ask(client: &mut TcpStream) -> io::Result<String> {
        client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await?;
        status(client).await
    }

    #[test]
    fn silent_metrics_clients_do_not_lock_out_others() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().unwrap();
        runtime.block_on(async {
            pause();
            // The clock is paused, and only the test advances it. Without a blocking task, tokio would advance the paused clock by itself.
            let (over, wait) = mpsc::channel::<()>();
            let blocker = tokio::task::spawn_blocking(move || wait.recv().is_ok());
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let shared = Arc::new(SharedApi::new(ControlHandle::unanswered(), Program::Carom));
            let (stop, stopped) = oneshot::channel();
            let server = tokio::spawn(serve(None, Some(listener), shared, stopped));
            let mut silent = Vec::new();
            for _ in 0..ApiListener::Metrics.places() {
                let mut client = TcpStream::connect(address).await.unwrap();
                assert_eq!(ask(&mut client).await.unwrap(), "HTTP/1.1 404");
                silent.push(client);
            }
            let mut other = TcpStream::connect(address).await.unwrap();
            assert_eq!(status(&mut other).await.unwrap(), "HTTP/1.1 429");
            advance(2 * ApiListener::Metrics.idle_time().unwrap()).await;
            // The server accepts a further client only after its task for a silent client has ended.
            let began = std::time::Instant::now();
            loop {
                let mut client = TcpStream::connect(address).await.unwrap();
                if ask(&mut client).await.unwrap_or_default() == "HTTP/1.1 404" {
                    break;
                }
                assert!(began.elapsed() < LONG, "no place becomes free");
            }
            drop(stop);
            drop((over, silent));
            assert!(!blocker.await.unwrap(), "the blocking task ends when its channel closes");
            server.await.unwrap();
        });
    }
}
