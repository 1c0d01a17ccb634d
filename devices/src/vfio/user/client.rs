// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Sends the commands of the protocol, and reads the server's description of its device.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use iommu_bounce::Permissions;

use super::connection::{CallError, Connection, DmaTarget, MOST_DESCRIPTORS, TIME_LIMIT};
use super::version::{self, Abilities};
use super::wire::{self, ACCESS, Command, DmaFlags, RegionInfo};
use crate::local_socket::connect_now;
use crate::peer_timeouts::Operation;
use crate::vfio::error::VfioPciError;

/// Maximum size of an answer without data, in bytes. Some servers send the request back as their answer, so the limit exceeds the size of a
/// header.
const SHORT: usize = 256;
/// Maximum size of an answer to VERSION, in bytes.
const MOST_VERSION: usize = 4096;

/// Constant properties of a server's device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Description {
    /// True if the device can be reset.
    pub(super) resets: bool,
    /// BARs 0 to 5.
    pub(super) bars: [RegionInfo; 6],
    /// Configuration space.
    pub(super) config: RegionInfo,
    /// Number of MSI vectors, and number of MSI-X vectors.
    pub(super) irqs: (u32, u32),
}

/// Client side of a connection.
pub(super) struct Client {
    name: String,
    connection: Connection,
    abilities: Abilities,
}

/// Connects to the server that listens at `path`. Fails immediately if the server's queue of connections is full.
pub(super) fn open_socket(path: &Path) -> Result<UnixStream, VfioPciError> {
    connect_now(path).map_err(|source| VfioPciError::NoServer { path: path.to_path_buf(), source })
}

impl Client {
    /// Creates a client on the connected `socket`, and exchanges VERSION with the server. `name` is the device's name in messages. `dma`
    /// serves the server's DMA_READ and DMA_WRITE.
    pub(super) fn new(name: &str, socket: UnixStream, dma: Arc<dyn DmaTarget>) -> Result<Self, VfioPciError> {
        Self::with_limit(name, socket, dma, TIME_LIMIT)
    }

    /// Like [`new`](Self::new), but with the time limit `limit`.
    pub(super) fn with_limit(
        name: &str,
        socket: UnixStream,
        dma: Arc<dyn DmaTarget>,
        limit: Duration,
    ) -> Result<Self, VfioPciError> {
        let connection = Connection::new(name, socket, dma, limit).map_err(|source| VfioPciError::Host {
            what: format!("cannot start the thread that reads messages of the vfio-user server {name}"),
            source,
        })?;
        let answer = connection.call(Command::Version, &version::proposal(), &[], MOST_VERSION);
        let answer = answer.map_err(|error| failure(name, &connection, Command::Version, error))?;
        let abilities = version::parse(&answer).map_err(|what| nonsense(name, &what))?;
        Ok(Self { name: name.to_string(), connection, abilities })
    }

    /// Returns the server's capabilities.
    pub(super) fn abilities(&self) -> Abilities {
        self.abilities
    }

    /// Returns the device's name in messages.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the reason why the server is gone, or `None` if it is not gone.
    pub(super) fn gone(&self) -> Option<String> {
        self.connection.gone()
    }

    /// Ends the connection to a server that broke a rule.
    pub(super) fn give_up(&self, reason: &str) {
        self.connection.give_up(reason);
    }

    /// Asks the server to describe its device.
    pub(super) fn describe(&self) -> Result<Description, VfioPciError> {
        let ask = |command: Command, request: &[u8]| {
            let answer = self.connection.call(command, request, &[], SHORT);
            answer.map_err(|error| failure(&self.name, &self.connection, command, error))
        };
        let broken = |command: Command| {
            nonsense(&self.name, &format!("sent an invalid answer to {}: update the server", command.name()))
        };
        let answer = ask(Command::DeviceInfo, &wire::device_info())?;
        let info = wire::parse_device_info(&answer).ok_or_else(|| broken(Command::DeviceInfo))?;
        if !info.pci || info.regions < wire::PCI_REGIONS {
            return Err(nonsense(
                &self.name,
                "has a device that is not a PCI function: give the socket of a server of a PCI function",
            ));
        }
        let region = |index: u32| -> Result<RegionInfo, VfioPciError> {
            let answer = ask(Command::RegionInfo, &wire::region_info(index))?;
            wire::parse_region_info(&answer, index).ok_or_else(|| broken(Command::RegionInfo))
        };
        let irqs = |index: u32| -> Result<u32, VfioPciError> {
            if index >= info.irqs {
                return Ok(0);
            }
            let answer = ask(Command::IrqInfo, &wire::irq_info(index))?;
            wire::parse_irq_info(&answer, index).ok_or_else(|| broken(Command::IrqInfo))
        };
        let mut bars = [RegionInfo::default(); 6];
        for (index, bar) in (0u32..).zip(&mut bars) {
            *bar = region(index)?;
        }
        let (config, irqs) = (region(wire::CONFIG_REGION)?, (irqs(wire::MSI_IRQS)?, irqs(wire::MSIX_IRQS)?));
        Ok(Description { resets: info.resets, bars, config, irqs })
    }

    /// Reads from a region. An invalid answer ends the connection.
    pub(super) fn read_region(&self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), CallError> {
        let request = wire::region_access(region, offset, data.len());
        let answer = self.connection.call(Command::RegionRead, &request, &[], ACCESS + data.len())?;
        match wire::parse_region_access(&answer, region, offset, data.len()) {
            Some(bytes) if bytes.len() == data.len() => data.copy_from_slice(bytes),
            _ => return Err(self.breach(Command::RegionRead)),
        }
        Ok(())
    }

    /// Writes to a region, and waits until the server acknowledges the write.
    pub(super) fn write_region(&self, region: u32, offset: u64, data: &[u8]) -> Result<(), CallError> {
        let mut message = wire::region_access(region, offset, data.len());
        message.extend(data);
        let answer = self.connection.call(Command::RegionWrite, &message, &[], SHORT)?;
        let taken = wire::parse_region_access(&answer, region, offset, data.len()).is_some();
        if taken { Ok(()) } else { Err(self.breach(Command::RegionWrite)) }
    }

    fn breach(&self, command: Command) -> CallError {
        self.give_up(&format!("sent an invalid answer to {}", command.name()));
        CallError::Gone
    }

    /// Announces memory to the server. Without a file, the server can access the memory only by DMA_READ and
    /// DMA_WRITE.
    pub(super) fn map(
        &self,
        iova: u64,
        len: u64,
        permissions: Permissions,
        file: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<(), CallError> {
        let flags =
            DmaFlags { read: permissions.contains(Permissions::READ), write: permissions.contains(Permissions::WRITE) };
        let message = wire::dma_map(flags, file.map_or(0, |(_, offset)| offset), iova, len);
        let descriptors: Vec<_> = file.iter().map(|(descriptor, _)| *descriptor).collect();
        self.connection.call(Command::DmaMap, &message, &descriptors, SHORT).map(drop)
    }

    /// Withdraws announced memory from the server. The range must be exactly the range of one [`map`](Self::map).
    pub(super) fn unmap(&self, iova: u64, len: u64) -> Result<(), CallError> {
        self.connection.call(Command::DmaUnmap, &wire::dma_unmap(iova, len), &[], SHORT).map(drop)
    }

    /// Enables interrupts of a kind. When vector n occurs, the server writes event n.
    pub(super) fn enable_irqs(&self, kind: u32, events: &[impl AsFd]) -> Result<(), CallError> {
        let most = usize::try_from(self.abilities.descriptors).unwrap_or(MOST_DESCRIPTORS).min(MOST_DESCRIPTORS);
        let _operation = Operation::begin();
        let mut start = 0;
        for some in events.chunks(most) {
            let descriptors: Vec<_> = some.iter().map(AsFd::as_fd).collect();
            // The number fits, because a PCI function has at most 2048 interrupts.
            let count = u32::try_from(some.len()).unwrap_or(u32::MAX);
            let message = wire::enable_irqs(kind, start, count);
            self.connection.call(Command::SetIrqs, &message, &descriptors, SHORT)?;
            start += count;
        }
        Ok(())
    }

    /// Disables all interrupts of a kind.
    pub(super) fn disable_irqs(&self, kind: u32) -> Result<(), CallError> {
        self.connection.call(Command::SetIrqs, &wire::disable_irqs(kind), &[], SHORT).map(drop)
    }

    /// Resets the device.
    pub(super) fn reset(&self) -> Result<(), CallError> {
        self.connection.call(Command::Reset, &[], &[], SHORT).map(drop)
    }
}

fn nonsense(name: &str, what: &str) -> VfioPciError {
    VfioPciError::Nonsense { name: name.to_string(), what: format!("the vfio-user server {what}") }
}

/// Returns the error for a device whose server did not answer `command`, or rejected it.
fn failure(name: &str, connection: &Connection, command: Command, error: CallError) -> VfioPciError {
    match (error, connection.gone()) {
        (CallError::Gone, Some(reason)) => nonsense(name, &format!("{reason}; restart the server")),
        (error, _) => VfioPciError::Host {
            what: format!(
                "{name}: the request {} to the vfio-user server failed (see the server's log)",
                command.name()
            ),
            source: error.into(),
        },
    }
}
