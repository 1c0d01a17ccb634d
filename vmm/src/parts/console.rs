// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-console.

use std::io;
use std::path::Path;
use std::sync::Arc;

use carom_api::kinds::Kind;
use carom_api::{ConsoleConfig, PartConfig};
use devices::counters::Counter;
use devices::pci::PciDevice;
use devices::virtio::VirtioPciDevice;
use devices::virtio::console::{self, ConsoleCounters, ConsoleParams, VirtioConsole};
use log::error;

use super::reach::Reach;
use super::{Builder, Built, Part, Site, not_built_here};
use crate::console::{ConsoleLinks, Names, Receiver};
use crate::error::VmError;

pub(super) const BUILDER: Builder = Builder {
    kind: &ConsoleConfig::KIND,
    roles: &[console::ROLE],
    counters: || [ConsoleCounters::default().all(), ConsoleLinks::default().counters().to_vec()].concat(),
    build,
};

const NAMES: Names = Names { shown: "console", thread: "console-line" };

struct Console {
    function: Arc<VirtioPciDevice>,
    device: Arc<VirtioConsole>,
    links: ConsoleLinks,
}

impl Part for Console {
    fn kind(&self) -> &'static Kind {
        BUILDER.kind
    }

    fn function(&self) -> Arc<dyn PciDevice> {
        self.function.clone()
    }

    fn counters(&self) -> Vec<Counter> {
        self.device.counters().all().into_iter().chain(self.links.counters()).collect()
    }

    fn pty(&self) -> Option<&Path> {
        self.links.pty_path()
    }
}

impl Drop for Console {
    /// Its thread ends, so that nothing is printed any more when the links wait for their readers.
    fn drop(&mut self) {
        if let Err(error) = self.function.reset() {
            error!("{}: resetting it: {error}", self.function.id());
        }
    }
}

/// Opens what the console is connected with, and makes the device.
fn build(config: &PartConfig, mut site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::Console(config) = config else { return Err(not_built_here(config)) };
    let target = config.target();
    let mut links = ConsoleLinks::open(&target, NAMES)?;
    let id = config.id.as_deref().unwrap_or(ConsoleConfig::KIND.id);
    let Reach { memory, mapper } = Reach::new(id, config.iommu, &mut site);
    let context = &site.shared.context;
    let params = ConsoleParams {
        id: id.into(),
        output: links.writer(),
        memory,
        msi: context.msi.clone(),
        doorbells: Some(context.doorbells.clone()),
        observer: Some(context.observer.clone()),
    };
    let (function, device) = console::create(params).map_err(|error| VmError::Device {
        what: "making the virtio-console device",
        source: io::Error::other(error),
    })?;
    let receiver: Arc<dyn Receiver> = device.clone();
    links.connect(&target, &receiver)?;
    Ok(Built { part: Box::new(Console { function, device, links }), mapper })
}
