// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-rng.

use std::fs::File;
use std::io;
use std::path::Path;

use carom_api::{PartConfig, RngConfig};
use devices::inherited;
use devices::virtio::rng::{self, RngCounters, RngParams};
use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl, open};

use super::emulated::{Counting, Wiring, failed};
use super::{Builder, Built, Site, not_built_here};
use crate::error::VmError;

pub(super) const BUILDER: Builder =
    Builder { kind: &RngConfig::KIND, roles: &[rng::ROLE], counters: || RngCounters::default().all(), build };

/// Opens the source and creates the device.
fn build(config: &PartConfig, mut site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::Rng(config) = config else { return Err(not_built_here(config)) };
    let source = open_source(&config.src).map_err(VmError::of_file(RngConfig::SRC, &config.src))?;
    site.emulate(config, |Wiring { id, memory, msi, doorbells, observer }| {
        let created = rng::create(RngParams { id, source, memory, msi, doorbells, observer });
        let (function, device) = created.map_err(failed("create the virtio-rng device"))?;
        Ok((function, Counting(move || device.counters().all())))
    })
}

/// Opens a source of random bytes. Neither this function nor a read of the opened file waits. If `path` names an inherited descriptor,
/// returns a duplicate of the descriptor.
fn open_source(path: &Path) -> io::Result<File> {
    if let Some(inherited) = inherited::random_source(path) {
        let source = inherited?;
        fcntl_setfl(&source, fcntl_getfl(&source)? | OFlags::NONBLOCK)?;
        return Ok(source);
    }
    let file =
        File::from(open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?);
    if file.metadata()?.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    Ok(file)
}
