// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-balloon.

use std::io;
use std::sync::Arc;

use carom_api::{BalloonConfig, PartConfig};
use devices::counters::Counter;
use devices::virtio::balloon::{self, BalloonCounters, BalloonParams, VirtioBalloon};

use super::emulated::{Wiring, failed};
use super::{Builder, Built, Part, Site, not_built_here};
use crate::error::VmError;

pub(super) const BUILDER: Builder = Builder {
    kind: &BalloonConfig::KIND,
    roles: &[balloon::ROLE],
    counters: || BalloonCounters::default().all(),
    build,
};

impl Part for Arc<VirtioBalloon> {
    fn counters(&self) -> Vec<Counter> {
        VirtioBalloon::counters(self).all()
    }

    fn resize(&self, bytes: u64) -> Result<(), VmError> {
        VirtioBalloon::resize(self, bytes);
        Ok(())
    }

    fn held_ram(&self) -> u64 {
        self.actual_size()
    }
}

fn build(config: &PartConfig, mut site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::Balloon(config) = config else { return Err(not_built_here(config)) };
    let what = "create the virtio-balloon device";
    let reclaim = site.shared.context.reclaim.clone();
    let reclaim = reclaim.ok_or_else(|| VmError::Device { what, source: io::ErrorKind::Unsupported.into() })?;
    let BalloonConfig { size, deflate_on_oom, free_page_reporting, .. } = *config;
    site.emulate(config, |Wiring { id, memory, msi, doorbells, observer }| {
        balloon::create(BalloonParams {
            id,
            size,
            deflate_on_oom,
            free_page_reporting,
            reclaim,
            memory,
            msi,
            doorbells,
            observer,
        })
        .map_err(failed(what))
    })
}
