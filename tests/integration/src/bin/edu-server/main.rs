// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vfio-user server whose device behaves like QEMU's edu (docs/specs/edu.rst), for tests of the client.
//!
//! The server logs the client's requests and the results of the device's DMA, one line each. The lines start with `map`,
//! `unmap`, `dma` or `reset`. The client passes file descriptors of memory. With each descriptor, the server tries what a
//! malicious server would try: to resize the memory, and to write to read-only memory.

mod device;
mod protocol;
mod session;

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use carom_integration::messages;
use clap::Parser;

use crate::session::{Session, Settings};

/// Serves an edu device by vfio-user, to one client after the other, until the server is killed.
#[derive(Debug, Parser)]
struct Options {
    /// Socket to listen on
    #[arg(long, value_name = "FILE")]
    socket: PathBuf,
    /// Log file; standard output by default
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Number of bits of the device's DMA addresses
    #[arg(long, value_name = "BITS", default_value_t = 64, value_parser = clap::value_parser!(u32).range(12..=64))]
    address_bits: u32,
    /// Close the connection in the middle of the Nth transfer
    #[arg(long, value_name = "N")]
    die_at: Option<u64>,
}

fn serve(options: &Options) -> Result<()> {
    let log = match &options.log {
        Some(path) => File::create(path).with_context(|| format!("--log: cannot create {}", path.display()))?,
        None => File::from(rustix::io::dup(rustix::stdio::stdout())?),
    };
    let settings = Settings { mask: u64::MAX >> (64 - options.address_bits), die_at: options.die_at };
    let new = |client| Ok(Session::new(client, log.try_clone()?, settings));
    messages::serve("edu-server", &options.socket, new, Session::serve)
}

fn main() -> ExitCode {
    let Err(error) = serve(&Options::parse()) else { return ExitCode::SUCCESS };
    eprintln!("edu-server: {error:#}");
    ExitCode::FAILURE
}
