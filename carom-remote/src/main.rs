// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The `carom-remote` program. Its exit status is 0 on success, 1 on failure, and 2 for an invalid command line.

mod add_verb;
mod cli;
mod client;
mod pages;
mod top;

use std::io::{self, Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use carom_api::body::Unknown;
use carom_api::cli::streams;
use carom_api::{VmConfig, VmSnapshotConfig};
use clap::Parser;
use clap::error::ErrorKind;
use serde_json::{Value, json};
use signal_hook::consts::SIGXFSZ;
use thiserror::Error;

use cli::{Cli, Verb};
use client::{CallError, Client};

/// Error of the program.
#[derive(Debug, Error)]
enum RemoteError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("--api-socket is needed: give the path of the VMM's socket, or set CAROM_API_SOCKET in the environment")]
    NoSocket,
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
    #[error("invalid configuration: {0}")]
    Config(String),
}

impl RemoteError {
    fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

/// Name of the program.
const NAME: &str = "carom-remote";
/// Exit status for an invalid command line.
const MISTAKE: u8 = 2;

fn main() -> ExitCode {
    // With a handler for SIGXFSZ, a write beyond RLIMIT_FSIZE fails with EFBIG. Without the handler, SIGXFSZ ends the program at such a
    // write.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => return streams::inform(NAME, &error.to_string()),
        // If the verb is missing, clap's error is the whole help text. Print the text without joining it into one line.
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            // If the text cannot be written, the exit status still reports the error.
            let _ = io::stderr().write_all(error.to_string().as_bytes());
            return ExitCode::from(MISTAKE);
        }
        Err(error) => {
            streams::complain(NAME, &carom_api::cli::one_line(&error, NAME));
            return ExitCode::from(MISTAKE);
        }
    };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader has closed the pipe because it needs no more output.
        Err(RemoteError::Io { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            streams::complain(NAME, &error.to_string());
            ExitCode::from(if matches!(error, RemoteError::NoSocket) { MISTAKE } else { 1 })
        }
    }
}

fn run(cli: Cli) -> Result<(), RemoteError> {
    let client = || {
        let socket = cli.api_socket.as_deref().ok_or(RemoteError::NoSocket)?;
        Client::new(socket).map_err(RemoteError::io("cannot start the client"))
    };
    let put = |name: &str, body: Option<Value>| -> Result<(), RemoteError> {
        show_json(&client()?.put(name, body.map(|body| body.to_string().into_bytes()))?)
    };
    match cli.verb {
        Verb::Ping => show_json(&client()?.get("vmm.ping")?),
        Verb::Info => show_json(&client()?.get("vm.info")?),
        Verb::Counters => show_json(&client()?.get("vm.counters")?),
        Verb::Openapi => show(&client()?.get("openapi.json")?),
        Verb::Metrics => show(&client()?.get("/metrics")?),
        Verb::Create { config } => {
            client()?.put("vm.create", Some(checked(read(&config)?)?))?;
            Ok(())
        }
        Verb::Boot => put("vm.boot", None),
        Verb::Delete => put("vm.delete", None),
        Verb::Pause => put("vm.pause", None),
        Verb::Resume => put("vm.resume", None),
        Verb::Snapshot { destination_url } => put("vm.snapshot", Some(json!(VmSnapshotConfig { destination_url }))),
        Verb::Restore { source } => put("vm.restore", Some(json!(source))),
        Verb::Reboot => put("vm.reboot", None),
        Verb::Shutdown => put("vm.shutdown", None),
        Verb::ShutdownVmm => put("vmm.shutdown", None),
        Verb::PowerButton => put("vm.power-button", None),
        Verb::Nmi => put("vm.nmi", None),
        Verb::Resize { cpus, memory, balloon } => {
            let size = json!({"desired_vcpus": cpus, "desired_ram": memory, "desired_balloon": balloon});
            put("vm.resize", Some(size))
        }
        Verb::ResizeDisk { disk, size } => put("vm.resize-disk", Some(json!({"id": disk, "desired_size": size}))),
        Verb::Add(add) => put(add.operation, Some(json!(add.device))),
        Verb::RemoveDevice { id } => put("vm.remove-device", Some(json!({"id": id}))),
        Verb::IommuBounce { budget: None, threshold: None, threshold_write: None, max_mapped: None } => {
            show_json(&client()?.get("vm.iommu-bounce")?)
        }
        Verb::IommuBounce { budget, threshold, threshold_write, max_mapped } => {
            let change = json!({
                "budget": budget,
                "threshold": threshold,
                "threshold_write": threshold_write,
                "max_mapped": max_mapped,
            });
            put("vm.iommu-bounce", Some(change))
        }
        Verb::Top { interval, once } => top::run(&client()?, interval, once),
        Verb::Completions { shell } => pages::completions(shell).and_then(|text| show(&text)),
        Verb::ManPages { directory } => pages::man_pages(&directory),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, RemoteError> {
    let mut bytes = Vec::new();
    if path == Path::new("-") {
        io::stdin().read_to_end(&mut bytes).map_err(RemoteError::io("cannot read standard input"))?;
    } else {
        bytes = std::fs::read(path).map_err(RemoteError::io(format!("cannot read {}", path.display())))?;
    }
    Ok(bytes)
}

/// Validates a configuration, and rejects unknown fields. The server would ignore unknown fields, because clients may be newer than the
/// server.
fn checked(config: Vec<u8>) -> Result<Vec<u8>, RemoteError> {
    let read = carom_api::body::parse_config::<VmConfig>(&config, Unknown::Refused);
    read.map(|_| config).map_err(RemoteError::Config)
}

fn show(text: &[u8]) -> Result<(), RemoteError> {
    streams::print(text).map_err(RemoteError::io("cannot write to standard output"))
}

/// Prints an answer as indented JSON. If the answer is not JSON, prints it unchanged. If the answer is empty, prints nothing.
fn show_json(answer: &[u8]) -> Result<(), RemoteError> {
    if answer.is_empty() {
        return Ok(());
    }
    match serde_json::from_slice::<Value>(answer) {
        Ok(value) => show(format!("{value:#}\n").as_bytes()),
        Err(_) => show(answer),
    }
}
