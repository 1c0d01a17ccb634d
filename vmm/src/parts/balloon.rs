// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-balloon.

use std::io;
use std::sync::Arc;

use carom_api::kinds::Kind;
use carom_api::{BalloonConfig, PartConfig};
use devices::pci::PciDevice;
use devices::virtio::VirtioPciDevice;
use devices::virtio::balloon::{self, BalloonCounters, BalloonParams, VirtioBalloon};

use super::reach::Reach;
use super::{Builder, Built, Part, Site, not_built_here};
use crate::error::VmError;
use crate::machine::Counter;

pub(super) const BUILDER: Builder = Builder { kind: &BalloonConfig::KIND, roles: &[balloon::ROLE], build };

struct Balloon {
    function: Arc<VirtioPciDevice>,
    device: Arc<VirtioBalloon>,
}

impl Part for Balloon {
    fn kind(&self) -> &'static Kind {
        BUILDER.kind
    }

    fn function(&self) -> Arc<dyn PciDevice> {
        self.function.clone()
    }

    fn counters(&self) -> Vec<Counter> {
        named(self.device.counters())
    }

    fn balloon(&self) -> Option<&VirtioBalloon> {
        Some(&self.device)
    }
}

fn named(counters: BalloonCounters) -> Vec<Counter> {
    let BalloonCounters {
        inflated_bytes,
        deflated_bytes,
        reported_bytes,
        given_back_bytes,
        kept_back_bytes,
        refused_bytes,
    } = counters;
    let counter = |name, help, value| Counter { name, help, value };
    vec![
        counter("inflated_bytes", "Bytes that the guest put into the balloon.", inflated_bytes),
        counter("deflated_bytes", "Bytes that it took out.", deflated_bytes),
        counter("reported_bytes", "Bytes that it reported as free.", reported_bytes),
        counter("given_back_bytes", "Bytes of either that the host has got.", given_back_bytes),
        counter(
            "kept_back_bytes",
            "Bytes of either that the guest keeps: a device of the host has them pinned, or they are parts of huge pages.",
            kept_back_bytes,
        ),
        counter("refused_bytes", "Bytes of either that the host did not take.", refused_bytes),
    ]
}

fn build(config: &PartConfig, mut site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::Balloon(config) = config else { return Err(not_built_here(config)) };
    let id = config.id.as_deref().unwrap_or(BalloonConfig::KIND.id);
    let Reach { memory, .. } = Reach::new(id, false, &mut site);
    let context = &site.shared.context;
    let fail = |source| VmError::Device { what: "making the virtio-balloon device", source };
    let reclaim = context.reclaim.clone().ok_or_else(|| fail(io::ErrorKind::Unsupported.into()))?;
    let params = BalloonParams {
        id: id.into(),
        size: config.size,
        deflate_on_oom: config.deflate_on_oom,
        free_page_reporting: config.free_page_reporting,
        reclaim,
        memory,
        msi: context.msi.clone(),
        doorbells: Some(context.doorbells.clone()),
        observer: Some(context.observer.clone()),
    };
    let (function, device) = balloon::create(params).map_err(|error| fail(io::Error::other(error)))?;
    Ok(Built { part: Box::new(Balloon { function, device }), mapper: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::metrics;

    #[test]
    fn counters_are_in_the_documents_table_of_metrics() {
        let document = include_str!("../../../docs/api.md");
        for counter in named(BalloonCounters::default()) {
            let name = metrics::name_of(BUILDER.kind.name, counter.name);
            assert!(document.contains(&format!("`{name}{{device}}`")), "{name} is not in docs/api.md");
        }
    }
}
