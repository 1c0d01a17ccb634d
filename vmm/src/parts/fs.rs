// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! File systems of the host: virtio-fs, by vhost-user.

use carom_api::{FsConfig, PartConfig};
use devices::virtio::vhost_user::Model;

use super::vhost_user::{self, Wanted};
use super::{Builder, Built, Site, not_built_here};
use crate::error::VmError;

pub(super) const BUILDER: Builder = Builder { kind: &FsConfig::KIND, roles: &[vhost_user::ROLE], build };

/// Connects to the server of the file system.
fn build(config: &PartConfig, mut site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::Fs(config) = config else { return Err(not_built_here(config)) };
    let wanted = Wanted {
        kind: BUILDER.kind,
        id: config.id.as_deref().unwrap_or(FsConfig::KIND.id),
        field: FsConfig::SOCKET,
        socket: &config.socket,
        model: Model::fs(&config.tag, config.num_queues, config.queue_size),
        iommu: false,
        // It copies, and has no device do DMA.
        pins: false,
    };
    vhost_user::build(wanted, &mut site)
}

#[cfg(test)]
mod tests {
    use devices::virtio::vhost_user::VhostUserCounters;

    use super::*;
    use crate::api::metrics;

    #[test]
    fn counters_are_in_the_documents_table_of_metrics() {
        let document = include_str!("../../../docs/api.md");
        for counter in vhost_user::named(VhostUserCounters::default()) {
            let name = metrics::name_of(BUILDER.kind.name, counter.name);
            assert!(document.contains(&format!("`{name}{{device}}`")), "{name} is not in docs/api.md");
        }
    }
}
