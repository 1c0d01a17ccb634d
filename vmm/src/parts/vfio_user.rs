// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices that other host processes emulate (vfio-user).

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use carom_api::{PartConfig, UserDeviceConfig};
use devices::pci::PciDevice;
use devices::peer_timeouts::Operation;
use devices::ram::RamRegion;
use devices::reclaim::{PinnedWhole, Reclaim};
use devices::vfio::user::{self, UserServer};
use vm_memory::GuestMemoryRegion;

use super::{Builder, Built, Part, Site, name, not_built_here, reset};
use crate::error::VmError;

pub(super) const BUILDER: Builder =
    Builder { kind: &UserDeviceConfig::KIND, roles: &[user::ROLE], counters: Vec::new, build };

struct UserDevice {
    id: String,
    /// Server of a device that is not behind the virtio-iommu. This server gets access to all RAM.
    server: Option<UserServer>,
    /// Start addresses of the RAM regions that were added later and shared with the server. Only these regions can be taken away from the
    /// server.
    given: Mutex<BTreeSet<u64>>,
    /// Marks all RAM as pinned, because the server may pin RAM for a host device.
    _pinned: Option<PinnedWhole>,
}

impl UserDevice {
    fn given(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Part for UserDevice {
    fn add_ram(&self, region: &RamRegion) -> Result<(), VmError> {
        let Some(server) = &self.server else { return Ok(()) };
        server.share(region).map_err(|error| VmError::MoreRam(format!("{}: {error}", self.id)))?;
        self.given().insert(region.start_addr().0);
        Ok(())
    }

    fn take_ram(&self, region: &RamRegion) {
        let was_given = self.given().remove(&region.start_addr().0);
        if let Some(server) = self.server.as_ref().filter(|_| was_given) {
            server.take_back(region);
        }
    }

    fn leave(&mut self, function: &dyn PciDevice) {
        let _operation = Operation::begin();
        reset(function);
    }
}

/// Connects to the device's server.
fn build(config: &PartConfig, site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::VfioUser(config) = config else { return Err(not_built_here(config)) };
    let Site { address, shared } = site;
    let faults = config.iommu.then(|| (address.endpoint_id(), shared.faults.sender()));
    let context = &shared.context;
    let open = || {
        let server = UserServer::connect(&config.socket, context.memory.clone(), faults)?;
        let reclaim = context.reclaim.as_ref().filter(|_| !config.iommu);
        let pinned = reclaim.map(Reclaim::pin_whole);
        if !config.iommu {
            server.share_ram()?;
        }
        let id = name(config);
        // A vfio-user device does not use `context.bars`, because its BARs are never mapped into the guest. So other devices cannot access
        // these BARs by DMA.
        let function = server.function(id, &*context.msi, context.bars.clone())?;
        let mapper = config.iommu.then(|| Box::new(server.mapper()) as Box<_>);
        let part = UserDevice {
            id: id.into(),
            server: (!config.iommu).then_some(server),
            given: Mutex::default(),
            _pinned: pinned,
        };
        Ok(Built { function: Arc::new(function), part: Box::new(part), mapper })
    };
    open().map_err(|source| VmError::Vfio { field: UserDeviceConfig::SOCKET, path: None, source: Box::new(source) })
}
