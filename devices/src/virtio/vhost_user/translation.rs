// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a server knows of the mappings of its device, which is behind the virtio-iommu.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use iommu_bounce::Permissions;

use super::connection::{Connection, FileRegion};
use super::error::ServerError;
use super::iotlb::{Iotlb, Kind};
use crate::dma::{Backing, DmaTable};

/// Where servers know chunks of windows, in their table of regions: behind all guest-physical addresses (52 bits).
const CHUNKS: u64 = 1 << 56;
/// Most accesses of a server that were stopped of which a driver is told.
const REPORTS: usize = 64;
/// What a report is about.
const PAGE: u64 = 4096;

/// A chunk that is mapped for the device.
struct Chunk {
    region: FileRegion,
    /// Mappings of it.
    uses: u32,
    /// The server at hand has it.
    given: bool,
}

/// See the module.
pub(super) struct Translation {
    table: Arc<DmaTable>,
    /// First IOVA and length of the mappings that the server at hand was told.
    told: BTreeMap<u64, u64>,
    chunks: BTreeMap<u32, Chunk>,
    /// Pages and accesses of which the guest was told.
    reported: Vec<(u64, Permissions)>,
}

impl Translation {
    /// By `table`.
    pub(super) fn new(table: Arc<DmaTable>) -> Self {
        Self { table, told: BTreeMap::new(), chunks: BTreeMap::new(), reported: Vec::new() }
    }

    /// Tells the server of the mapping that `access` to `iova` needs; `false` if there is none, which the guest learns.
    pub(super) fn answer(
        &mut self,
        connection: &mut Connection,
        iova: u64,
        access: Permissions,
    ) -> Result<bool, ServerError> {
        let Some(mapping) = self.table.mapping(iova, access) else {
            self.report(iova, access);
            return Ok(false);
        };
        let user = match mapping.backing {
            Backing::Ram(gpa) => gpa,
            Backing::Chunk(index) => match self.chunks.get(&index) {
                Some(chunk) => chunk.region.address,
                None => return Ok(false),
            },
        };
        let asked = iova / PAGE;
        let (iova, size, permissions) = (mapping.iova, mapping.len, mapping.permissions);
        self.reported.retain(|(page, _)| *page != asked);
        // Before it is: a thread that takes the mapping away waits for the session.
        self.told.insert(iova, size);
        connection.update(Iotlb { iova, size, user, permissions, kind: Kind::Update })?;
        Ok(true)
    }

    /// The server was stopped at an access. The guest is told once.
    pub(super) fn report(&mut self, iova: u64, access: Permissions) {
        let access_to = (iova / PAGE, access);
        if self.reported.len() < REPORTS && !self.reported.contains(&access_to) {
            self.reported.push(access_to);
            self.table.report_stopped(iova, access);
        }
    }

    /// The driver is gone. What is stopped for the next one is news.
    pub(super) fn reset(&mut self) {
        self.reported.clear();
    }

    /// Has the server forget the mappings of this range, if it knows any, within `time`.
    pub(super) fn forget(
        &mut self,
        connection: &mut Connection,
        iova: u64,
        len: u64,
        time: Duration,
    ) -> Result<(), ServerError> {
        let last = iova.saturating_add(len.saturating_sub(1));
        let known: Vec<u64> = self.told.range(iova..=last).map(|(iova, _)| *iova).collect();
        if known.is_empty() {
            return Ok(());
        }
        connection.invalidate(iova, len, time)?;
        known.iter().for_each(|iova| _ = self.told.remove(iova));
        Ok(())
    }

    /// Chunk `index` is mapped. The server gets it at once if it `has` so many regions and takes `most`, and otherwise when it gets
    /// RAM.
    pub(super) fn add_chunk(
        &mut self,
        connection: Option<&mut Connection>,
        index: u32,
        (len, file): (u64, File),
        (has, most): (usize, usize),
    ) -> Result<(), ServerError> {
        if let Some(chunk) = self.chunks.get_mut(&index) {
            chunk.uses += 1;
            return Ok(());
        }
        if has + self.chunks.len() >= most {
            return Err(ServerError::Unfit(format!("takes {most} regions, and has them all")));
        }
        let mut chunk = Chunk {
            region: FileRegion { address: CHUNKS + u64::from(index) * len, len, offset: 0, file },
            uses: 1,
            given: false,
        };
        if let Some(connection) = connection {
            match connection.add_region(&chunk.region) {
                Ok(()) => chunk.given = true,
                // The next server gets it.
                Err(ServerError::Gone(_)) => {}
                Err(error) => return Err(error),
            }
        }
        self.chunks.insert(index, chunk);
        Ok(())
    }

    /// One mapping less of chunk `index`.
    pub(super) fn take_chunk(&mut self, connection: Option<&mut Connection>, index: u32) -> Result<(), ServerError> {
        let Some(chunk) = self.chunks.get_mut(&index) else { return Ok(()) };
        chunk.uses -= 1;
        if chunk.uses != 0 {
            return Ok(());
        }
        let Some(chunk) = self.chunks.remove(&index) else { return Ok(()) };
        match connection.filter(|_| chunk.given) {
            Some(connection) => connection.remove_region(&chunk.region),
            None => Ok(()),
        }
    }

    /// How many chunks are mapped.
    pub(super) fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Gives the server all chunks. It has a new table of regions without any.
    pub(super) fn give_chunks(&mut self, connection: &mut Connection) -> Result<(), ServerError> {
        self.chunks.values_mut().for_each(|chunk| chunk.given = false);
        for chunk in self.chunks.values_mut() {
            connection.add_region(&chunk.region)?;
            chunk.given = true;
        }
        Ok(())
    }

    /// The server is gone. The next one knows nothing.
    pub(super) fn lost(&mut self) {
        self.told.clear();
        self.chunks.values_mut().for_each(|chunk| chunk.given = false);
    }
}
