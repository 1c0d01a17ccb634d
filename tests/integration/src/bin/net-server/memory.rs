// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory that the front end has given.

use std::fs::File;

use anyhow::{Context, Result};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

/// A region.
struct Region {
    /// First guest-physical address.
    guest: u64,
    /// First address by which the front end calls it.
    user: u64,
    map: MmapRegion,
}

impl Region {
    fn len(&self) -> u64 {
        self.map.size() as u64
    }
}

/// An address that leads nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault(pub(crate) u64);

/// All regions.
#[derive(Default)]
pub(crate) struct Memory(Vec<Region>);

impl Memory {
    /// Forgets them.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Takes one more: its guest-physical address, length, address of the front end, offset in its file, and the file.
    pub(crate) fn add(&mut self, [guest, len, user, offset]: [u64; 4], file: File) -> Result<()> {
        let map = MmapRegion::from_file(FileOffset::new(file, offset), len.try_into()?).context("mapping a region")?;
        self.0.push(Region { guest, user, map });
        Ok(())
    }

    /// Gives one back.
    pub(crate) fn remove(&mut self, guest: u64, len: u64) -> Result<()> {
        let place = self.0.iter().position(|region| (region.guest, region.len()) == (guest, len));
        self.0.remove(place.context("the region that is taken back is none")?);
        Ok(())
    }

    /// The guest-physical address of what the front end calls `user`.
    pub(crate) fn guest_address(&self, user: u64) -> Result<u64> {
        let inside = |region: &&Region| user.checked_sub(region.user).is_some_and(|offset| offset < region.len());
        let region = self.0.iter().find(inside).context("an address of a ring is in no region")?;
        Ok(region.guest + (user - region.user))
    }

    /// Memory at `address`, up to `len` bytes.
    fn slice(&self, address: u64, len: usize) -> Result<VolatileSlice<'_>, Fault> {
        let fault = Fault(address);
        let inside = |region: &&Region| address.checked_sub(region.guest).is_some_and(|offset| offset < region.len());
        let region = self.0.iter().find(inside).ok_or(fault)?;
        let offset = usize::try_from(address - region.guest).map_err(|_| fault)?;
        let len = len.min(region.map.size() - offset);
        region.map.as_volatile_slice().subslice(offset, len).map_err(|_| fault)
    }

    /// Fills `data` from `address` on.
    pub(crate) fn read(&self, address: u64, data: &mut [u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < data.len() {
            let at = address.checked_add(done as u64).ok_or(Fault(address))?;
            let slice = self.slice(at, data.len() - done)?;
            slice.read_slice(&mut data[done..done + slice.len()], 0).map_err(|_| Fault(at))?;
            done += slice.len();
        }
        Ok(())
    }

    /// Writes `data` from `address` on.
    pub(crate) fn write(&self, address: u64, data: &[u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < data.len() {
            let at = address.checked_add(done as u64).ok_or(Fault(address))?;
            let slice = self.slice(at, data.len() - done)?;
            slice.write_slice(&data[done..done + slice.len()], 0).map_err(|_| Fault(at))?;
            done += slice.len();
        }
        Ok(())
    }

    /// The 16-bit number at `address`, as the driver wrote it at last.
    pub(crate) fn short(&self, address: u64) -> Result<u16, Fault> {
        let slice = self.slice(address, 2)?;
        slice.load(0, std::sync::atomic::Ordering::SeqCst).map(u16::from_le).map_err(|_| Fault(address))
    }

    /// Writes the 16-bit number at `address`, after all that was written before.
    pub(crate) fn set_short(&self, address: u64, value: u16) -> Result<(), Fault> {
        let slice = self.slice(address, 2)?;
        slice.store(value.to_le(), 0, std::sync::atomic::Ordering::SeqCst).map_err(|_| Fault(address))
    }
}
