// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The HTTP server: one thread, however many clients.
//!
//! A client that sends slowly or not at all holds nothing but its own connection, and that only for a while. Calls go to
//! the control thread; a client that goes away meanwhile does not undo its call.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::timeout;

use super::operations::{self, Action, Operation, Verb};
use super::types::VmmPing;
use super::{ApiSocket, document, metrics};
use crate::control::{Call, ControlError, ControlHandle, Reply};

/// Most clients that are connected at once; who comes then is told to try again. Each takes a descriptor.
const MAX_CLIENTS: usize = 256;
/// Longest body in bytes.
const MAX_BODY: usize = 1 << 20;
/// How long a client may take to send the head of a request, and be silent between two.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// How long a client may take to send a body.
const BODY_TIME: Duration = Duration::from_secs(10);
/// How long the last answers may take to be sent when the VMM ends.
const LAST_ANSWERS: Duration = Duration::from_millis(500);
/// How long to wait when no connection can be accepted, for want of descriptors.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// What one client too many gets.
const BUSY: &[u8] = b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nContent-Length: 34\r\n\
    Connection: close\r\n\r\n[\"too many clients are connected\"]";

/// What all connections share.
pub struct Shared {
    /// The way to the control thread.
    pub control: ControlHandle,
}

/// The running server. Dropping it sends the last answers and ends it, and removes the socket.
pub struct ApiServer {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    // Behind the thread: the socket's file goes when nobody serves it any more.
    _socket: ApiSocket,
}

impl ApiServer {
    /// Starts serving `socket`.
    pub fn start(socket: ApiSocket, shared: Shared) -> io::Result<Self> {
        let listener = socket.listener().try_clone()?;
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new().name("api".into()).spawn(move || {
            runtime.block_on(async {
                match UnixListener::from_std(listener) {
                    Ok(listener) => serve(listener, Arc::new(shared), stopped).await,
                    Err(error) => log::error!("the API socket cannot be served: {error}"),
                }
            });
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

async fn serve(listener: UnixListener, shared: Arc<Shared>, stopped: oneshot::Receiver<()>) {
    let (stop, stopping) = watch::channel(false);
    let clients = Arc::new(Semaphore::new(MAX_CLIENTS));
    let accept = async {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => match clients.clone().try_acquire_owned() {
                    Ok(place) => {
                        let connection = connection(stream, shared.clone(), stopping.clone());
                        tokio::spawn(async move {
                            connection.await;
                            drop(place);
                        });
                    }
                    // It may not take even this much; then it sees its connection end.
                    Err(_) => drop(stream.try_write(BUSY)),
                },
                Err(error) => {
                    log::warn!("accepting an API client: {error}");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                }
            }
        }
    };
    tokio::select! {
        () = accept => {}
        // The sender is dropped when the server is to end.
        _ = stopped => {}
    }
    let _ = stop.send(true);
    let all = u32::try_from(MAX_CLIENTS).expect("a small constant");
    let _ = timeout(LAST_ANSWERS, clients.acquire_many(all)).await;
}

async fn connection(stream: UnixStream, shared: Arc<Shared>, mut stopping: watch::Receiver<bool>) {
    let service = service_fn(|request| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(respond(&shared, request).await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let result = tokio::select! {
        result = &mut connection => result,
        _ = stopping.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        log::debug!("API client: {error}");
    }
}

async fn respond(shared: &Shared, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let path = request.uri().path().to_string();
    let mut verbs = Vec::new();
    for operation in operations::at(&path) {
        if request.method().as_str() == operation.verb.name() {
            let response = perform(shared, operation, request).await;
            log::debug!("API: {} {path}: {}", operation.verb.name(), response.status());
            return response;
        }
        verbs.push(operation.verb.name());
    }
    log::debug!("API: {} {path}: no such operation", request.method());
    // Read even so: a client that still sends when the connection is closed may lose the answer.
    let _ = read_body(request.into_body()).await;
    if verbs.is_empty() {
        return refusal(StatusCode::NOT_FOUND, &format!("there is nothing at {path}"));
    }
    let allowed = verbs.join(", ");
    let mut response = refusal(StatusCode::METHOD_NOT_ALLOWED, &format!("{path} takes {allowed} only"));
    if let Ok(allowed) = HeaderValue::from_str(&allowed) {
        response.headers_mut().insert(ALLOW, allowed);
    }
    response
}

async fn perform(shared: &Shared, operation: &Operation, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let body = match read_body(request.into_body()).await {
        Ok(body) => body,
        Err(response) => return response,
    };
    let call = match &operation.action {
        Action::Ping => return json(&ping()),
        Action::Document => return with_type(StatusCode::OK, "application/json", document::SERVED.into()),
        Action::Plain(_) if operation.verb == Verb::Put && !body.is_empty() => {
            Err(format!("{} takes no body", operation.name))
        }
        Action::Plain(call) => Ok(call()),
        Action::WithBody(call) => call(&body),
    };
    match call {
        Ok(call) => answer(ask(&shared.control, call).await),
        Err(error) => refusal(StatusCode::BAD_REQUEST, &error),
    }
}

async fn read_body(body: Incoming) -> Result<Bytes, Response<Full<Bytes>>> {
    match timeout(BODY_TIME, Limited::new(body, MAX_BODY).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) => Err(refusal(StatusCode::BAD_REQUEST, &format!("reading the body: {error}"))),
        Err(_) => Err(refusal(StatusCode::BAD_REQUEST, "the body took too long")),
    }
}

/// Hands a call to the control thread and waits for its answer.
async fn ask(control: &ControlHandle, call: Call) -> Result<Reply, ControlError> {
    let (sender, answer) = oneshot::channel();
    // A client that went away does not want it.
    control.call(call, Box::new(move |outcome| drop(sender.send(outcome))));
    answer.await.unwrap_or(Err(ControlError::Ending))
}

fn answer(outcome: Result<Reply, ControlError>) -> Response<Full<Bytes>> {
    match outcome {
        Ok(Reply::Done) => {
            let mut response = Response::new(Full::default());
            *response.status_mut() = StatusCode::NO_CONTENT;
            response
        }
        Ok(Reply::Info(info)) => json(&info),
        Ok(Reply::Counters(counters)) => json(&counters),
        Ok(Reply::Bounce(bounce)) => json(&bounce),
        Ok(Reply::Snapshot(snapshot)) => match metrics::render(&snapshot) {
            Ok(text) => with_type(StatusCode::OK, metrics::CONTENT_TYPE, text.into()),
            Err(error) => refusal(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        },
        Err(error) => {
            let message = match &error {
                ControlError::Config(error) => error.in_json(),
                error => error.to_string(),
            };
            refusal(status(&error), &message)
        }
    }
}

fn status(error: &ControlError) -> StatusCode {
    match error {
        ControlError::NotCreated | ControlError::NoSuchPart(_) => StatusCode::NOT_FOUND,
        ControlError::AlreadyCreated | ControlError::WrongState { .. } => StatusCode::METHOD_NOT_ALLOWED,
        ControlError::Config(_) => StatusCode::BAD_REQUEST,
        ControlError::Vm(error) if error.is_user_error() => StatusCode::BAD_REQUEST,
        ControlError::Vm(_) | ControlError::Ending => StatusCode::INTERNAL_SERVER_ERROR,
        ControlError::TooManyCalls => StatusCode::TOO_MANY_REQUESTS,
    }
}

fn ping() -> VmmPing {
    let version = env!("CARGO_PKG_VERSION");
    VmmPing {
        build_version: format!("carom {version}"),
        version: version.into(),
        pid: std::process::id(),
        features: vec!["kvm".into(), "iommu-bounce".into()],
    }
}

fn with_type(status: StatusCode, media_type: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    response
}

fn with_json(status: StatusCode, body: Vec<u8>) -> Response<Full<Bytes>> {
    with_type(status, "application/json", body.into())
}

fn json<T: serde::Serialize>(value: &T) -> Response<Full<Bytes>> {
    match serde_json::to_vec(value) {
        Ok(body) => with_json(StatusCode::OK, body),
        Err(error) => refusal(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

/// A refusal in Cloud Hypervisor's form: a list of messages, the last the cause of all.
fn refusal(status: StatusCode, message: &str) -> Response<Full<Bytes>> {
    with_json(status, serde_json::json!([message]).to_string().into_bytes())
}
