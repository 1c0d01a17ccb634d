// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! I/O address space of a server's device behind virtio-iommu.
//!
//! A server that has a descriptor of guest RAM can access all RAM in the file, whatever the guest maps. So Carom announces mapped RAM
//! without a descriptor. The server reads and writes this RAM by messages, which Carom checks. A chunk of a window has its own file, and
//! Carom sends the file's descriptor to the server. A descriptor cannot be taken back, so no other endpoint gets the chunk afterwards.
//!
//! Carom also announces guest-visible memory of other devices, again without a descriptor. If this memory is a file that is mapped into the
//! guest, the server can read and write it by messages. If a message accesses device registers, the server gets an error, and the guest
//! gets a fault.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use iommu_bounce::{DmaMapper, MapError, MapperLimits, Permissions, UnmapError};
use vm_memory::VolatileSlice;

use super::client::Client;
use super::connection::{CallError, DmaTarget};
use crate::dma::{Backing, DmaTable, MapperTable};
use crate::guest_visible::GuestVisibleMemory;
use crate::peer_timeouts::Operation;
use crate::windows::WindowMemory;

/// Last IOVA that can be mapped. IOVAs have 48 bits, as in the page tables of most IOMMUs. Servers report no limit.
const LAST_IOVA: u64 = (1 << 48) - 1;

/// Mapper for the device of one server. The mapper grants exactly the permissions that the caller asks for.
///
/// An UNMAP of whole mappings succeeds whatever the server answers, because Carom rejects all later accesses to the range. If a server
/// rejects DMA_UNMAP, Carom ends the connection to this server. After the connection has ended, Carom records mappings only in the table,
/// and does not announce them. The other devices of the domain continue to work.
pub struct UserMapper {
    /// The table is the first field. So the table is cleared before the client is dropped.
    table: MapperTable,
    client: Arc<Client>,
}

impl UserMapper {
    pub(super) fn new(client: Arc<Client>, table: Arc<DmaTable>) -> Self {
        Self { table: MapperTable(table), client }
    }

    /// Makes chunks of `windows`, and the guest-visible memory of `devices`, mappable. Call this function before the virtio-iommu gets the
    /// mapper.
    pub fn connect(&self, windows: Option<&Arc<WindowMemory>>, devices: Option<&Arc<GuestVisibleMemory>>) {
        self.table.connect(windows, devices);
    }

    /// Announces a mapping to the server.
    fn announce(&self, iova: u64, len: u64, memory: Backing, permissions: Permissions) -> Result<(), MapError> {
        let file = match (memory, self.table.windows()) {
            (Backing::Chunk(index), Some(windows)) => windows.hand_out(index, permissions)?,
            _ => None,
        };
        let descriptor = file.as_ref().map(|file| (file.as_fd(), 0));
        self.client.map(iova, len, permissions, descriptor).map_err(classify)
    }
}

/// Converts a server's refusal to an error of the engine.
fn classify(error: CallError) -> MapError {
    let error = io::Error::from(error);
    match error.raw_os_error() {
        Some(libc::EEXIST) => MapError::Exists,
        Some(libc::ENOSPC | libc::ENOMEM) => MapError::NoResources,
        _ => MapError::Host(error),
    }
}

impl DmaMapper for UserMapper {
    fn map(&mut self, iova: u64, memory: VolatileSlice<'_>, permissions: Permissions) -> Result<(), MapError> {
        let len = memory.len() as u64;
        if self.table.count() as u64 >= u64::from(self.client.abilities().mappings) {
            return Err(MapError::NoResources);
        }
        // Insert the entry before the request is sent, because the server may use the mapping before its answer arrives.
        let memory = self.table.insert_slice(iova, &memory, permissions)?;
        if self.client.gone().is_some() {
            return Ok(());
        }
        self.announce(iova, len, memory, permissions).inspect_err(|_| {
            // Ignore the result. The removal cannot fail, because the entry was inserted above.
            let _ = self.table.remove(iova, len, |_, _| {});
        })
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError> {
        let mut removed = Vec::new();
        self.table.remove(iova, len, |iova, len| removed.push((iova, len)))?;
        let _operation = Operation::begin();
        for (iova, len) in removed {
            // Each DMA_UNMAP must undo exactly one DMA_MAP.
            if let Err(error @ CallError::Refused(_)) = self.client.unmap(iova, len) {
                self.client.give_up(&format!("did not unmap memory at DMA_UNMAP ({error})"));
            }
        }
        Ok(())
    }

    /// Returns false. Carom serves the server's messages through the table, which refers to a chunk's address in this process. While the
    /// guest does not see the chunk, other memory is mapped at this address.
    fn keeps_page_tables(&self) -> bool {
        false
    }

    fn maps_hidden_chunks(&self) -> bool {
        false
    }

    fn limits(&self) -> MapperLimits {
        let abilities = self.client.abilities();
        MapperLimits {
            page_size_mask: !(abilities.granule - 1),
            iova_ranges: vec![0..=LAST_IOVA],
            max_mappings: Some(abilities.mappings),
        }
    }
}

impl DmaTarget for DmaTable {
    fn read(&self, iova: u64, data: &mut [u8]) -> bool {
        self.read(iova, data)
    }

    fn write(&self, iova: u64, data: &[u8]) -> bool {
        self.write(iova, data)
    }
}
