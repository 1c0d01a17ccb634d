// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-rng.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use carom_api::error::FileError;
use carom_api::kinds::Kind;
use carom_api::{PartConfig, RngConfig};
use devices::counters::Counter;
use devices::inherited;
use devices::pci::PciDevice;
use devices::virtio::VirtioPciDevice;
use devices::virtio::rng::{self, RngCounters, RngParams, VirtioRng};
use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl, open};

use super::reach::Reach;
use super::{Builder, Built, Part, Site, not_built_here};
use crate::error::VmError;

pub(super) const BUILDER: Builder =
    Builder { kind: &RngConfig::KIND, roles: &[rng::ROLE], counters: || RngCounters::default().all(), build };

struct Rng {
    function: Arc<VirtioPciDevice>,
    device: Arc<VirtioRng>,
}

impl Part for Rng {
    fn kind(&self) -> &'static Kind {
        BUILDER.kind
    }

    fn function(&self) -> Arc<dyn PciDevice> {
        self.function.clone()
    }

    fn counters(&self) -> Vec<Counter> {
        self.device.counters().all()
    }
}

/// Opens the source and makes the device.
fn build(config: &PartConfig, mut site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::Rng(config) = config else { return Err(not_built_here(config)) };
    let source = open_source(&config.src).map_err(|source| FileError {
        field: RngConfig::SRC,
        path: config.src.display().to_string(),
        source,
    })?;
    let id = config.id.as_deref().unwrap_or(RngConfig::KIND.id);
    let Reach { memory, mapper } = Reach::new(id, config.iommu, &mut site);
    let context = &site.shared.context;
    let params = RngParams {
        id: id.into(),
        source,
        memory,
        msi: context.msi.clone(),
        doorbells: Some(context.doorbells.clone()),
        observer: Some(context.observer.clone()),
    };
    let (function, device) = rng::create(params)
        .map_err(|error| VmError::Device { what: "making the virtio-rng device", source: io::Error::other(error) })?;
    Ok(Built { part: Box::new(Rng { function, device }), mapper })
}

/// Opens a source such that neither opening nor reading waits. One that was inherited takes its place.
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
