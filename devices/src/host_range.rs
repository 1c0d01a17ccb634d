// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Ranges of this process's memory that are mapped into the guest. If a range belongs to a device, other devices of the guest may access
//! the range.

use std::any::Any;
use std::fs::File;
use std::sync::Arc;

use iommu_bounce::DeviceMemoryKind;
use vm_memory::VolatileSlice;

/// Range of this process's memory that will be mapped into the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRange {
    /// Address in this process, page-aligned.
    pub address: usize,
    /// Length in bytes, a multiple of the page size.
    pub len: usize,
}

/// Position in a host file.
#[derive(Clone, Debug)]
pub struct FilePlace {
    /// The file.
    pub file: Arc<File>,
    /// Offset in bytes.
    pub offset: u64,
}

/// Content of a range.
#[derive(Clone, Debug)]
pub enum DeviceContent {
    /// Registers or memory of a host device. This process never accesses such a range, because an access could end the process if the
    /// device does not respond.
    Registers,
    /// Pages of host memory. This process may access the pages like guest RAM.
    Pages {
        /// File that holds the pages, for servers that need access. `None` if no file holds the guest's writes.
        file: Option<FilePlace>,
    },
}

/// Range of this process's memory that a device maps into the guest. The range stays mapped while this value or a clone of it exists.
#[derive(Clone)]
pub struct DeviceRange {
    host: HostRange,
    read_only: bool,
    content: DeviceContent,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl DeviceRange {
    /// Creates the range `host`. If `read_only` is true, neither the guest nor a device may write the range.
    ///
    /// # Safety
    /// The range must stay mapped in this process as long as `owner` exists. Nothing in this process may hold a Rust reference to the bytes
    /// of the range. If `content` is [`Pages`](DeviceContent::Pages), the range must be readable. The range must also be writable, unless
    /// `read_only` is true.
    pub unsafe fn new(
        host: HostRange,
        read_only: bool,
        content: DeviceContent,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { host, read_only, content, _owner: owner }
    }

    /// Returns the address and length of the range in this process.
    pub fn host(&self) -> HostRange {
        self.host
    }

    /// True if neither the guest nor a device may write the range.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the kind of this memory. The engine's limit on mapped bytes applies only to [`DeviceMemoryKind::Pages`].
    pub(crate) fn kind(&self) -> DeviceMemoryKind {
        match self.content {
            DeviceContent::Registers => DeviceMemoryKind::Registers,
            DeviceContent::Pages { .. } => DeviceMemoryKind::Pages,
        }
    }

    /// Returns the file that holds the pages, or `None` if there is no such file.
    pub(crate) fn file(&self) -> Option<&FilePlace> {
        match &self.content {
            DeviceContent::Pages { file } => file.as_ref(),
            DeviceContent::Registers => None,
        }
    }

    /// Returns the offset of `address` in the range in bytes, if all `len` bytes from `address` on are in the range.
    pub(crate) fn offset_of(&self, address: usize, len: usize) -> Option<usize> {
        let offset = address.checked_sub(self.host.address)?;
        let end = offset.checked_add(len)?;
        (end <= self.host.len).then_some(offset)
    }

    /// Returns `len` bytes at `offset`, or `None` if the range ends before `offset + len`. Only mappers call this function, because they
    /// use the address without accessing the bytes.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Option<VolatileSlice<'_>> {
        let address = self.host.address.checked_add(offset)?;
        self.offset_of(address, len)?;
        // SAFETY: The part is within the range, which stays mapped as long as `self` keeps its owner. The caller of `new` has
        // promised that no reference to its bytes exists.
        Some(unsafe { VolatileSlice::new(std::ptr::with_exposed_provenance_mut(address), len) })
    }

    /// Like [`part`](Self::part), for accesses by this process. Also returns `None` for registers.
    pub(crate) fn pages(&self, offset: usize, len: usize) -> Option<VolatileSlice<'_>> {
        (self.kind() == DeviceMemoryKind::Pages).then(|| self.part(offset, len)).flatten()
    }
}

#[cfg(test)]
pub(crate) mod test_support {
    use std::sync::Weak;

    use vm_memory::mmap::MmapRegion;

    use super::*;

    /// Creates a range of `len` bytes with `content`. The weak reference is valid while the range is mapped.
    pub(crate) fn range(len: usize, read_only: bool, content: DeviceContent) -> (DeviceRange, Weak<MmapRegion>) {
        let region = Arc::new(MmapRegion::<()>::new(len).expect("there is memory"));
        let host = HostRange { address: region.as_ptr().expose_provenance(), len };
        let weak = Arc::downgrade(&region);
        // SAFETY: The region is mapped, readable and writable, until it is dropped, and gives out no references.
        (unsafe { DeviceRange::new(host, read_only, content, region) }, weak)
    }

    /// Creates a range of pages without a file.
    pub(crate) fn pages(len: usize) -> (DeviceRange, Weak<MmapRegion>) {
        range(len, false, DeviceContent::Pages { file: None })
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::test_support::{pages, range};
    use super::*;

    #[test]
    fn parts_lie_within_the_range() {
        let (range, _) = pages(0x3000);
        let HostRange { address, len } = range.host();
        assert_eq!(len, 0x3000);
        let part = range.pages(0x1000, 0x2000).unwrap();
        assert_eq!((part.ptr_guard().as_ptr().addr(), part.len()), (address + 0x1000, 0x2000));
        part.write_obj(5u8, 0).unwrap();
        assert_eq!(range.pages(0xfff, 2).unwrap().read_obj::<u16>(0).unwrap(), 0x500);
        for (offset, len) in [(0x1000, 0x2001), (0x3000, 1), (usize::MAX, 1), (0, usize::MAX)] {
            assert!(range.part(offset, len).is_none(), "{offset:#x}, {len:#x}");
        }
        assert_eq!(range.offset_of(address + 0x1000, 0x2000), Some(0x1000));
        assert_eq!(range.offset_of(address + 0x1000, 0x2001), None);
        assert_eq!(range.offset_of(address - 1, 1), None);
        assert_eq!(range.offset_of(address + 1, usize::MAX), None);
    }

    #[test]
    fn registers_are_available_only_to_mappers() {
        let (range, _) = range(0x1000, true, DeviceContent::Registers);
        assert!(range.is_read_only() && range.part(0, 0x1000).is_some() && range.pages(0, 0x1000).is_none());
        assert!(range.file().is_none());
    }

    #[test]
    fn range_stays_mapped_until_its_last_clone_is_dropped() {
        let (range, mapped) = pages(0x1000);
        let clone = range.clone();
        drop(range);
        assert!(mapped.upgrade().is_some());
        drop(clone);
        assert!(mapped.upgrade().is_none());
    }
}
