// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-vsock.

use carom_api::{ConfigError, PartConfig, VsockConfig};
use devices::virtio::vsock::{self, Listener, MOST_CLIENTS, MOST_CONNECTIONS, VsockCounters, VsockParams};
use rustix::process::{Resource, getrlimit};

use super::emulated::{Counting, Wiring, failed};
use super::{Builder, Built, Site, not_built_here};
use crate::error::VmError;

/// Descriptors that a VM needs in addition to the descriptors of vsock connections.
const OTHER_DESCRIPTORS: usize = 1024;

pub(super) const BUILDER: Builder =
    Builder { kind: &VsockConfig::KIND, roles: &[vsock::ROLE], counters: || VsockCounters::default().all(), build };

/// Creates the socket and the device.
fn build(config: &PartConfig, mut site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::Vsock(config) = config else { return Err(not_built_here(config)) };
    let cid = u32::try_from(config.cid).map_err(|_| ConfigError::new(VsockConfig::CID, "does not fit in 32 bits"))?;
    let (listener, connections) = (listen(config)?, connections());
    site.emulate(config, |Wiring { id, memory, msi, doorbells, observer }| {
        let params = VsockParams { id, cid, listener, connections, memory, msi, doorbells, observer };
        let (function, device) = vsock::create(params).map_err(failed("create the virtio-vsock device"))?;
        Ok((function, Counting(move || device.counters().all())))
    })
}

/// Returns the maximum number of connections. Even if the guest opens this many connections, the rest of the process has enough
/// descriptors.
fn connections() -> usize {
    let limit = getrlimit(Resource::Nofile).current.map(|current| usize::try_from(current).unwrap_or(usize::MAX));
    fitting(limit.unwrap_or(usize::MAX))
}

/// Returns the maximum number of connections if the process may open `descriptors` descriptors. [`MOST_CLIENTS`] descriptors are reserved
/// for clients that are not connected to the guest yet. [`OTHER_DESCRIPTORS`] further descriptors are reserved for the rest of the VM, but
/// at most half of the remaining descriptors. The result is the number of unreserved descriptors, but at most [`MOST_CONNECTIONS`].
fn fitting(descriptors: usize) -> usize {
    let without_clients = descriptors.saturating_sub(MOST_CLIENTS);
    let rest = without_clients.saturating_sub(OTHER_DESCRIPTORS);
    rest.max(without_clients / 2).min(MOST_CONNECTIONS)
}

fn listen(config: &VsockConfig) -> Result<Listener, VmError> {
    Listener::bind(&config.socket).map_err(VmError::of_file(VsockConfig::SOCKET, &config.socket))
}

#[cfg(test)]
mod tests {
    use carom_api::{Explain, Terms};

    use super::*;

    #[test]
    fn connections_leave_descriptors_for_all_else() {
        assert_eq!([20_000, 2176, 1024, 256, 100, 0].map(fitting), [1024, 1024, 448, 64, 0, 0]);
        assert!((1..=MOST_CONNECTIONS).contains(&connections()));
    }

    #[test]
    fn socket_that_cannot_be_made_is_named_with_its_field() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s").display().to_string();
        let config: VsockConfig = format!("cid=3,socket={path}").parse().unwrap();
        let first = listen(&config).unwrap();
        let error = listen(&config).err().unwrap();
        let rule = "this VM uses this socket already: use another path";
        assert_eq!(error.explain(Terms::Json), format!("vsock.socket: {path}: {rule}"));
        assert_eq!(error.to_string(), format!("--vsock {path}: {rule}"));
        drop(first);
        assert!(listen(&config).is_ok());
        let nowhere: VsockConfig = "cid=3,socket=/no/directory/s".parse().unwrap();
        let error = listen(&nowhere).err().unwrap().explain(Terms::Json);
        assert!(error.starts_with("vsock.socket: /no/directory/s: No such file"), "{error}");
    }
}
