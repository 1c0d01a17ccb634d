// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The I/O address space of a device behind the virtio-iommu that a server serves.
//!
//! The server has the descriptors of all guest RAM; what it may use of it, it is told when it asks, and it forgets what is unmapped
//! before the guest is told that it is. So the guest is kept from its own drivers' mistakes and from a device's, not from a server that
//! lies: who wants that takes a device of vfio-user. A chunk of a window goes to the server as a region of its own. While some of a
//! file is mapped that the guest sees as memory, the file is a region, too.

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
use crate::patience::Operation;
use crate::shown::ShownMemory;
use crate::windows::WindowMemory;

/// Fills the table that translations are taken of.
///
/// An UNMAP that returns has had the server forget the mapping. One that the server does not confirm in time fails, and the device
/// with it.
pub struct VhostUserMapper {
    table: MapperTable,
    shared: Arc<Shared>,
    /// First IOVAs of mappings of devices' memory that the server has, and the address in this process of what they lead to.
    devices: BTreeMap<u64, usize>,
}

impl VhostUserMapper {
    pub(super) fn new(shared: Arc<Shared>, table: Arc<DmaTable>) -> Self {
        Self { table: MapperTable(table), shared, devices: BTreeMap::new() }
    }

    /// To be called before the mapper goes to a virtio-iommu with windows, or with devices whose memory can be mapped: see
    /// [`DmaTable::connect`].
    pub fn connect(&self, windows: Option<&Arc<WindowMemory>>, devices: Option<&Arc<ShownMemory>>) {
        self.table.connect(windows, devices);
    }

    /// Gives the server a chunk.
    fn give_chunk(&self, index: u32, len: u64) -> Result<(), MapError> {
        let windows = self.table.windows().ok_or(MapError::NoResources)?;
        // A server maps what it is given for reading and writing. What it may do with it, it is told with the translation, as for RAM.
        let file = windows.hand_out(index, Permissions::READ | Permissions::WRITE)?;
        // The driver does without a window then.
        let file = file.ok_or(MapError::NoResources)?;
        let region = RegionName::Chunk(index);
        self.shared.session_first().add_region(region, len, FilePart::whole(file.into())).map_err(|error| match error {
            ServerError::Unfit(_) => MapError::NoResources,
            other => MapError::Host(io::Error::other(other)),
        })
    }

    /// Gives the server the file behind the mapping of a device's memory at `iova`. If there is no file, or the server takes no more
    /// regions, the server gets no translation: its accesses are reported.
    fn give_device(&mut self, iova: u64, len: u64) -> Result<(), MapError> {
        let Some(device) = self.table.device_at(iova) else { return Ok(()) };
        let range = device.host();
        let given = match device.file() {
            Some(place) => {
                let part = FilePart { file: place.file.try_clone()?, offset: place.offset };
                self.shared.session_first().add_region(RegionName::Device(range.address), range.len as u64, part)
            }
            None => Err(ServerError::Unfit("cannot be given what is in no file".into())),
        };
        match given {
            Ok(()) => {
                self.devices.insert(iova, range.address);
                Ok(())
            }
            Err(ServerError::Unfit(reason)) => {
                debug!("{}: no access at {iova:#x}: the server {reason}", self.table.name());
                // It is there: it was just mapped.
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
            // It was just put there, and nobody was told of it.
            let _ = self.table.remove(iova, len, |_, _| {});
        })
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError> {
        let mut chunks = Vec::new();
        // From here on the server gets no translation of it.
        self.table.block(iova, len, |chunk| chunks.push(chunk))?;
        let (_operation, begin) = (Operation::begin(), Instant::now());
        let mut session = self.shared.session_first();
        session.forget(iova, len, begin).map_err(|error| UnmapError::Host(io::Error::other(error)))?;
        chunks.into_iter().for_each(|chunk| session.take_region(RegionName::Chunk(chunk)));
        // It does not wrap around: the table has checked it.
        for (_, range) in self.devices.extract_if(iova..=iova + (len - 1), |_, _| true) {
            session.take_region(RegionName::Device(range));
        }
        drop(session);
        Ok(self.table.remove(iova, len, |_, _| {})?)
    }

    /// No chunk stays with the server over a reset of the VM.
    fn keeps_page_tables(&self) -> bool {
        false
    }

    fn reaches_hidden_chunks(&self) -> bool {
        false
    }

    fn limits(&self) -> MapperLimits {
        table_limits()
    }
}
