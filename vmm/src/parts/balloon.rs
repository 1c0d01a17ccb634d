// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-balloon.

use std::io;
use std::sync::Arc;

use carom_api::kinds::Kind;
use carom_api::{BalloonConfig, PartConfig};
use devices::counters::Counter;
use devices::pci::PciDevice;
use devices::virtio::VirtioPciDevice;
use devices::virtio::balloon::{self, BalloonCounters, BalloonParams, VirtioBalloon};

use super::reach::Reach;
use super::{Builder, Built, Part, Site, not_built_here};
use crate::error::VmError;

pub(super) const BUILDER: Builder = Builder {
    kind: &BalloonConfig::KIND,
    roles: &[balloon::ROLE],
    counters: || BalloonCounters::default().all(),
    build,
};

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
        self.device.counters().all()
    }

    fn balloon(&self) -> Option<&VirtioBalloon> {
        Some(&self.device)
    }
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
