// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Turns a request into a call to the control thread, and the call's outcome into an HTTP response.

use std::os::fd::OwnedFd;
use std::time::Duration;

use carom_api::cli::Program;
use carom_api::operations::{self, Action, BodyError, METRICS_TYPE, Operation};
use carom_api::types::VmmPing;
use carom_api::{Call, Explain, PartConfig, Terms, document, one_line};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, HeaderValue};
use hyper::{Request, Response, StatusCode};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::client_stream::Requests;
use super::descriptors::MAX_DESCRIPTORS;
use super::listener::ApiListener;
use super::metrics;
use super::page::Page;
use super::shared::SharedApi;
use crate::control::{ControlError, ControlHandle, Reply};
use crate::error::VmError;

/// Maximum length of a body in bytes.
const MAX_BODY: usize = 1 << 20;
/// Media type of all answers except metrics.
const JSON: &str = "application/json";
/// Maximum time for a client to send a body.
const BODY_TIME: Duration = Duration::from_secs(10);

/// Answers `request`, which arrived at a listener of this `kind`. `requests` is the shared state of the request's connection, which holds
/// the descriptors of the request.
pub(super) async fn respond(
    kind: ApiListener,
    shared: &SharedApi,
    request: Request<Incoming>,
    requests: &Requests,
) -> Response<Full<Bytes>> {
    let path = request.uri().path().to_string();
    let mut verbs = Vec::new();
    for operation in operations::at(&path).filter(|operation| kind.has(operation)) {
        if request.method().as_str() == operation.verb.name() {
            let response = perform(shared, operation, request, requests).await;
            log::debug!("API: {} {path}: {}", operation.verb.name(), response.status());
            return response;
        }
        verbs.push(operation.verb.name());
    }
    log::debug!("API: {} {path}: no such operation", request.method());
    // Read the body although no operation uses it. If the connection were closed while the client is still sending, the client might lose
    // the answer.
    let _ = read_body(request.into_body()).await;
    if verbs.is_empty() {
        return refusal(StatusCode::NOT_FOUND, &format!("no operation exists at {path}{}", kind.hint())).into();
    }
    let allowed = verbs.join(", ");
    let mut response =
        Response::from(refusal(StatusCode::METHOD_NOT_ALLOWED, &format!("{path} supports only {allowed}")));
    if let Ok(allowed) = HeaderValue::from_str(&allowed) {
        response.headers_mut().insert(ALLOW, allowed);
    }
    response
}

async fn perform(
    shared: &SharedApi,
    operation: &'static Operation,
    request: Request<Incoming>,
    requests: &Requests,
) -> Response<Full<Bytes>> {
    let body = match read_body(request.into_body()).await {
        Ok(body) => body,
        Err(page) => return page.into(),
    };
    // The descriptors are taken only now, because the client may send descriptors with any part of the request.
    let Some(descriptors) = requests.take_descriptors() else {
        let message = format!(
            "some descriptors of the request were lost: send at most {MAX_DESCRIPTORS} descriptors with a request, or raise the limit of open files of carom (ulimit -n)"
        );
        return refusal(StatusCode::BAD_REQUEST, &message).into();
    };
    let call = match &operation.action {
        Action::Ping => return json(&ping(shared.program)).into(),
        Action::Document => return Page::new(StatusCode::OK, JSON, document::SERVED).into(),
        Action::Read(call) => return read(shared, operation.name, *call).await,
        Action::Plain(_) if !body.is_empty() => {
            Err(format!("a request for {} must have no body", operation.name).into())
        }
        Action::Plain(call) => Ok(call()),
        action @ (Action::WithBody(_) | Action::AddDevice(_)) => action.read(&body),
    };
    let call = call.and_then(|mut call| {
        hand_over(operation.name, &mut call, descriptors)?;
        Ok(call)
    });
    match call {
        Ok(call) => answer(ask(&shared.control, call).await).into(),
        Err(BodyError { message, conflict: true }) => refusal(StatusCode::CONFLICT, &message).into(),
        Err(BodyError { message, conflict: false }) => refusal(StatusCode::BAD_REQUEST, &message).into(),
    }
}

/// Gives a call the descriptors that the client sent with the request. Closes the descriptors if the call uses none.
fn hand_over(operation: &str, call: &mut Call, descriptors: Vec<OwnedFd>) -> Result<(), BodyError> {
    if descriptors.is_empty() {
        return Ok(());
    }
    if let Call::AddDevice(PartConfig::Net(net)) = call {
        return net.take_files(descriptors).map_err(BodyError::from);
    }
    if let Call::Restore(source) = call {
        return source.take_files(descriptors).map_err(BodyError::from);
    }
    log::debug!(
        "API: {operation} uses no descriptors, so {} descriptors of the request were closed",
        descriptors.len()
    );
    Ok(())
}

/// Answers `call`, which only reads the VM's state. Clients that ask at the same time share one answer.
async fn read(shared: &SharedApi, name: &'static str, call: fn() -> Call) -> Response<Full<Bytes>> {
    let control = shared.control.clone();
    let ask = move || {
        let control = control.clone();
        async move { answer(ask(&control, call()).await) }
    };
    shared.readings.read(name, ask).await.unwrap_or_else(|| answer(Err(ControlError::Ending))).into()
}

async fn read_body(body: Incoming) -> Result<Bytes, Page> {
    match timeout(BODY_TIME, Limited::new(body, MAX_BODY).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) => Err(refusal(
            StatusCode::BAD_REQUEST,
            &format!("cannot read the request's body: {error}; the maximum length is {MAX_BODY} bytes"),
        )),
        Err(_) => Err(refusal(
            StatusCode::BAD_REQUEST,
            "the body of the request did not arrive in time: send the whole body at once",
        )),
    }
}

/// Returns the control thread's answer to `call`. If `call` is `vm.info`, this thread reads the answer itself when it can do so without
/// waiting.
async fn ask(control: &ControlHandle, call: Call) -> Result<Reply, ControlError> {
    // A direct read saves two thread switches. Each switch may have to wait for a CPU while a guest runs.
    if matches!(call, Call::Info)
        && let Some(outcome) = control.info_soon()
    {
        return outcome;
    }
    let (sender, answer) = oneshot::channel();
    // The send fails if the client has disconnected.
    control.call(call, Box::new(move |outcome| drop(sender.send(outcome))));
    answer.await.unwrap_or(Err(ControlError::Ending))
}

fn answer(outcome: Result<Reply, ControlError>) -> Page {
    match outcome {
        Ok(Reply::Done) => Page { status: StatusCode::NO_CONTENT, media_type: None, body: Bytes::new() },
        Ok(Reply::Info(info)) => json(&info),
        Ok(Reply::Added(device)) => json(&device),
        Ok(Reply::Counters(counters)) => json(&counters),
        Ok(Reply::Bounce(bounce)) => json(&bounce),
        Ok(Reply::Figures(figures)) => match metrics::render(&figures) {
            Ok(text) => Page::new(StatusCode::OK, METRICS_TYPE, text),
            Err(error) => refusal(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        },
        Err(error) => refusal(status(&error), &one_line(&error.explain(Terms::Json))),
    }
}

/// Returns the status code of an error. The codes are the same as in Cloud Hypervisor (`api_error_status_code`), so a call that the VM's
/// state does not allow is an internal error (500).
fn status(error: &ControlError) -> StatusCode {
    match error {
        ControlError::NotCreated | ControlError::NoSuchPart(_) => StatusCode::NOT_FOUND,
        ControlError::Config(error) | ControlError::Vm(VmError::Config(error)) if error.is_conflict() => {
            StatusCode::CONFLICT
        }
        ControlError::Config(_) => StatusCode::BAD_REQUEST,
        // As in Cloud Hypervisor, this status code asks the client to try again.
        ControlError::Vm(VmError::VcpuLeaving(_)) | ControlError::TooManyCalls => StatusCode::TOO_MANY_REQUESTS,
        ControlError::Vm(error) if error.is_user_error() => StatusCode::BAD_REQUEST,
        ControlError::AlreadyCreated | ControlError::WrongState { .. } | ControlError::Vm(_) | ControlError::Ending => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    }
}

fn ping(program: Program) -> VmmPing {
    VmmPing {
        build_version: program.build_version().into(),
        version: program.version().into(),
        pid: std::process::id(),
        features: vec!["kvm".into(), "iommu-bounce".into()],
    }
}

fn json<T: serde::Serialize>(value: &T) -> Page {
    match serde_json::to_vec(value) {
        Ok(body) => Page::new(StatusCode::OK, JSON, body),
        Err(error) => refusal(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

/// Returns an error response in Cloud Hypervisor's form: a list of messages, with the root cause last.
fn refusal(status: StatusCode, message: &str) -> Page {
    Page::new(status, JSON, serde_json::json!([message]).to_string())
}
