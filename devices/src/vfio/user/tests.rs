// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the client, the device and the mapper, with servers that follow the protocol and servers that break it.

mod device;
mod mapping;
mod protocol;
mod timeouts;

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iommu_bounce::{DmaMapper, MapError, Permissions};
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::UserMapper;
use super::client::Client;
use super::connection::DmaTarget;
use super::scripted_server::{Received, Server};
use super::wire::{self, ACCESS, Command, Kind};
use crate::dma::{DmaTable, FaultRelay, fault_relay};
use crate::ram::Ram;
use crate::vfio::error::VfioPciError;

const RW: Permissions = Permissions::READ.union(Permissions::WRITE);
const CHUNK: u64 = 4096;
const ENDPOINT: u32 = 0x18;
/// Time limit for servers that are expected to exceed it.
const LIMIT: Duration = Duration::from_secs(1);
/// Time limit for servers that answer. Even a busy machine does not delay a thread for this long.
const AMPLE: Duration = Duration::from_secs(60);

/// Memory without any accessible byte.
struct Nothing;

impl DmaTarget for Nothing {
    fn read(&self, _: u64, _: &mut [u8]) -> bool {
        false
    }
    fn write(&self, _: u64, _: &[u8]) -> bool {
        false
    }
}

fn client(socket: UnixStream) -> Result<Client, VfioPciError> {
    Client::with_limit("/run/x", socket, Arc::new(Nothing), AMPLE)
}

/// Creates a client that waits at most [`LIMIT`]. Returns `None` if the machine is too busy for the handshake within this time.
fn impatient_client(server: (Server, UnixStream)) -> Option<(Server, Client)> {
    let (server, socket) = server;
    Some((server, Client::with_limit("/run/x", socket, Arc::new(Nothing), LIMIT).ok()?))
}

/// True if `test` returns `Some(true)` in one of several tries. A machine that delays a thread by [`LIMIT`] spoils a try, which then
/// returns `false` or `None`. A real fault makes every try fail.
fn in_some_try(mut test: impl FnMut() -> Option<bool>) -> bool {
    (0..20).any(|_| test() == Some(true))
}

/// True if the server is gone for this reason.
fn is_gone(client: &Client, reason: &str) -> bool {
    client.gone().is_some_and(|all| all.contains(reason))
}

fn refusal(server: (Server, UnixStream)) -> String {
    let (_server, socket) = server;
    let error = client(socket).and_then(|client| client.describe()).unwrap_err().to_string();
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

fn ram() -> Arc<Ram> {
    Arc::new(Ram::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap())
}

/// A server's device behind an IOMMU.
struct Rig {
    server: Server,
    mapper: UserMapper,
    table: Arc<DmaTable>,
    client: Arc<Client>,
    ram: Arc<Ram>,
    relay: FaultRelay,
}

fn rig(server: (Server, UnixStream)) -> Rig {
    rig_with_limit(server, AMPLE).unwrap()
}

fn rig_with_limit(server: (Server, UnixStream), limit: Duration) -> Result<Rig, VfioPciError> {
    let (server, socket) = server;
    let (sender, relay) = fault_relay();
    let ram = ram();
    let table = Arc::new(DmaTable::new("/run/x", ram.clone(), Some((ENDPOINT, sender))));
    let client = Arc::new(Client::with_limit("/run/x", socket, table.clone(), limit)?);
    server.received();
    Ok(Rig { server, mapper: UserMapper::new(client.clone(), table.clone()), table, client, ram, relay })
}

impl Rig {
    fn map(&mut self, iova: u64, gpa: u64, len: usize, permissions: Permissions) -> Result<(), MapError> {
        let slice = self.ram.get_slice(GuestAddress(gpa), len).unwrap();
        self.mapper.map(iova, slice, permissions)
    }

    fn wait_until_gone(&self) -> String {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            match self.client.gone() {
                Some(reason) => return reason,
                None => assert!(Instant::now() < end, "the server is still there"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn read(&self, iova: u64, len: usize) -> Option<Vec<u8>> {
        let (header, answer) = self.server.ask(Command::DmaRead, &wire::dma_access(iova, len));
        match header.kind {
            Kind::Reply { refused: None } => {
                assert_eq!(answer[..ACCESS], wire::dma_access(iova, len));
                Some(answer[ACCESS..].to_vec())
            }
            other => {
                let kind = Kind::Reply { refused: Some(libc::EFAULT.unsigned_abs()) };
                assert_eq!((other, answer.len()), (kind, 0));
                None
            }
        }
    }

    fn write(&self, iova: u64, data: &[u8]) -> bool {
        let mut message = wire::dma_access(iova, data.len());
        message.extend(data);
        let (header, answer) = self.server.ask(Command::DmaWrite, &message);
        let taken = header.kind == Kind::Reply { refused: None };
        assert!(!taken || answer == wire::dma_access(iova, data.len()));
        taken
    }
}

fn commands(received: &[Received]) -> Vec<u16> {
    received.iter().map(|received| received.command).collect()
}
