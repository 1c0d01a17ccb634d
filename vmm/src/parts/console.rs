// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-console.

use std::io;
use std::path::Path;
use std::sync::Arc;

use carom_api::kinds::Kind;
use carom_api::{ConsoleConfig, PartConfig};
use devices::pci::PciDevice;
use devices::virtio::VirtioPciDevice;
use devices::virtio::console::{self, ConsoleCounters, ConsoleParams, VirtioConsole};
use log::error;

use super::reach::Reach;
use super::{Builder, Built, Part, Site, not_built_here};
use crate::console::{ConsoleLinks, Names, Receiver};
use crate::error::VmError;
use crate::machine::Counter;

pub(super) const BUILDER: Builder = Builder { kind: &ConsoleConfig::KIND, roles: &[console::ROLE], build };

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
        named(self.device.counters()).into_iter().chain(self.links.counters()).collect()
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

fn named(counters: ConsoleCounters) -> Vec<Counter> {
    let ConsoleCounters { tx_bytes, rx_bytes, resizes } = counters;
    vec![
        Counter { name: "tx_bytes", help: "Bytes that the guest printed on its console.", value: tx_bytes },
        Counter { name: "rx_bytes", help: "Bytes that the guest read of its console.", value: rx_bytes },
        Counter { name: "resizes", help: "How often the guest was told of the terminal's size.", value: resizes },
    ]
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::metrics;

    #[test]
    fn counters_are_in_the_documents_table_of_metrics() {
        let document = include_str!("../../../docs/api.md");
        for counter in named(ConsoleCounters::default()).into_iter().chain(ConsoleLinks::default().counters()) {
            let name = metrics::name_of(BUILDER.kind.name, counter.name);
            assert!(document.contains(&format!("`{name}{{device}}`")), "{name} is not in docs/api.md");
        }
    }
}
