// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The I/O address space of a server's device behind virtio-iommu.
//!
//! A server that has a descriptor of guest RAM reaches all of it, whatever the guest maps. So RAM that is mapped is
//! announced without one: the server gets at it by messages, which this side checks. A chunk of a window is a file of its
//! own, and goes to the server with its descriptor. What the server has of a chunk cannot be taken back: the chunk goes
//! to nobody else afterwards.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use iommu_bounce::{DmaMapper, MapError, MapperLimits, Permissions, UnmapError};
use vm_memory::VolatileSlice;

use super::client::Client;
use super::connection::{CallError, DmaTarget};
use crate::dma::{Backing, DmaTable, RemoveError};
use crate::virtio::iommu::IommuHandle;

/// What is mapped at most: what the page tables of most hosts' IOMMUs can translate. A server names no bound.
const LAST_IOVA: u64 = (1 << 48) - 1;

/// Maps for the device of one server, with the permissions asked for and no more.
///
/// An UNMAP always succeeds: what it takes away is refused from then on, whatever the server says, and one that does not
/// take the news is given up. Of a server that is gone, mappings are kept in the table only: nobody is there to use them,
/// and the other devices of a domain are to go on.
pub struct UserMapper {
    client: Arc<Client>,
    table: Arc<DmaTable>,
}

impl UserMapper {
    pub(super) fn new(client: Arc<Client>, table: Arc<DmaTable>) -> Self {
        Self { client, table }
    }

    /// To be called before the mapper goes to `iommu`: its windows can be mapped from then on.
    pub fn connect(&self, iommu: &IommuHandle) {
        if let Some(windows) = iommu.windows() {
            self.table.set_windows(windows.clone());
        }
    }

    /// Tells the server of a mapping.
    fn announce(&self, iova: u64, len: u64, memory: Backing, permissions: Permissions) -> Result<(), MapError> {
        let file = match (memory, self.table.windows()) {
            (Backing::Chunk(index), Some(windows)) => windows.hand_out(index, permissions)?,
            _ => None,
        };
        let descriptor = file.as_ref().map(|file| (file.as_fd(), 0));
        self.client.map(iova, len, permissions, descriptor).map_err(classify)
    }
}

/// What a server's refusal means to the engine.
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
        // Memory of another device is neither: it cannot be given to another process, and nobody here may access it.
        let memory = self.table.backing_of(&memory).ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
        if self.table.count() as u64 >= u64::from(self.client.abilities().mappings) {
            return Err(MapError::NoResources);
        }
        // First, as the server may use it before its answer is here.
        if !self.table.insert(iova, len, memory, permissions) {
            return Err(MapError::Exists);
        }
        if self.client.gone().is_some() {
            return Ok(());
        }
        self.announce(iova, len, memory, permissions).inspect_err(|_| {
            // It was just put there.
            let _ = self.table.remove(iova, len, |_, _| {});
        })
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError> {
        let mut removed = Vec::new();
        self.table.remove(iova, len, |iova, len| removed.push((iova, len))).map_err(|error| match error {
            RemoveError::NotWhole => UnmapError::NotMapped,
            RemoveError::Busy => UnmapError::Host(io::ErrorKind::TimedOut.into()),
        })?;
        for (iova, len) in removed {
            // A server gets back what it was given, piece by piece.
            if let Err(error @ CallError::Refused(_)) = self.client.unmap(iova, len) {
                self.client.give_up(&format!("does not take DMA_UNMAP ({error})"));
            }
        }
        Ok(())
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

impl Drop for UserMapper {
    fn drop(&mut self) {
        // Nothing is reached any more, though the server may live on.
        self.table.clear();
    }
}
