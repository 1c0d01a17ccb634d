// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vfio-user: devices that another process of the host emulates. Carom does not trust this other process.
//!
//! The other process is called the *server*, and Carom connects to it by a socket. The server's device is a
//! [`HostFunction`](super::function::HostFunction), so the PCI front end for VFIO devices also serves this device. Behind the virtual IOMMU
//! the device can access only memory that the guest maps ([`UserMapper`]). Without a virtual IOMMU, the device can access all guest RAM.

mod client;
mod connection;
mod function;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod mastering;
#[cfg(test)]
mod scripted_server;
#[cfg(test)]
mod tests;
mod user_mapper;
mod version;
mod wire;

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use iommu_bounce::{EndpointId, Permissions};
use log::warn;
use rustix::fs::{FsWord, fstatfs};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

pub use self::connection::ROLE;
pub use self::user_mapper::UserMapper;

use self::client::{Client, open_socket};
use self::function::UserFunction;
use self::mastering::Mastering;
use super::error::VfioPciError;
use super::function::VfioPciDevice;
use crate::dma::{Backing, DmaTable, FaultSender};
use crate::platform::{MemorySlots, MsiAllocator};
use crate::ram::{Ram, RamRegion};

/// `HUGETLBFS_MAGIC`.
const HUGETLBFS: FsWord = 0x9584_58f6;

/// A connection to a server.
pub struct UserServer {
    client: Arc<Client>,
    table: Arc<DmaTable>,
    mastering: Arc<Mastering>,
    ram: Arc<Ram>,
}

impl UserServer {
    /// Connects to the server that listens at `socket`. Rejected accesses of the server's device are reported to `faults`, as faults of the
    /// endpoint. If `faults` is `None`, because the device has no virtual IOMMU, rejected accesses are logged.
    ///
    /// # Errors
    /// No server listens at `socket`, or the server does not speak the protocol.
    pub fn connect(
        socket: &Path,
        ram: Arc<Ram>,
        faults: Option<(EndpointId, FaultSender)>,
    ) -> Result<Self, VfioPciError> {
        Self::start(&socket.display().to_string(), open_socket(socket)?, ram, faults)
    }

    fn start(
        name: &str,
        socket: UnixStream,
        ram: Arc<Ram>,
        faults: Option<(EndpointId, FaultSender)>,
    ) -> Result<Self, VfioPciError> {
        let table = Arc::new(DmaTable::new(name, ram.clone(), faults));
        let mastering = Arc::new(Mastering::new(table.clone()));
        let client = Arc::new(Client::new(name, socket, mastering.clone())?);
        Ok(Self { client, table, mastering, ram })
    }

    /// Gives the server all guest RAM for reading and writing, with IOVA equal to GPA. A device without a virtual IOMMU needs this access.
    ///
    /// # Errors
    /// Guest RAM is not backed by a file, or is backed by reserved huge pages, or the server rejects the RAM.
    pub fn share_ram(&self) -> Result<(), VfioPciError> {
        self.ram.iter().try_for_each(|region| self.share(region))
    }

    /// Gives the server one region of guest RAM, such as a hotplugged region.
    ///
    /// # Errors
    /// The region is not backed by a file, or is backed by reserved huge pages, or the server rejects the region. The server then gets no
    /// access to the region.
    pub fn share(&self, region: &RamRegion) -> Result<(), VfioPciError> {
        let fail = |source| VfioPciError::Host {
            what: format!(
                "cannot give guest RAM to the vfio-user server {} (with iommu=on, the server needs only the memory that the guest maps for the device)",
                self.client.name()
            ),
            source,
        };
        let everything = Permissions::READ | Permissions::WRITE;
        let (gpa, len) = (region.start_addr().raw_value(), region.len());
        let file = region
            .file_offset()
            .ok_or_else(|| fail(io::Error::new(io::ErrorKind::Unsupported, "no file backs the RAM")))?;
        if is_of_reserved_pages(file.file()).map_err(fail)? {
            return Err(fail(io::Error::other(
                "the RAM has reserved huge pages (--memory hugepages=on), which a server could free; turn hugepages off, or set iommu=on for the device",
            )));
        }
        let descriptor = (file.file().as_fd(), file.start());
        self.table.insert(gpa, len, Backing::Ram(gpa), everything);
        self.client.map(gpa, len, everything, Some(descriptor)).map_err(|error| {
            self.take_from_table(gpa, len);
            fail(error.into())
        })
    }

    /// Withdraws a region of guest RAM from the server.
    pub fn take_back(&self, region: &RamRegion) {
        let (gpa, len) = (region.start_addr().raw_value(), region.len());
        if let Err(error) = self.client.unmap(gpa, len) {
            warn!("{}: cannot withdraw guest RAM at {gpa:#x} from the vfio-user server: {error}", self.client.name());
        }
        self.take_from_table(gpa, len);
    }

    fn take_from_table(&self, gpa: u64, len: u64) {
        if let Err(error) = self.table.remove(gpa, len, |_, _| {}) {
            warn!("{}: cannot withdraw guest RAM at {gpa:#x} from the vfio-user server: {error:?}", self.client.name());
        }
    }

    /// Returns the mapper of the server's device, for a device behind a virtual IOMMU.
    pub fn mapper(&self) -> UserMapper {
        UserMapper::new(self.client.clone(), self.table.clone())
    }

    /// Exposes the server's device as a function of the guest, and resets the device. `id` is the device's name in logs and the API.
    ///
    /// # Errors
    /// The device is not a PCI endpoint that can be passed through, or cannot be reset.
    pub fn function(
        &self,
        id: &str,
        msi: &dyn MsiAllocator,
        slots: Arc<dyn MemorySlots>,
    ) -> Result<VfioPciDevice, VfioPciError> {
        let host = UserFunction::new(self.client.clone(), self.client.describe()?, self.mastering.clone());
        let function = VfioPciDevice::assemble(id, self.client.name(), Box::new(host), msi, None, slots)?;
        match self.client.gone() {
            None => Ok(function),
            Some(reason) => Err(VfioPciError::Nonsense {
                name: self.client.name().to_string(),
                what: format!("the vfio-user server {reason}; restart the server"),
            }),
        }
    }
}

/// True if a file's memory comes from the host's reserve of huge pages. Any process that can write such a file can free the file's pages
/// and use these pages itself. If Carom then accesses a freed page, Carom ends.
fn is_of_reserved_pages(file: &File) -> io::Result<bool> {
    Ok(fstatfs(file)?.f_type == HUGETLBFS)
}
