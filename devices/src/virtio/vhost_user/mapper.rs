// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! I/O address space of a vhost-user device behind the virtio-iommu.
//!
//! The server has the file descriptors of all guest RAM. The server asks for a translation before it accesses memory. The server drops the
//! translation before an UNMAP of the memory completes. These rules protect the guest from mistakes of the guest's drivers and of the
//! device. The rules do not protect the guest from a malicious server, because the server can ignore the rules. With a vfio-user device,
//! the guest is also protected from a malicious server.
//!
//! For the server, each mapped window chunk is a separate memory region. A file that backs guest-visible device memory is also a separate
//! region, as long as a part of the file is mapped.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use iommu_bounce::{DmaMapper, MapError, MapperLimits, Permissions, UnmapError};
use log::debug;
use vm_memory::VolatileSlice;

use super::error::ServerError;
use super::translation::{FilePart, RegionName};
use super::watcher::Shared;
use crate::dma::{Backing, DmaTable, MapperTable, table_limits};
use crate::guest_visible::GuestVisibleMemory;
use crate::peer_timeouts::Operation;
use crate::windows::WindowMemory;

/// Mapper that fills the device's table of mappings.
///
/// When an UNMAP has succeeded, the server has no translation of the range any more. If the server does not confirm the UNMAP in time, the
/// UNMAP and the device fail.
pub struct VhostUserMapper {
    table: MapperTable,
    shared: Arc<Shared>,
    /// Mappings of device memory that the server can access: first IOVA, and address of the memory's range in this process.
    devices: BTreeMap<u64, usize>,
}

impl VhostUserMapper {
    pub(super) fn new(shared: Arc<Shared>, table: Arc<DmaTable>) -> Self {
        Self { table: MapperTable(table), shared, devices: BTreeMap::new() }
    }

    /// Connects the table to the window memory, and to the device memory that the guest can map. Call this function before the virtio-iommu
    /// receives the mapper. See [`DmaTable::connect`].
    pub fn connect(&self, windows: Option<&Arc<WindowMemory>>, devices: Option<&Arc<GuestVisibleMemory>>) {
        self.table.connect(windows, devices);
    }

    /// Sends the server a window chunk.
    fn give_chunk(&self, index: u32, len: u64) -> Result<(), MapError> {
        let windows = self.table.windows().ok_or(MapError::NoResources)?;
        // A server maps each region for reads and writes. As with RAM, the translations limit the server's reads and writes of the chunk.
        let file = windows.hand_out(index, Permissions::READ | Permissions::WRITE)?;
        // If no file is available for this chunk, the mapping fails and the driver works without the chunk.
        let file = file.ok_or(MapError::NoResources)?;
        let region = RegionName::Chunk(index);
        self.shared.session_first().add_region(region, len, FilePart::whole(file.into())).map_err(|error| match error {
            ServerError::Unfit(_) => MapError::NoResources,
            other => MapError::Host(io::Error::other(other)),
        })
    }

    /// Sends the server the backing file of the device memory that is mapped at `iova`. If no file backs the memory, or the server supports
    /// no more regions, the server gets no translation. Accesses of the device are then reported as faults.
    fn give_device(&mut self, iova: u64, len: u64) -> Result<(), MapError> {
        let Some(device) = self.table.device_at(iova) else { return Ok(()) };
        let range = device.host();
        let given = match device.file() {
            Some(place) => {
                let part = FilePart { file: place.file.try_clone()?, offset: place.offset };
                self.shared.session_first().add_region(RegionName::Device(range.address), range.len as u64, part)
            }
            None => Err(ServerError::Unfit("can map only memory that a file backs".into())),
        };
        match given {
            Ok(()) => {
                self.devices.insert(iova, range.address);
                Ok(())
            }
            Err(ServerError::Unfit(reason)) => {
                debug!("{}: the device cannot access IOVA {iova:#x}: its server {reason}", self.table.name());
                // The call cannot fail, because the mapping was just inserted.
                let _ = self.table.block(iova, len, |_| {});
                Ok(())
            }
            Err(other) => Err(MapError::Host(io::Error::other(other))),
        }
    }
}

impl DmaMapper for VhostUserMapper {
    fn map(&mut self, iova: u64, memory: VolatileSlice<'_>, permissions: Permissions) -> Result<(), MapError> {
        let len = memory.len() as u64;
        let backing = self.table.insert_slice(iova, &memory, permissions)?;
        if matches!(backing, Backing::Ram(_)) {
            return Ok(());
        }
        let _operation = Operation::begin();
        let given = match backing {
            Backing::Chunk(index) => self.give_chunk(index, len),
            _ => self.give_device(iova, len),
        };
        given.inspect_err(|_| {
            // The call cannot fail, because the mapping was just inserted. The server has no translation of the mapping yet, so nothing
            // must be invalidated.
            let _ = self.table.remove(iova, len, |_, _| {});
        })
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError> {
        let mut chunks = Vec::new();
        // From here on, the server gets no translation of the range.
        self.table.block(iova, len, |chunk| chunks.push(chunk))?;
        let (_operation, begin) = (Operation::begin(), Instant::now());
        let mut session = self.shared.session_first();
        session.forget(iova, len, begin).map_err(|error| UnmapError::Host(io::Error::other(error)))?;
        chunks.into_iter().for_each(|chunk| session.take_region(RegionName::Chunk(chunk)));
        // The addition cannot overflow, because the table has checked the range.
        for (_, range) in self.devices.extract_if(iova..=iova + (len - 1), |_, _| true) {
            session.take_region(RegionName::Device(range));
        }
        drop(session);
        Ok(self.table.remove(iova, len, |_, _| {})?)
    }

    /// Returns false: the server, not the host kernel, translates accesses for the device.
    fn keeps_page_tables(&self) -> bool {
        false
    }

    fn maps_hidden_chunks(&self) -> bool {
        false
    }

    fn limits(&self) -> MapperLimits {
        table_limits()
    }
}
