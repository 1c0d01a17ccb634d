// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vhost-user server of a network card, for tests of the front end: it moves packets between the queues and a tap interface of the
//! host. One thread does it all, and nothing in it waits for the front end.

mod iotlb;
mod memory;
mod protocol;
mod ring;
mod session;

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use rustix::fs::{OFlags, fcntl_setfl};

use crate::session::{Manner, Session};

/// Serves a network card by vhost-user, to one client after the other, until it is killed. Standard input is the tap interface, which has
/// headers of 10 bytes (IFF_VNET_HDR).
#[derive(Debug, Parser)]
struct Options {
    /// Socket to listen on
    #[arg(long, value_name = "FILE")]
    socket: PathBuf,
    /// Queues that it has; packets for the guest go to the first pair
    #[arg(long, value_name = "N", default_value_t = 2)]
    queues: u16,
    /// Translate addresses: what the front end tells of them
    #[arg(long)]
    iommu: bool,
    /// Ask for the translation of this address too, for reading, when the first queue starts
    #[arg(long, value_name = "ADDRESS", requires = "iommu")]
    probe: Option<u64>,
    /// Do not confirm that translations are forgotten
    #[arg(long, requires = "iommu")]
    never_confirm: bool,
}

fn serve(options: &Options) -> Result<()> {
    let tap = File::from(rustix::io::dup(rustix::stdio::stdin())?);
    fcntl_setfl(&tap, OFlags::RDWR | OFlags::NONBLOCK).context("having reads of the interface not wait")?;
    let listener =
        UnixListener::bind(&options.socket).with_context(|| format!("listening on {}", options.socket.display()))?;
    let manner = Manner { iommu: options.iommu, probe: options.probe, confirms: !options.never_confirm };
    loop {
        let (socket, _) = listener.accept().context("taking a connection")?;
        if let Err(error) = Session::new(socket, tap.try_clone()?, options.queues, manner).serve() {
            eprintln!("net-server: {error:#}");
        }
    }
}

fn main() -> ExitCode {
    let Err(error) = serve(&Options::parse()) else { return ExitCode::SUCCESS };
    eprintln!("net-server: {error:#}");
    ExitCode::FAILURE
}
