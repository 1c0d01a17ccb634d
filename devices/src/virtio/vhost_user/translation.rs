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
/// Where they know memory of devices: behind all chunks. Addresses of this process have 47 bits, or 56 with five levels of page tables.
const DEVICES: u64 = 1 << 57;
/// Most accesses of a server that were stopped of which a driver is told.
const REPORTS: usize = 64;
/// What a report is about.
const PAGE: u64 = 4096;

/// Name of a region that is not RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RegionName {
    /// The chunk of a window of this index.
    Chunk(u32),
    /// Memory of a device that is at this address in this process.
    Device(usize),
}

impl RegionName {
    /// Where servers know it, if it has `len` bytes.
    fn address(self, len: u64) -> u64 {
        match self {
            Self::Chunk(index) => CHUNKS + u64::from(index) * len,
            Self::Device(address) => DEVICES + address as u64,
        }
    }
}

/// A file from this offset on.
pub(super) struct FilePart {
    pub(super) file: File,
    pub(super) offset: u64,
}

impl FilePart {
    /// All of a file.
    pub(super) fn whole(file: File) -> Self {
        Self { file, offset: 0 }
    }
}

/// A region that is mapped for the device, RAM apart.
struct Region {
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
    regions: BTreeMap<RegionName, Region>,
    /// Pages and accesses of which the guest was told.
    reported: Vec<(u64, Permissions)>,
}

impl Translation {
    /// By `table`.
    pub(super) fn new(table: Arc<DmaTable>) -> Self {
        Self { table, told: BTreeMap::new(), regions: BTreeMap::new(), reported: Vec::new() }
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
        let (region, offset) = match mapping.backing {
            Backing::Ram(gpa) => (None, gpa),
            Backing::Chunk(index) => (Some(RegionName::Chunk(index)), 0),
            Backing::Device { range, offset } => (Some(RegionName::Device(range)), offset as u64),
        };
        let user = match region.map(|name| self.regions.get(&name)) {
            None => offset,
            Some(Some(region)) => region.region.address + offset,
            Some(None) => return Ok(false),
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

    /// This memory of `len` bytes is mapped. The server gets it at once if it `has` so many regions and takes `most`, and otherwise when it
    /// gets RAM.
    pub(super) fn add_region(
        &mut self,
        connection: Option<&mut Connection>,
        name: RegionName,
        (len, FilePart { file, offset }): (u64, FilePart),
        (has, most): (usize, usize),
    ) -> Result<(), ServerError> {
        if let Some(region) = self.regions.get_mut(&name) {
            region.uses += 1;
            return Ok(());
        }
        if has + self.regions.len() >= most {
            return Err(ServerError::Unfit(format!("takes {most} regions, and has them all")));
        }
        let mut region =
            Region { region: FileRegion { address: name.address(len), len, offset, file }, uses: 1, given: false };
        if let Some(connection) = connection {
            match connection.add_region(&region.region) {
                Ok(()) => region.given = true,
                // The next server gets it.
                Err(ServerError::Gone(_)) => {}
                Err(error) => return Err(error),
            }
        }
        self.regions.insert(name, region);
        Ok(())
    }

    /// One mapping less of this memory.
    pub(super) fn take_region(
        &mut self,
        connection: Option<&mut Connection>,
        name: RegionName,
    ) -> Result<(), ServerError> {
        let Some(region) = self.regions.get_mut(&name) else { return Ok(()) };
        region.uses -= 1;
        if region.uses != 0 {
            return Ok(());
        }
        let Some(region) = self.regions.remove(&name) else { return Ok(()) };
        match connection.filter(|_| region.given) {
            Some(connection) => connection.remove_region(&region.region),
            None => Ok(()),
        }
    }

    /// Number of regions that are mapped, RAM apart.
    pub(super) fn regions(&self) -> usize {
        self.regions.len()
    }

    /// Gives the server all regions, RAM apart. It has a new table of regions without any of them.
    pub(super) fn give_regions(&mut self, connection: &mut Connection) -> Result<(), ServerError> {
        self.regions.values_mut().for_each(|region| region.given = false);
        for region in self.regions.values_mut() {
            connection.add_region(&region.region)?;
            region.given = true;
        }
        Ok(())
    }

    /// The server is gone. The next one knows nothing.
    pub(super) fn lost(&mut self) {
        self.told.clear();
        self.regions.values_mut().for_each(|region| region.given = false);
    }
}
