// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! File systems of the host: virtio-fs over vhost-user.

use carom_api::{FsConfig, PartConfig};
use devices::virtio::vhost_user::{Model, VhostUserCounters};

use super::vhost_user::{self, Wanted};
use super::{Builder, Built, Site, not_built_here};
use crate::error::VmError;

pub(super) const BUILDER: Builder = Builder {
    kind: &FsConfig::KIND,
    roles: &[vhost_user::ROLE],
    counters: || VhostUserCounters::default().all(),
    build,
};

/// Connects to the vhost-user server of the file system, and creates the device.
fn build(config: &PartConfig, mut site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::Fs(config) = config else { return Err(not_built_here(config)) };
    let wanted = Wanted {
        config,
        field: FsConfig::SOCKET,
        socket: &config.socket,
        model: Model::fs(&config.tag, config.num_queues, config.queue_size),
        // The server copies the data itself. No host device does DMA to guest RAM, so the RAM is not pinned.
        pins: false,
    };
    vhost_user::build(wanted, &mut site)
}
