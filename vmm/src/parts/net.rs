// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Network devices: virtio-net.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use carom_api::error::FileError;
use carom_api::mac_address::MacAddress;
use carom_api::{NetConfig, PartConfig};
use devices::inherited;
use devices::virtio::net::{self, NetCounters, NetParams, NetTraits};
use devices::virtio::vhost_user::{Model, ServedNet, VhostUserCounters};

use super::emulated::{Counting, Wiring, failed};
use super::vhost_user::{self, Wanted};
use super::{Builder, Built, Site, not_built_here, rate_limits};
use crate::error::VmError;
use crate::tap::{Tap, TapOptions};

pub(super) const BUILDER: Builder = Builder {
    kind: &NetConfig::KIND,
    roles: &[net::ROLE, net::CONTROL_ROLE, vhost_user::ROLE],
    counters: || [NetCounters::default().all(), VhostUserCounters::default().all()].concat(),
    build,
};

/// Opens the interface and creates the device.
fn build(config: &PartConfig, mut site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::Net(config) = config else { return Err(not_built_here(config)) };
    if let Some(socket) = config.vhost_socket.as_deref() {
        return served(config, socket, &mut site);
    }
    let tap = open(config)?;
    let traits = NetTraits {
        mac: config.mac.unwrap_or_else(MacAddress::random).bytes(),
        mtu: tap.mtu(),
        pairs: config.pairs(),
        queue_size: config.queue_size,
        csum: config.offload_csum,
        tso: config.offload_tso,
        uso: config.offload_ufo && tap.has_uso(),
        // Mergeable buffers let the driver use small receive buffers. Behind the virtio-iommu, small buffers need smaller mappings or fewer
        // window slots. Without the virtio-iommu, large buffers are faster.
        merges: config.iommu,
    };
    let (carrier, limits) = (Box::new(tap), config.rate_limiter_config.map(rate_limits::limits));
    site.emulate(config, |Wiring { id, memory, msi, doorbells, observer }| {
        let params = NetParams { id, carrier, traits, limits, memory, msi, doorbells, observer };
        let (function, device) = net::create(params).map_err(failed("create a network device"))?;
        Ok((function, Counting(move || device.counters().all())))
    })
}

/// Connects to the vhost-user server of the network device, and creates the device.
fn served(config: &NetConfig, socket: &Path, site: &mut Site<'_>) -> Result<Built, VmError> {
    let net = ServedNet {
        mac: config.mac.unwrap_or_else(MacAddress::random).bytes(),
        mtu: config.mtu,
        pairs: config.pairs(),
        queue_size: config.queue_size,
        csum: config.offload_csum,
        tso: config.offload_tso,
        uso: config.offload_ufo,
    };
    let wanted = Wanted {
        config,
        field: NetConfig::VHOST_SOCKET,
        socket,
        model: Model::net(&net),
        // The server may let a network card of the host do DMA to guest RAM, as DPDK does. Such RAM is pinned.
        pins: true,
    };
    vhost_user::build(wanted, site)
}

fn open(config: &NetConfig) -> Result<Tap, FileError> {
    let fail = |source| FileError { field: NetConfig::FD, path: "tap interface".into(), source };
    let inherited = config.inherited.iter().map(|number| inherited::interface(*number)).collect::<io::Result<Vec<_>>>();
    let inherited = inherited.map_err(fail)?;
    let (tap, field) = if !inherited.is_empty() {
        (Tap::given(inherited.iter().map(AsFd::as_fd), config.mtu), NetConfig::FD)
    } else if config.files.is_empty() {
        let address = config.address();
        let (name, mtu) = (config.tap.as_deref(), config.mtu);
        let mac = config.host_mac.map(MacAddress::bytes);
        let guest_mac = config.mac.map(MacAddress::bytes);
        (Tap::open(&TapOptions { name, pairs: config.pairs(), address, mac, guest_mac, mtu }), NetConfig::TAP)
    } else {
        (Tap::given(config.files.iter(), config.mtu), NetConfig::FD)
    };
    let path = config.tap.clone().unwrap_or_else(|| "tap interface".into());
    tap.map_err(|source| FileError { field, path, source })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use carom_api::{Explain, Terms};

    use super::*;

    #[test]
    fn unusable_net_interface_is_refused_with_its_field() {
        let refused = |config: &NetConfig| open(config).err().unwrap().explain(Terms::Json);
        let mut config = "".parse::<NetConfig>().unwrap();
        config.take_files(vec![File::open("/dev/null").unwrap().into()]).unwrap();
        assert!(
            refused(&config).starts_with("net.fds: tap interface: the descriptor does not belong to a tap"),
            "{}",
            refused(&config)
        );
        // The loopback interface is not a tap, so even root cannot open it as a tap.
        let config: NetConfig = "tap=lo".parse().unwrap();
        assert!(refused(&config).starts_with("net.tap: lo: "), "{}", refused(&config));
    }
}
