// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Devices of a VM. Each device is a [`Part`].
//!
//! `carom-api` defines the configuration of each kind of part. For each kind, one file in this directory builds the parts from their
//! configuration. [`BUILDERS`] lists the builders. [`bus`] puts parts on the root bus and behind the virtio-iommu. Other code uses a part
//! only through [`Part`].
//!
//! The function on the bus ([`PciDevice`]) has the operations for pause, resume, reset, save and restore. The host bridge, pvpanic and the
//! watchdog are functions on the bus too, but they are not parts.

mod balloon;
mod block;
pub mod bus;
mod common_limits;
mod console;
pub mod context;
mod emulated;
mod faults;
mod fs;
mod iommu;
mod mapper;
mod net;
pub mod observer;
mod pmem;
pub mod rate_limits;
mod rng;
mod vfio;
mod vfio_user;
mod vhost_user;
mod vsock;

use std::path::Path;
use std::sync::Arc;

use carom_api::kinds::{Kind, KindConfig};
use carom_api::{ConfigError, PartConfig};
use devices::pci::{PciAddress, PciDevice};
use devices::ram::RamRegion;
use devices::sandbox::ThreadRole;
use log::error;

use self::context::DeviceContext;
use self::faults::FaultPath;
pub use self::iommu::IOMMU_ADDRESS;
use self::mapper::EndpointMapper;
use self::vfio::HostDevices;
use crate::error::VmError;
use devices::counters::Counter;

/// Device of a VM. This trait has the operations that [`PciDevice`] does not have.
pub trait Part: Send {
    /// Returns the device's counters.
    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }
    /// Returns the path of the pseudoterminal that the device is connected to, if any.
    fn pty(&self) -> Option<&Path> {
        None
    }
    /// Changes the device's size, if the device can be resized. On error, the size does not change.
    fn resize(&self, bytes: u64) -> Result<(), VmError> {
        let _ = bytes;
        Err(VmError::Guest("this device cannot be resized".into()))
    }
    /// Returns the bytes of RAM that the device holds, as a balloon does. The guest does not use this RAM.
    fn held_ram(&self) -> u64 {
        0
    }
    /// Gives the device access to a new region of RAM, if the device accesses RAM directly. On error, nothing changes.
    fn add_ram(&self, region: &RamRegion) -> Result<(), VmError> {
        let _ = region;
        Ok(())
    }
    /// Removes the device's access to a region of RAM, because adding the region to the VM failed. This method is also called if `add_ram`
    /// was not called for this device.
    fn take_ram(&self, region: &RamRegion) {
        let _ = region;
    }
    /// Stops the device after its function has left the bus. When this method returns, the device does no more DMA, and its threads have
    /// ended. The caller then removes the part's mappings and drops the part.
    fn leave(&mut self, function: &dyn PciDevice) {
        reset(function);
    }
}

/// Resets the function of a part that has left the bus.
fn reset(function: &dyn PciDevice) {
    if let Err(error) = function.reset() {
        error!("{}: cannot reset the device: {error}", function.id());
    }
}

/// Part that is not on a bus yet.
struct Built {
    /// Function on the root bus. It has the part's ID.
    function: Arc<dyn PciDevice>,
    part: Box<dyn Part>,
    /// Mapper of the part's address space, if the part will be behind the virtio-iommu.
    mapper: Option<Box<dyn EndpointMapper>>,
}

/// State that parts share.
struct Shared {
    context: DeviceContext,
    faults: FaultPath,
    host_devices: HostDevices,
}

/// Address of a part that is being built, and the state that parts share.
struct Site<'s> {
    address: PciAddress,
    shared: &'s mut Shared,
}

/// Builder for the parts of a kind.
struct Builder {
    kind: &'static Kind,
    /// Roles of a part's threads.
    roles: &'static [ThreadRole],
    /// Counters of a newly created part.
    #[cfg_attr(not(test), expect(dead_code, reason = "a test compares them with the page of the API"))]
    counters: fn() -> Vec<Counter>,
    build: fn(&PartConfig, Site<'_>) -> Result<Built, VmError>,
}

/// Builders of all kinds of parts, except the virtio-iommu. [`bus`] builds the virtio-iommu at boot from the mappers of all other parts.
static BUILDERS: &[Builder] = &[
    vfio::BUILDER,
    vfio_user::BUILDER,
    block::BUILDER,
    net::BUILDER,
    fs::BUILDER,
    pmem::BUILDER,
    rng::BUILDER,
    vsock::BUILDER,
    balloon::BUILDER,
    console::BUILDER,
];

impl Site<'_> {
    /// Builds the part that `config` describes. On error, no resources of the part stay open.
    fn build(self, config: &PartConfig) -> Result<Built, VmError> {
        let kind = config.kind().name;
        let builder = BUILDERS.iter().find(|builder| builder.kind.name == kind);
        builder.map_or_else(|| Err(not_built_here(config)), |builder| (builder.build)(config, self))
    }
}

/// Returns the device's ID in logs and the API.
fn name(config: &dyn KindConfig) -> &str {
    config.id().unwrap_or(config.kind().id)
}

/// Returns the error for a kind of part that [`BUILDERS`] does not build.
fn not_built_here(config: &PartConfig) -> VmError {
    ConfigError::new(config.kind().field, "cannot be hot-plugged: configure it when the VM is created").into()
}

/// Returns the roles of the threads that parts run, without duplicates.
pub fn thread_roles() -> Vec<ThreadRole> {
    let mut roles = iommu::ROLES.to_vec();
    for role in BUILDERS.iter().flat_map(|builder| builder.roles) {
        if roles.iter().all(|known| known.name != role.name) {
            roles.push(*role);
        }
    }
    roles
}

/// Returns the counters of each kind of part, with the kind's name.
#[cfg(test)]
pub(crate) fn counters() -> impl Iterator<Item = (&'static str, Vec<Counter>)> {
    BUILDERS.iter().map(|builder| (builder.kind.name, (builder.counters)()))
}

#[cfg(test)]
mod tests {
    use carom_api::kinds::KINDS;

    use super::*;

    #[test]
    fn device_kinds_and_builders_match_one_to_one() {
        let mut built: Vec<&str> = BUILDERS.iter().map(|builder| builder.kind.name).collect();
        built.push(iommu::KIND.name);
        let mut named: Vec<&str> = KINDS.iter().map(|kind| kind.name).collect();
        built.sort_unstable();
        named.sort_unstable();
        assert_eq!(built, named);
    }

    #[test]
    fn hotpluggable_kinds_have_builders_and_slots() {
        for kind in KINDS.iter().filter(|kind| kind.add.is_some()) {
            assert!(kind.takes_slot && BUILDERS.iter().any(|builder| builder.kind.name == kind.name), "{}", kind.name);
        }
    }
}
