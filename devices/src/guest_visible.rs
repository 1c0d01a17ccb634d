// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Device memory that is visible to the guest. Other devices can access this memory by DMA.

use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use iommu_bounce::{Permissions, ThenDevice};

use crate::host_range::DeviceRange;
use crate::platform::{HostRange, MemorySlots};
use crate::sync::lock;

/// Function that revokes access to a range for all devices behind the virtual IOMMU. Its arguments are the guest-physical address and the
/// length of the range. The function returns `false` if the host cannot revoke the access.
pub type Revoke = Box<dyn Fn(u64, u64) -> bool + Send + Sync>;

/// Memory of a device that is mapped into the guest.
struct VisibleSlot {
    gpa: u64,
    slot: u32,
    /// Keeps the memory mapped in this process as long as the slot exists.
    range: DeviceRange,
    /// True if the slot is about to be removed. New IOMMU mappings of the slot's memory then fail.
    removing: bool,
}

impl VisibleSlot {
    /// Returns the offset of `gpa` in the slot in bytes, if all `len` bytes from `gpa` on are in the slot.
    fn offset_of(&self, gpa: u64, len: usize) -> Option<usize> {
        let offset = usize::try_from(gpa.checked_sub(self.gpa)?).ok()?;
        let end = offset.checked_add(len)?;
        (end <= self.range.host().len).then_some(offset)
    }
}

/// Memory slots for BARs, and a list of the slots' contents. [`GuestRam::device`](iommu_bounce::GuestRam::device) looks memory up in this
/// list. Before a slot is removed, other devices lose access to the contents of the slot.
pub struct GuestVisibleMemory {
    slots: Arc<dyn MemorySlots>,
    visible: Mutex<Vec<VisibleSlot>>,
    revoke: OnceLock<Revoke>,
}

impl GuestVisibleMemory {
    /// Creates a wrapper that uses `slots` to create and remove slots.
    pub fn new(slots: Arc<dyn MemorySlots>) -> Self {
        Self { slots, visible: Mutex::default(), revoke: OnceLock::new() }
    }

    /// Allows devices to access the contents of the slots from now on. `revoke` revokes this access, and is called with no lock held. Only
    /// the first call of `set_revoke` has an effect.
    pub fn set_revoke(&self, revoke: Revoke) {
        // Ignore a second call. No second call happens, because no VM has two IOMMUs.
        let _ = self.revoke.set(revoke);
    }

    /// Calls `then` with the device memory at `[gpa, gpa + len)`, if one BAR holds the whole range and allows `permissions`.
    ///
    /// No lock of `self` is held during `then`, because a mapper looks the memory up with [`at_host`](Self::at_host). Until the caller has
    /// recorded the mapping, the caller holds the lock that `revoke` takes. So the removal of a slot waits for the caller.
    pub(crate) fn with(&self, gpa: u64, len: u64, permissions: Permissions, then: ThenDevice<'_>) {
        let Ok(len) = usize::try_from(len) else { return };
        if self.revoke.get().is_none() {
            return;
        }
        let found = lock(&self.visible).iter().find_map(|visible_slot| {
            let offset = visible_slot.offset_of(gpa, len)?;
            let allowed =
                !visible_slot.removing && (!visible_slot.range.is_read_only() || permissions == Permissions::READ);
            allowed.then(|| (visible_slot.range.clone(), offset))
        });
        if let Some((range, offset)) = found
            && let Some(part) = range.part(offset, len)
        {
            then(part, range.kind());
        }
    }

    /// Returns the range that contains the `len` bytes at `address` in this process, and the offset of `address` in the range.
    pub(crate) fn at_host(&self, address: usize, len: usize) -> Option<(DeviceRange, usize)> {
        let visible = lock(&self.visible);
        visible
            .iter()
            .find_map(|visible_slot| Some((visible_slot.range.clone(), visible_slot.range.offset_of(address, len)?)))
    }
}

impl GuestVisibleMemory {
    /// Revokes other devices' access to the contents of a slot. If `removing` is true, other devices cannot get access again.
    fn take_away(&self, slot: u32, removing: bool) -> io::Result<()> {
        let place = lock(&self.visible).iter_mut().find(|visible_slot| visible_slot.slot == slot).map(|visible_slot| {
            visible_slot.removing |= removing;
            (visible_slot.gpa, visible_slot.range.host().len as u64)
        });
        match (place, self.revoke.get()) {
            (Some((gpa, len)), Some(revoke)) if !revoke(gpa, len) => {
                Err(io::Error::other("the host cannot revoke the DMA access of other devices to this BAR"))
            }
            _ => Ok(()),
        }
    }
}

impl MemorySlots for GuestVisibleMemory {
    /// Inserts memory without adding it to the list of device memory. So other devices cannot map this memory.
    unsafe fn insert(&self, gpa: u64, host: HostRange, read_only: bool) -> io::Result<u32> {
        // SAFETY: The caller fulfils the same requirements.
        unsafe { self.slots.insert(gpa, host, read_only) }
    }

    unsafe fn insert_device(&self, gpa: u64, range: &DeviceRange) -> io::Result<u32> {
        // SAFETY: The caller fulfils the same requirements.
        let slot = unsafe { self.slots.insert_device(gpa, range) }?;
        lock(&self.visible).push(VisibleSlot { gpa, slot, range: range.clone(), removing: false });
        Ok(slot)
    }

    fn withhold(&self, slot: u32) -> io::Result<()> {
        self.take_away(slot, false)
    }

    fn remove(&self, slot: u32) -> io::Result<()> {
        self.take_away(slot, true)?;
        self.slots.remove(slot)?;
        // A new slot may already have the same number, so remove only the entry that is marked as `removing`.
        lock(&self.visible).retain(|visible_slot| visible_slot.slot != slot || !visible_slot.removing);
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod test_support {
    use super::*;

    /// Fake of memory slots that maps nothing into a guest.
    struct Nowhere;

    impl MemorySlots for Nowhere {
        unsafe fn insert(&self, _: u64, _: HostRange, _: bool) -> io::Result<u32> {
            Ok(0)
        }
        fn remove(&self, _: u32) -> io::Result<()> {
            Ok(())
        }
    }

    /// Creates slots that make these ranges visible to the guest.
    pub(crate) fn showing(ranges: &[&DeviceRange]) -> Arc<GuestVisibleMemory> {
        let memory = GuestVisibleMemory::new(Arc::new(Nowhere));
        for (range, gpa) in ranges.iter().zip((0x10_0000_0000..).step_by(1 << 32)) {
            // SAFETY: The slot keeps a clone of the range.
            unsafe { memory.insert_device(gpa, range) }.expect("this fake never fails");
        }
        Arc::new(memory)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use iommu_bounce::DeviceMemoryKind;

    use super::*;
    use crate::host_range::DeviceContent;
    use crate::host_range::test_support::{pages, range};

    const LEN: usize = 0x4000;
    const AT: u64 = 0xc000_0000;

    /// Fake of memory slots that records the removed slots.
    #[derive(Default)]
    struct Slots {
        next: AtomicU32,
        removed: Mutex<Vec<u32>>,
        refuse: AtomicBool,
    }

    impl MemorySlots for Slots {
        unsafe fn insert(&self, _: u64, _: HostRange, _: bool) -> io::Result<u32> {
            Ok(self.next.fetch_add(1, Ordering::Relaxed))
        }
        fn remove(&self, slot: u32) -> io::Result<()> {
            if self.refuse.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::Other.into());
            }
            lock(&self.removed).push(slot);
            Ok(())
        }
    }

    struct Rig {
        memory: GuestVisibleMemory,
        slots: Arc<Slots>,
        /// Arguments of each call of `revoke`.
        revoked: Arc<Mutex<Vec<(u64, u64)>>>,
        /// True if `revoke` succeeds.
        lets_go: Arc<AtomicBool>,
    }

    fn rig() -> Rig {
        let slots = Arc::new(Slots::default());
        let memory = GuestVisibleMemory::new(slots.clone());
        let (revoked, lets_go) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(true)));
        let (calls, answer) = (revoked.clone(), lets_go.clone());
        memory.set_revoke(Box::new(move |gpa, len| {
            lock(&calls).push((gpa, len));
            answer.load(Ordering::Relaxed)
        }));
        Rig { memory, slots, revoked, lets_go }
    }

    /// Inserts a slot with `LEN` bytes of registers at guest-physical address `AT`. Returns the slot and the range.
    fn insert_range(memory: &GuestVisibleMemory, read_only: bool) -> (u32, DeviceRange) {
        let (range, _) = range(LEN, read_only, DeviceContent::Registers);
        // SAFETY: The test keeps the range as long as the slots.
        (unsafe { memory.insert_device(AT, &range) }.unwrap(), range)
    }

    fn found(memory: &GuestVisibleMemory, gpa: u64, len: u64, permissions: Permissions) -> Option<(usize, usize)> {
        let mut found = None;
        memory.with(gpa, len, permissions, &mut |slice, kind| {
            assert_eq!(kind, DeviceMemoryKind::Registers);
            found = Some((slice.ptr_guard().as_ptr().addr(), slice.len()));
        });
        found
    }

    #[test]
    fn visible_memory_is_found_and_nothing_beyond_it() {
        let Rig { memory, .. } = rig();
        let (_, range) = insert_range(&memory, false);
        let (all, address) = (Permissions::READ | Permissions::WRITE, range.host().address);
        assert_eq!(found(&memory, AT, LEN as u64, all), Some((address, LEN)));
        assert_eq!(found(&memory, AT + 0x1000, 0x1000, all), Some((address + 0x1000, 0x1000)));
        for (gpa, len) in [(AT - 1, 2), (AT + 1, LEN as u64), (AT + LEN as u64, 1), (AT, u64::MAX), (u64::MAX, 1)] {
            assert_eq!(found(&memory, gpa, len, all), None, "{gpa:#x}");
        }
    }

    #[test]
    fn read_only_memory_cannot_be_mapped_writable() {
        let Rig { memory, .. } = rig();
        let (_, _range) = insert_range(&memory, true);
        assert!(found(&memory, AT, 1, Permissions::READ).is_some());
        assert!(found(&memory, AT, 1, Permissions::WRITE).is_none());
        assert!(found(&memory, AT, 1, Permissions::READ | Permissions::WRITE).is_none());
    }

    #[test]
    fn memory_is_not_found_without_a_revoke_function() {
        let memory = GuestVisibleMemory::new(Arc::new(Slots::default()));
        let (slot, _range) = insert_range(&memory, false);
        assert!(found(&memory, AT, 1, Permissions::READ).is_none());
        memory.remove(slot).unwrap();
    }

    #[test]
    fn withheld_memory_is_revoked_but_stays_available() {
        let Rig { memory, revoked, lets_go, .. } = rig();
        let (slot, _range) = insert_range(&memory, false);
        memory.withhold(slot).unwrap();
        assert_eq!(*lock(&revoked), [(AT, LEN as u64)]);
        assert!(found(&memory, AT, 1, Permissions::READ).is_some());
        lets_go.store(false, Ordering::Relaxed);
        assert!(memory.withhold(slot).is_err());
        memory.withhold(slot + 1).unwrap();
    }

    #[test]
    fn slot_is_removed_only_after_access_is_revoked() {
        let Rig { memory, slots, revoked, lets_go } = rig();
        let (slot, _range) = insert_range(&memory, false);
        lets_go.store(false, Ordering::Relaxed);
        assert!(memory.remove(slot).is_err());
        assert!(lock(&slots.removed).is_empty());
        assert!(found(&memory, AT, 1, Permissions::READ).is_none(), "the slot is about to be removed");
        lets_go.store(true, Ordering::Relaxed);
        let count = lock(&revoked).len();
        slots.refuse.store(true, Ordering::Relaxed);
        assert!(memory.remove(slot).is_err());
        slots.refuse.store(false, Ordering::Relaxed);
        memory.remove(slot).unwrap();
        assert_eq!(*lock(&slots.removed), [slot]);
        assert_eq!((count, lock(&revoked).len()), (1, 3));
        assert!(found(&memory, AT, 1, Permissions::READ).is_none());
    }

    #[test]
    fn memory_can_be_looked_up_while_it_is_mapped() {
        let Rig { memory, .. } = rig();
        let (slot, range) = insert_range(&memory, false);
        let address = range.host().address;
        let mut offset = None;
        memory.with(AT + 0x1000, 0x1000, Permissions::READ, &mut |slice, _| {
            let at = slice.ptr_guard().as_ptr().addr();
            offset = memory.at_host(at, slice.len()).map(|(_, offset)| offset);
        });
        assert_eq!(offset, Some(0x1000));
        assert!(memory.at_host(address, LEN + 1).is_none() && memory.at_host(address - 1, 1).is_none());
        memory.remove(slot).unwrap();
        assert!(memory.at_host(address, 1).is_none());
    }

    #[test]
    fn slot_keeps_its_memory_until_it_is_removed() {
        let Rig { memory, slots, .. } = rig();
        let (range, mapped) = pages(LEN);
        // SAFETY: The slot itself keeps a clone of the range.
        let slot = unsafe { memory.insert_device(AT, &range) }.unwrap();
        drop(range);
        slots.refuse.store(true, Ordering::Relaxed);
        assert!(memory.remove(slot).is_err());
        assert!(mapped.upgrade().is_some(), "the guest may still see the memory");
        slots.refuse.store(false, Ordering::Relaxed);
        memory.remove(slot).unwrap();
        assert!(mapped.upgrade().is_none());
    }

    #[test]
    fn plain_slots_are_not_accessible_to_devices() {
        let Rig { memory, .. } = rig();
        let (range, _) = pages(LEN);
        // SAFETY: The range outlives the slot.
        let slot = unsafe { memory.insert(AT, range.host(), false) }.unwrap();
        assert_eq!(found(&memory, AT, 1, Permissions::READ), None);
        memory.remove(slot).unwrap();
    }
}
