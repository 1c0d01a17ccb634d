// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! View of a device's memory for a short piece of work.

use std::cell::Cell;
use std::iter::FusedIterator;
use std::sync::RwLockReadGuard;

use iommu_bounce::Permissions;
use vm_memory::bitmap::BS;
use vm_memory::guest_memory::{Error, GuestMemorySliceIterator, Result};
use vm_memory::{GuestAddress, GuestMemory, Permissions as Access};

use super::near_memory::{NearMemory, NearSlices, RamSlice};
use super::table::{DmaTable, Entries, Stop};
use crate::ram::{Ram, RamBitmap};

/// View of the memory that a device can access. While the view exists, no mapping is removed. See [`DeviceMemory`](super::DeviceMemory).
///
/// The view implements [`GuestMemory`], so `virtio-queue` can read rings and descriptor chains through it. Slices cannot outlive the
/// view. A denied access fails, and is reported to the driver of the virtio-iommu.
pub struct DmaView<'m>(View<'m>);

enum View<'m> {
    All(NearMemory<'m>),
    Mapped(TableView<'m>),
}

struct TableView<'m> {
    table: &'m DmaTable,
    entries: RwLockReadGuard<'m, Entries>,
    /// Cache of the last found mapping, from the accessed address to the end of the mapping. The cache saves look-ups, because a device
    /// accesses its rings again and again.
    last: Cell<Option<Near<'m>>>,
}

#[derive(Clone, Copy)]
struct Near<'m> {
    iova: u64,
    access: Permissions,
    slice: RamSlice<'m>,
}

impl<'m> DmaView<'m> {
    pub(super) fn new(ram: &'m Ram, table: Option<&'m DmaTable>) -> Self {
        Self(match table {
            None => View::All(NearMemory::new(ram)),
            Some(table) => View::Mapped(TableView { table, entries: table.entries(), last: Cell::new(None) }),
        })
    }
}

fn wanted(access: Access) -> Permissions {
    match access {
        Access::No => Permissions::empty(),
        Access::Read => Permissions::READ,
        Access::Write => Permissions::WRITE,
        Access::ReadWrite => Permissions::READ | Permissions::WRITE,
    }
}

impl TableView<'_> {
    /// Returns the memory from `iova` on: at most `len` bytes, and at most up to the end of the mapping.
    fn part(&self, iova: u64, len: usize, access: Permissions) -> std::result::Result<RamSlice<'_>, Stop> {
        if let Some(near) = self.last.get()
            && near.access.contains(access)
            && let Some(offset) = iova.checked_sub(near.iova).and_then(|offset| usize::try_from(offset).ok())
            && let Ok(slice) = near.slice.subslice(offset, len)
        {
            return Ok(slice);
        }
        let found = self.entries.find(iova, access)?;
        if self.entries.device(&found).is_some() {
            // The slice borrows from the lock guard, so it cannot be cached.
            return self.entries.device_slice(&found, len).ok_or(Stop(iova));
        }
        // A mapping refers to memory in only one RAM region or chunk, so the rest of the mapping is one slice.
        let slice = self.table.slice(&found, found.len).ok_or(Stop(iova))?;
        self.last.set(Some(Near { iova, access, slice }));
        slice.subslice(0, len.min(slice.len())).map_err(|_| Stop(iova))
    }
}

impl GuestMemory for DmaView<'_> {
    type PhysicalMemory = Ram;
    type Bitmap = RamBitmap;

    fn check_range(&self, addr: GuestAddress, count: usize, access: Access) -> bool {
        match &self.0 {
            View::All(memory) => GuestMemory::check_range(memory, addr, count, access),
            View::Mapped(view) => {
                let outcome = view.entries.check(addr.0, count, wanted(access));
                outcome.inspect_err(|stop| view.table.report(*stop, wanted(access))).is_ok()
            }
        }
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Access,
    ) -> Result<impl GuestMemorySliceIterator<'a, BS<'a, RamBitmap>>> {
        Ok(match &self.0 {
            View::All(memory) => Slices::All(memory.slices(addr, count)),
            View::Mapped(view) => {
                Slices::Mapped(Mapped { view, next: Some(addr.0), left: count, access: wanted(access) })
            }
        })
    }
}

/// Iterator over the slices of one access.
enum Slices<'a, 'm> {
    All(NearSlices<'a>),
    Mapped(Mapped<'a, 'm>),
}

struct Mapped<'a, 'm> {
    view: &'a TableView<'m>,
    /// Address of the next part, or `None` after the last 64-bit address.
    next: Option<u64>,
    left: usize,
    access: Permissions,
}

impl<'a> Mapped<'a, '_> {
    fn part(&mut self) -> std::result::Result<RamSlice<'a>, Stop> {
        let iova = self.next.ok_or(Stop(u64::MAX))?;
        let slice = self.view.part(iova, self.left, self.access)?;
        self.next = iova.checked_add(slice.len() as u64);
        self.left -= slice.len();
        Ok(slice)
    }
}

impl<'a> Iterator for Slices<'a, '_> {
    type Item = Result<RamSlice<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::All(slices) => slices.next(),
            Self::Mapped(mapped) if mapped.left == 0 => None,
            Self::Mapped(mapped) => Some(mapped.part().map_err(|stop| {
                mapped.left = 0;
                mapped.view.table.report(stop, mapped.access);
                Error::InvalidGuestAddress(GuestAddress(stop.0))
            })),
        }
    }
}

impl FusedIterator for Slices<'_, '_> {}

impl<'a> GuestMemorySliceIterator<'a, BS<'a, RamBitmap>> for Slices<'a, '_> {}
