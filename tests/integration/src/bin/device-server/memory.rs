// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The memory that the front end has given, and the way of addresses to it.

use std::fs::File;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use crate::iotlb::{Iotlb, READ, WRITE};

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

/// An access that leads nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// There is no such memory, or no such access to it.
    Denied(u64),
    /// The front end is to be asked for this access.
    Unknown(u64, u8),
}

/// All regions. Addresses of accesses are guest-physical ones, or IOVAs where there are translations.
#[derive(Default)]
pub(crate) struct Memory {
    regions: Vec<Region>,
    pub(crate) iotlb: Option<Iotlb>,
}

impl Memory {
    /// Forgets the regions.
    pub(crate) fn clear(&mut self) {
        self.regions.clear();
    }

    /// Takes one more: its guest-physical address, length, address of the front end, offset in its file, and the file.
    pub(crate) fn add(&mut self, [guest, len, user, offset]: [u64; 4], file: File) -> Result<()> {
        let map = MmapRegion::from_file(FileOffset::new(file, offset), len.try_into()?).context("cannot map a region")?;
        self.regions.push(Region { guest, user, map });
        Ok(())
    }

    /// Gives one back.
    pub(crate) fn remove(&mut self, guest: u64, len: u64) -> Result<()> {
        let place = self.regions.iter().position(|region| (region.guest, region.len()) == (guest, len));
        self.regions.remove(place.context("the region that is taken back is none")?);
        Ok(())
    }

    /// How the address of a ring is accessed, which the front end calls `user`; it is an IOVA where there are translations.
    pub(crate) fn ring_address(&self, user: u64) -> Result<u64> {
        if self.iotlb.is_some() {
            return Ok(user);
        }
        let inside = |region: &&Region| user.checked_sub(region.user).is_some_and(|offset| offset < region.len());
        let region = self.regions.iter().find(inside).context("an address of a ring is in no region")?;
        Ok(region.guest + (user - region.user))
    }

    /// Memory at `address`, up to `len` bytes, for `access`.
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

    /// Fills `data` from `address` on.
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

    /// Writes `data` from `address` on.
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

    /// The 16-bit number at `address`, as the driver wrote it at last.
    pub(crate) fn short(&self, address: u64) -> Result<u16, Fault> {
        let slice = self.slice(address, 2, READ)?;
        slice.load(0, Ordering::SeqCst).map(u16::from_le).map_err(|_| Fault::Denied(address))
    }

    /// Writes the 16-bit number at `address`, after all that was written before.
    pub(crate) fn set_short(&self, address: u64, value: u16) -> Result<(), Fault> {
        let slice = self.slice(address, 2, WRITE)?;
        slice.store(value.to_le(), 0, Ordering::SeqCst).map_err(|_| Fault::Denied(address))
    }
}
