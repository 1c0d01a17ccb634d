// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices of any kind that a vhost-user server implements.

use std::io;
use std::path::Path;
use std::sync::Arc;

use carom_api::error::FileError;
use carom_api::kinds::KindConfig;
use carom_api::{ConfigError, Field};
use devices::counters::Counter;
use devices::dma::DmaTable;
use devices::ram::RamRegion;
use devices::reclaim::{PinnedWhole, Reclaim};
pub(super) use devices::virtio::vhost_user::ROLE;
use devices::virtio::vhost_user::{self, Model, VhostUserDevice, VhostUserError, VhostUserParams};

use super::mapper::EndpointMapper;
use super::{Built, Part, Site, name};
use crate::error::VmError;

/// Description of the device to build.
pub(super) struct Wanted<'w> {
    pub(super) config: &'w dyn KindConfig,
    pub(super) field: Field,
    pub(super) socket: &'w Path,
    pub(super) model: Model,
    /// True if the server may pin RAM for a host device. In this case, Carom must not return RAM to the host.
    pub(super) pins: bool,
}

struct VhostUser {
    field: Field,
    id: String,
    device: Arc<VhostUserDevice>,
    _pinned: Option<PinnedWhole>,
}

impl Part for VhostUser {
    fn counters(&self) -> Vec<Counter> {
        self.device.counters().all()
    }

    fn add_ram(&self, region: &RamRegion) -> Result<(), VmError> {
        let refused = |error| VmError::MoreRam(format!("{}: {error}", self.id));
        self.device.add_ram(region).map_err(refused)
    }

    fn take_ram(&self, region: &RamRegion) {
        self.device.take_ram(region);
    }

    fn resize(&self, _: u64) -> Result<(), VmError> {
        Err(ConfigError::new(
            self.field,
            "the vhost-user server sets the size of this device: resize the device in the server",
        )
        .into())
    }
}

/// Connects to the server, and creates the device.
pub(super) fn build(wanted: Wanted<'_>, site: &mut Site<'_>) -> Result<Built, VmError> {
    let Wanted { config, field, socket, model, pins } = wanted;
    let id = name(config);
    let faults = config.is_behind_iommu().then(|| (site.address.endpoint_id(), site.shared.faults.sender()));
    let context = &site.shared.context;
    let pinned = context.reclaim.as_ref().filter(|_| pins).map(Reclaim::pin_whole);
    let params = VhostUserParams {
        id: id.into(),
        socket: socket.into(),
        model,
        ram: context.memory.clone(),
        table: faults.map(|faults| Arc::new(DmaTable::new(id, context.memory.clone(), Some(faults)))),
        msi: context.msi.clone(),
        doorbells: Some(context.doorbells.clone()),
        observer: Some(context.observer.clone()),
    };
    let made = vhost_user::create(params).map_err(|error| match error {
        VhostUserError::Server(error) => {
            let path = socket.display().to_string();
            VmError::from(FileError { field, path, source: io::Error::other(error) })
        }
        error @ VhostUserError::Transport(_) => {
            VmError::Device { what: "create a vhost-user device", source: io::Error::other(error) }
        }
    })?;
    let vhost_user::VhostUser { function, device, mapper } = made;
    let mapper = mapper.map(|mapper| Box::new(mapper) as Box<dyn EndpointMapper>);
    let part = VhostUser { field: config.kind().field, id: id.into(), device, _pinned: pinned };
    Ok(Built { function, part: Box::new(part), mapper })
}
