// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The devices of a VM: each is one [`Part`].
//!
//! A file here builds the parts of one kind from their configuration, which `carom-api` has; [`BUILDERS`] lists them. [`bus`] puts
//! parts on the root bus, and those that are to be behind the virtio-iommu behind it. All else goes over [`Part`]. Pause and
//! resume, reset, and saved state belong to the function on the bus ([`PciDevice`]), as devices that are no parts have them
//! too: the host bridge, pvpanic and the watchdog.

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

/// A device in a VM: its abilities in addition to those of its function on the root bus.
pub trait Part: Send {
    /// What it counts.
    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }
    /// The path of the pseudoterminal that it is connected with, if there is one.
    fn pty(&self) -> Option<&Path> {
        None
    }
    /// Gives it another size, if it has one. On error it has the one that it had.
    fn resize(&self, bytes: u64) -> Result<(), VmError> {
        let _ = bytes;
        Err(VmError::Guest("this device has no size".into()))
    }
    /// Bytes of RAM that the guest has handed to it and does not use.
    fn held_ram(&self) -> u64 {
        0
    }
    /// The guest gets this region of RAM: the device reaches it from now on, if it reaches RAM as such. On error nothing has
    /// changed.
    fn add_ram(&self, region: &RamRegion) -> Result<(), VmError> {
        let _ = region;
        Ok(())
    }
    /// The guest does not get it after all. A device that was not given it may have found it nonetheless, or not.
    fn take_ram(&self, region: &RamRegion) {
        let _ = region;
    }
    /// Its function has left the bus. When this returns, the device does no DMA of its own accord, and its threads have ended; it is
    /// disconnected next, and dropped.
    fn leave(&mut self, function: &dyn PciDevice) {
        reset(function);
    }
}

/// Resets the function of a part that leaves.
fn reset(function: &dyn PciDevice) {
    if let Err(error) = function.reset() {
        error!("{}: resetting it: {error}", function.id());
    }
}

/// A part that is on no bus yet.
struct Built {
    /// Its function on the root bus, which bears its name.
    function: Arc<dyn PciDevice>,
    part: Box<dyn Part>,
    /// Its address space, if it is to be behind the virtio-iommu.
    mapper: Option<Box<dyn EndpointMapper>>,
}

/// What parts of several kinds, or all of one, have in common.
struct Shared {
    context: DeviceContext,
    faults: FaultPath,
    host_devices: HostDevices,
}

/// Where a part comes to be.
struct Site<'s> {
    address: PciAddress,
    shared: &'s mut Shared,
}

/// What builds the parts of a kind.
struct Builder {
    kind: &'static Kind,
    /// Roles of the threads that a part runs.
    roles: &'static [ThreadRole],
    /// Counters of a part that was just made.
    #[cfg_attr(not(test), expect(dead_code, reason = "a test compares them with the page of the API"))]
    counters: fn() -> Vec<Counter>,
    build: fn(&PartConfig, Site<'_>) -> Result<Built, VmError>,
}

/// The registry: a builder for each kind that takes a slot. The virtio-iommu is built of what all others need
/// ([`bus`]), and is there from the start or not at all.
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
    /// Builds the part that `config` describes. On error nothing is left of it.
    fn build(self, config: &PartConfig) -> Result<Built, VmError> {
        let kind = config.kind().name;
        let builder = BUILDERS.iter().find(|builder| builder.kind.name == kind);
        builder.map_or_else(|| Err(not_built_here(config)), |builder| (builder.build)(config, self))
    }
}

/// Name of the device in logs and the API.
fn name(config: &dyn KindConfig) -> &str {
    config.id().unwrap_or(config.kind().id)
}

/// A builder was asked for another kind than its own.
fn not_built_here(config: &PartConfig) -> VmError {
    ConfigError::new(config.kind().field, "is there from the start or not at all").into()
}

/// Roles of the threads that parts run, each once.
pub fn thread_roles() -> Vec<ThreadRole> {
    let mut roles = iommu::ROLES.to_vec();
    for role in BUILDERS.iter().flat_map(|builder| builder.roles) {
        if roles.iter().all(|known| known.name != role.name) {
            roles.push(*role);
        }
    }
    roles
}

/// Counters of each kind of part, by its name.
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
    fn kinds_that_come_to_a_vm_that_runs_have_builders_and_slots() {
        for kind in KINDS.iter().filter(|kind| kind.add.is_some()) {
            assert!(kind.takes_slot && BUILDERS.iter().any(|builder| builder.kind.name == kind.name), "{}", kind.name);
        }
    }
}
