// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Translations and memory regions that the server of a device behind the virtio-iommu has.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use iommu_bounce::Permissions;

use super::connection::{Connection, FileRegion};
use super::error::ServerError;
use super::iotlb::{Iotlb, Kind};
use crate::dma::{Backing, DmaTable};

/// First address of window chunks in the server's memory table. This address is above all guest-physical addresses (52 bits).
const CHUNKS: u64 = 1 << 56;
/// First address of device memory in the server's memory table. This address is above all chunks. A region's address in the table is this
/// constant plus the region's address in this process. Addresses in this process have 47 bits, or 56 bits with five levels of page tables,
/// so the sum fits in 64 bits.
const DEVICES: u64 = 1 << 57;
/// Maximum number of denied accesses that are reported to one driver.
const REPORTS: usize = 64;
/// Page size for reports. Several denied accesses to one page are reported as one access.
const PAGE: u64 = 4096;

/// Name of a region that is not RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RegionName {
    /// Window chunk with this index.
    Chunk(u32),
    /// Device memory at this address in this process.
    Device(usize),
}

impl RegionName {
    /// Returns the region's address in the server's memory table. `len` is the size of the region in bytes.
    fn address(self, len: u64) -> u64 {
        match self {
            Self::Chunk(index) => CHUNKS + u64::from(index) * len,
            Self::Device(address) => DEVICES + address as u64,
        }
    }
}

/// Part of a file, from an offset on.
pub(super) struct FilePart {
    pub(super) file: File,
    pub(super) offset: u64,
}

impl FilePart {
    /// Returns the part that starts at offset 0 of `file`.
    pub(super) fn whole(file: File) -> Self {
        Self { file, offset: 0 }
    }
}

/// Region other than RAM that is mapped for the device.
struct Region {
    region: FileRegion,
    /// Number of mappings of the region.
    uses: u32,
    /// True if the current server has the region.
    given: bool,
}

/// Translations that the current server has, and memory regions that are mapped for the device. RAM regions are not included.
pub(super) struct Translation {
    table: Arc<DmaTable>,
    /// First IOVA and length of each mapping whose translation the current server has.
    sent: BTreeMap<u64, u64>,
    regions: BTreeMap<RegionName, Region>,
    /// Denied accesses that were reported to the guest: number of the page, and kind of access.
    reported: Vec<(u64, Permissions)>,
}

impl Translation {
    /// Returns the translations of a device whose mappings are in `table`. The server has no translation yet.
    pub(super) fn new(table: Arc<DmaTable>) -> Self {
        Self { table, sent: BTreeMap::new(), regions: BTreeMap::new(), reported: Vec::new() }
    }

    /// Sends the server the translation that `access` to `iova` needs. If no mapping allows the access, reports the access to the guest and
    /// returns false. Also returns false, without a report, if the server does not have the mapping's region.
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
        // Record the translation before it is sent. The caller holds the session's lock, so a thread that unmaps the range later sees the
        // record.
        self.sent.insert(iova, size);
        connection.update(Iotlb { iova, size, user, permissions, kind: Kind::Update })?;
        Ok(true)
    }

    /// Reports a denied access to the guest, once for each page and kind of access.
    pub(super) fn report(&mut self, iova: u64, access: Permissions) {
        let access_to = (iova / PAGE, access);
        if self.reported.len() < REPORTS && !self.reported.contains(&access_to) {
            self.reported.push(access_to);
            self.table.report_stopped(iova, access);
        }
    }

    /// Forgets which accesses were reported, because the next driver must get its own reports.
    pub(super) fn reset(&mut self) {
        self.reported.clear();
    }

    /// Asks the server to drop its translations in this range within `time`. Does nothing if the server has no translation in this range.
    pub(super) fn forget(
        &mut self,
        connection: &mut Connection,
        iova: u64,
        len: u64,
        time: Duration,
    ) -> Result<(), ServerError> {
        let last = iova.saturating_add(len.saturating_sub(1));
        let known: Vec<u64> = self.sent.range(iova..=last).map(|(iova, _)| *iova).collect();
        if known.is_empty() {
            return Ok(());
        }
        connection.invalidate(iova, len, time)?;
        known.iter().for_each(|iova| _ = self.sent.remove(iova));
        Ok(())
    }

    /// Adds a use of a region of `len` bytes. At the first use, sends the region over `connection`. Without a connection, the next server
    /// receives the region together with the RAM.
    ///
    /// `has` is the number of RAM regions that the server has. `most` is the maximum number of regions that the server supports.
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
            return Err(ServerError::Unfit(format!(
                "supports {most} memory regions, and all are in use; use a server with more regions"
            )));
        }
        let mut region =
            Region { region: FileRegion { address: name.address(len), len, offset, file }, uses: 1, given: false };
        if let Some(connection) = connection {
            match connection.add_region(&region.region) {
                Ok(()) => region.given = true,
                // The server is gone, and the next server receives the region.
                Err(ServerError::Gone(_)) => {}
                Err(error) => return Err(error),
            }
        }
        self.regions.insert(name, region);
        Ok(())
    }

    /// Removes a use of a region. After the last use, removes the region from the server.
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

    /// Returns the number of mapped regions, without RAM.
    pub(super) fn regions(&self) -> usize {
        self.regions.len()
    }

    /// Sends the server all regions except RAM, after the server has received a new memory table that contains only RAM.
    pub(super) fn give_regions(&mut self, connection: &mut Connection) -> Result<(), ServerError> {
        self.regions.values_mut().for_each(|region| region.given = false);
        for region in self.regions.values_mut() {
            connection.add_region(&region.region)?;
            region.given = true;
        }
        Ok(())
    }

    /// Handles the loss of the server. The next server has no translations and no regions.
    pub(super) fn lost(&mut self) {
        self.sent.clear();
        self.regions.values_mut().for_each(|region| region.given = false);
    }
}
