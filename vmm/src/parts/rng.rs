// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-rng.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use carom_api::error::FileError;
use carom_api::kinds::Kind;
use carom_api::{PartConfig, RngConfig};
use devices::inherited;
use devices::pci::PciDevice;
use devices::virtio::VirtioPciDevice;
use devices::virtio::rng::{self, RngCounters, RngParams, VirtioRng};
use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl, open};

use super::reach::Reach;
use super::{Builder, Built, Part, Site, not_built_here};
use crate::error::VmError;
use crate::machine::Counter;

pub(super) const BUILDER: Builder = Builder { kind: &RngConfig::KIND, roles: &[rng::ROLE], build };

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
        named(self.device.counters())
    }
}

fn named(counters: RngCounters) -> Vec<Counter> {
    let RngCounters { requests, bytes, source_errors } = counters;
    vec![
        Counter { name: "requests", help: "Requests for random bytes that were served.", value: requests },
        Counter { name: "bytes", help: "Random bytes that the guest got.", value: bytes },
        Counter { name: "source_errors", help: "How often the source could not be read.", value: source_errors },
    ]
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::metrics;

    #[test]
    fn counters_are_in_the_documents_table_of_metrics() {
        let document = include_str!("../../../docs/api.md");
        for counter in named(RngCounters::default()) {
            let name = metrics::name_of(BUILDER.kind.name, counter.name);
            assert!(document.contains(&format!("`{name}{{device}}`")), "{name} is not in docs/api.md");
        }
    }
}
