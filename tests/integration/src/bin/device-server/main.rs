// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vhost-user server of a network card or a disk, for tests of the front end. A card connects the queues to a tap interface of the
//! host, and a disk connects the queues to a file. One thread does all work, and never waits for an answer of the front end.

mod card;
mod device;
mod disk;
mod iotlb;
mod memory;
mod protocol;
mod ring;
mod session;

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use carom_integration::messages;
use clap::Parser;
use rustix::fs::{OFlags, fcntl_setfl};

use crate::card::Card;
use crate::device::Device;
use crate::session::{Manner, Session};

/// Serves a network card by vhost-user, to one client after the other, until the server is killed. Standard input is the tap
/// interface, whose packets have headers of 10 bytes (IFF_VNET_HDR). With --disk, the server offers a disk instead.
#[derive(Debug, Parser)]
struct Options {
    /// Socket to listen on
    #[arg(long, value_name = "FILE")]
    socket: PathBuf,
    /// Image of the disk to serve
    #[arg(long, value_name = "FILE")]
    disk: Option<PathBuf>,
    /// Number of queues; a card sends packets to the guest through the first pair of queues only
    #[arg(long, value_name = "N", default_value_t = 2)]
    queues: u16,
    /// Translate all addresses by the front end's IOTLB messages
    #[arg(long)]
    iommu: bool,
    /// When the first queue starts, also request a translation of this address for reading
    #[arg(long, value_name = "ADDRESS", requires = "iommu")]
    probe: Option<u64>,
    /// Do not confirm that translations were removed
    #[arg(long, requires = "iommu")]
    never_confirm: bool,
}

fn device(options: &Options) -> Result<Device> {
    if let Some(path) = &options.disk {
        let image = File::options().read(true).write(true).open(path);
        return image.map(Device::Disk).with_context(|| format!("--disk: cannot open {}", path.display()));
    }
    let tap = File::from(rustix::io::dup(rustix::stdio::stdin())?);
    fcntl_setfl(&tap, OFlags::RDWR | OFlags::NONBLOCK)
        .context("cannot make the tap interface on standard input non-blocking")?;
    Ok(Device::Card(Card::new(tap)))
}

fn serve(options: &Options) -> Result<()> {
    let manner = Manner { iommu: options.iommu, probe: options.probe, confirms: !options.never_confirm };
    let new = |client| Ok(Session::new(client, device(options)?, options.queues, manner));
    messages::serve("device-server", &options.socket, new, Session::serve)
}

fn main() -> ExitCode {
    let Err(error) = serve(&Options::parse()) else { return ExitCode::SUCCESS };
    eprintln!("device-server: {error:#}");
    ExitCode::FAILURE
}
