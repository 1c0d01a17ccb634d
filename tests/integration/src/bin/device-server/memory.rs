// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory that the front end shares with this server, and the translation of addresses.

use std::fs::File;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use crate::iotlb::{Iotlb, READ, WRITE};

/// Memory region that the front end shares.
struct Region {
    /// First guest-physical address.
    guest: u64,
    /// First address in the front end's address space.
    user: u64,
    map: MmapRegion,
}

impl Region {
    fn len(&self) -> u64 {
        self.map.size() as u64
    }
}

/// Failed access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// No region has this address, or the front end denies this access.
    Denied(u64),
    /// The translation for this access is unknown: ask the front end.
    Unknown(u64, u8),
}

/// All memory regions. Accesses use guest-physical addresses, or IOVAs if addresses are translated.
#[derive(Default)]
pub(crate) struct Memory {
    regions: Vec<Region>,
    pub(crate) iotlb: Option<Iotlb>,
}

impl Memory {
    /// Removes all regions.
    pub(crate) fn clear(&mut self) {
        self.regions.clear();
    }

    /// Adds a region. The numbers are the guest-physical address, the length, the address in the front end, and the offset in
    /// `file`.
    pub(crate) fn add(&mut self, [guest, len, user, offset]: [u64; 4], file: File) -> Result<()> {
        let map = MmapRegion::from_file(FileOffset::new(file, offset), len.try_into()?)
            .context("cannot map a memory region of the front end")?;
        self.regions.push(Region { guest, user, map });
        Ok(())
    }

    /// Removes the region with this guest-physical address and length.
    pub(crate) fn remove(&mut self, guest: u64, len: u64) -> Result<()> {
        let place = self.regions.iter().position(|region| (region.guest, region.len()) == (guest, len));
        self.regions.remove(place.context("the front end removed a memory region that does not exist")?);
        Ok(())
    }

    /// Converts a ring's address that the front end has sent. Returns the address to use for accesses. If addresses are translated,
    /// `user` is already an IOVA. Otherwise, `user` is in the front end's address space.
    pub(crate) fn ring_address(&self, user: u64) -> Result<u64> {
        if self.iotlb.is_some() {
            return Ok(user);
        }
        let inside = |region: &&Region| user.checked_sub(region.user).is_some_and(|offset| offset < region.len());
        let region = self
            .regions
            .iter()
            .find(inside)
            .context("the front end set a ring's address outside of all memory regions")?;
        Ok(region.guest + (user - region.user))
    }

    /// Returns up to `len` bytes of memory at `address`, if the device may access them with `access`.
    fn slice(&self, address: u64, len: usize, access: u8) -> Result<VolatileSlice<'_>, Fault> {
        let denied = Fault::Denied(address);
        let (target, most) = match &self.iotlb {
            None => (address, u64::MAX),
            Some(iotlb) if iotlb.is_denied(address, access) => return Err(denied),
            Some(iotlb) => iotlb.find(address, access).ok_or(Fault::Unknown(address, access))?,
        };
        let start = |region: &Region| if self.iotlb.is_some() { region.user } else { region.guest };
        let inside = |region: &&Region| target.checked_sub(start(region)).is_some_and(|offset| offset < region.len());
        let region = self.regions.iter().find(inside).ok_or(denied)?;
        let offset = usize::try_from(target - start(region)).map_err(|_| denied)?;
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let len = len.min(region.map.size() - offset).min(most);
        region.map.as_volatile_slice().subslice(offset, len).map_err(|_| denied)
    }

    /// Checks that the device may access `len` bytes at `address` with `access`, and that all translations are known.
    pub(crate) fn check(&self, address: u64, len: usize, access: u8) -> Result<(), Fault> {
        let mut done = 0;
        while done < len {
            let at = address.checked_add(done as u64).ok_or(Fault::Denied(address))?;
            done += self.slice(at, len - done, access)?.len();
        }
        Ok(())
    }

    /// Reads `data` from `address`.
    pub(crate) fn read(&self, address: u64, data: &mut [u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < data.len() {
            let at = address.checked_add(done as u64).ok_or(Fault::Denied(address))?;
            let slice = self.slice(at, data.len() - done, READ)?;
            slice.read_slice(&mut data[done..done + slice.len()], 0).map_err(|_| Fault::Denied(at))?;
            done += slice.len();
        }
        Ok(())
    }

    /// Writes `data` to `address`.
    pub(crate) fn write(&self, address: u64, data: &[u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < data.len() {
            let at = address.checked_add(done as u64).ok_or(Fault::Denied(address))?;
            let slice = self.slice(at, data.len() - done, WRITE)?;
            slice.write_slice(&data[done..done + slice.len()], 0).map_err(|_| Fault::Denied(at))?;
            done += slice.len();
        }
        Ok(())
    }

    /// Atomically reads the 16-bit number at `address`.
    pub(crate) fn short(&self, address: u64) -> Result<u16, Fault> {
        let slice = self.slice(address, 2, READ)?;
        slice.load(0, Ordering::SeqCst).map(u16::from_le).map_err(|_| Fault::Denied(address))
    }

    /// Atomically writes the 16-bit number at `address`, after all earlier writes.
    pub(crate) fn set_short(&self, address: u64, value: u16) -> Result<(), Fault> {
        let slice = self.slice(address, 2, WRITE)?;
        slice.store(value.to_le(), 0, Ordering::SeqCst).map_err(|_| Fault::Denied(address))
    }
}
