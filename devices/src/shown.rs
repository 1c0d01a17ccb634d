// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the guest sees of devices' memory, so that other devices can be let at it.

use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use iommu_bounce::{Permissions, ThenDevice};

use crate::host_range::DeviceRange;
use crate::platform::{HostRange, MemorySlots};
use crate::sync::lock;

/// Takes a range, by guest-physical address and length, away from all devices behind the virtual IOMMU. `false` if the host
/// refuses.
pub type Revoke = Box<dyn Fn(u64, u64) -> bool + Send + Sync>;

/// Something of a device that the guest sees.
struct Piece {
    gpa: u64,
    slot: u32,
    /// It stays mapped in this process as long as the piece is here.
    range: DeviceRange,
    /// It is about to go: no device is let at it any more.
    going: bool,
}

impl Piece {
    /// Offset in bytes of guest-physical `gpa`, if all `len` bytes of it are in the piece.
    fn offset_of(&self, gpa: u64, len: usize) -> Option<usize> {
        let offset = usize::try_from(gpa.checked_sub(self.gpa)?).ok()?;
        let end = offset.checked_add(len)?;
        (end <= self.range.host().len).then_some(offset)
    }
}

/// Memory slots for BARs, which know what they hold: [`GuestRam::device`](iommu_bounce::GuestRam::device) is served from
/// here. Before a slot goes, what it holds is taken away from devices.
pub struct ShownMemory {
    slots: Arc<dyn MemorySlots>,
    pieces: Mutex<Vec<Piece>>,
    revoke: OnceLock<Revoke>,
}

impl ShownMemory {
    /// Hands out slots of `slots`.
    pub fn new(slots: Arc<dyn MemorySlots>) -> Self {
        Self { slots, pieces: Mutex::default(), revoke: OnceLock::new() }
    }

    /// From now on devices can be let at what is in the slots, and `revoke` takes it away from them. It is called with no lock
    /// held. The first call counts.
    pub fn set_revoke(&self, revoke: Revoke) {
        // A second one would be of a second IOMMU, which no VM has.
        let _ = self.revoke.set(revoke);
    }

    /// Calls `then` with the memory that the guest sees at `[gpa, gpa + len)`, if all of it is of one BAR and allows
    /// `permissions`.
    ///
    /// No lock is held meanwhile: a mapper that is called looks the memory up by [`at_host`](Self::at_host). The caller holds the lock
    /// that `revoke` takes, until it has noted what it maps. So a slot that is removed meanwhile waits for it.
    pub(crate) fn with(&self, gpa: u64, len: u64, permissions: Permissions, then: ThenDevice<'_>) {
        let Ok(len) = usize::try_from(len) else { return };
        if self.revoke.get().is_none() {
            return;
        }
        let found = lock(&self.pieces).iter().find_map(|piece| {
            let offset = piece.offset_of(gpa, len)?;
            let allowed = !piece.going && (!piece.range.is_read_only() || permissions == Permissions::READ);
            allowed.then(|| (piece.range.clone(), offset))
        });
        if let Some((range, offset)) = found
            && let Some(part) = range.part(offset, len)
        {
            then(part, range.kind());
        }
    }

    /// The range that has these `len` bytes at `address` of this process, and their offset in it.
    pub(crate) fn at_host(&self, address: usize, len: usize) -> Option<(DeviceRange, usize)> {
        let pieces = lock(&self.pieces);
        pieces.iter().find_map(|piece| Some((piece.range.clone(), piece.range.offset_of(address, len)?)))
    }
}

impl ShownMemory {
    /// Takes what is in a slot away from devices; for good, if it is `going`.
    fn take_away(&self, slot: u32, going: bool) -> io::Result<()> {
        let place = lock(&self.pieces).iter_mut().find(|piece| piece.slot == slot).map(|piece| {
            piece.going |= going;
            (piece.gpa, piece.range.host().len as u64)
        });
        match (place, self.revoke.get()) {
            (Some((gpa, len)), Some(revoke)) if !revoke(gpa, len) => {
                Err(io::Error::other("the host does not take it away from other devices"))
            }
            _ => Ok(()),
        }
    }
}

impl MemorySlots for ShownMemory {
    /// No device is let at such memory.
    unsafe fn insert(&self, gpa: u64, host: HostRange, read_only: bool) -> io::Result<u32> {
        // SAFETY: The caller promises what this asks for.
        unsafe { self.slots.insert(gpa, host, read_only) }
    }

    unsafe fn insert_device(&self, gpa: u64, range: &DeviceRange) -> io::Result<u32> {
        // SAFETY: The caller promises what this asks for.
        let slot = unsafe { self.slots.insert_device(gpa, range) }?;
        lock(&self.pieces).push(Piece { gpa, slot, range: range.clone(), going: false });
        Ok(slot)
    }

    fn withhold(&self, slot: u32) -> io::Result<()> {
        self.take_away(slot, false)
    }

    fn remove(&self, slot: u32) -> io::Result<()> {
        self.take_away(slot, true)?;
        self.slots.remove(slot)?;
        // A new piece may have the slot's number already.
        lock(&self.pieces).retain(|piece| piece.slot != slot || !piece.going);
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod test_support {
    use super::*;

    /// Slots without a guest.
    struct Nowhere;

    impl MemorySlots for Nowhere {
        unsafe fn insert(&self, _: u64, _: HostRange, _: bool) -> io::Result<u32> {
            Ok(0)
        }
        fn remove(&self, _: u32) -> io::Result<()> {
            Ok(())
        }
    }

    /// Slots that show these ranges to the guest.
    pub(crate) fn showing(ranges: &[&DeviceRange]) -> Arc<ShownMemory> {
        let shown = ShownMemory::new(Arc::new(Nowhere));
        for (range, gpa) in ranges.iter().zip((0x10_0000_0000..).step_by(1 << 32)) {
            // SAFETY: The piece keeps a clone of the range.
            unsafe { shown.insert_device(gpa, range) }.expect("it fails never");
        }
        Arc::new(shown)
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

    /// Slots that hold nothing.
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
        shown: ShownMemory,
        slots: Arc<Slots>,
        /// Calls of `revoke`.
        revoked: Arc<Mutex<Vec<(u64, u64)>>>,
        /// Whether it succeeds.
        lets_go: Arc<AtomicBool>,
    }

    fn rig() -> Rig {
        let slots = Arc::new(Slots::default());
        let shown = ShownMemory::new(slots.clone());
        let (revoked, lets_go) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(true)));
        let (calls, answer) = (revoked.clone(), lets_go.clone());
        shown.set_revoke(Box::new(move |gpa, len| {
            lock(&calls).push((gpa, len));
            answer.load(Ordering::Relaxed)
        }));
        Rig { shown, slots, revoked, lets_go }
    }

    /// Shows `LEN` bytes of registers at `AT`; returns the slot, and what is shown.
    fn show(shown: &ShownMemory, read_only: bool) -> (u32, DeviceRange) {
        let (range, _) = range(LEN, read_only, DeviceContent::Registers);
        // SAFETY: The test keeps the range as long as the slots.
        (unsafe { shown.insert_device(AT, &range) }.unwrap(), range)
    }

    fn found(shown: &ShownMemory, gpa: u64, len: u64, permissions: Permissions) -> Option<(usize, usize)> {
        let mut found = None;
        shown.with(gpa, len, permissions, &mut |slice, kind| {
            assert_eq!(kind, DeviceMemoryKind::Registers);
            found = Some((slice.ptr_guard().as_ptr().addr(), slice.len()));
        });
        found
    }

    #[test]
    fn what_is_shown_is_found_and_nothing_beyond() {
        let Rig { shown, .. } = rig();
        let (_, range) = show(&shown, false);
        let (all, address) = (Permissions::READ | Permissions::WRITE, range.host().address);
        assert_eq!(found(&shown, AT, LEN as u64, all), Some((address, LEN)));
        assert_eq!(found(&shown, AT + 0x1000, 0x1000, all), Some((address + 0x1000, 0x1000)));
        for (gpa, len) in [(AT - 1, 2), (AT + 1, LEN as u64), (AT + LEN as u64, 1), (AT, u64::MAX), (u64::MAX, 1)] {
            assert_eq!(found(&shown, gpa, len, all), None, "{gpa:#x}");
        }
    }

    #[test]
    fn read_only_pieces_can_be_read_only() {
        let Rig { shown, .. } = rig();
        let (_, _range) = show(&shown, true);
        assert!(found(&shown, AT, 1, Permissions::READ).is_some());
        assert!(found(&shown, AT, 1, Permissions::WRITE).is_none());
        assert!(found(&shown, AT, 1, Permissions::READ | Permissions::WRITE).is_none());
    }

    #[test]
    fn nothing_is_found_that_nobody_could_take_away() {
        let shown = ShownMemory::new(Arc::new(Slots::default()));
        let (slot, _range) = show(&shown, false);
        assert!(found(&shown, AT, 1, Permissions::READ).is_none());
        shown.remove(slot).unwrap();
    }

    #[test]
    fn what_is_withheld_is_taken_away_and_stays() {
        let Rig { shown, revoked, lets_go, .. } = rig();
        let (slot, _range) = show(&shown, false);
        shown.withhold(slot).unwrap();
        assert_eq!(*lock(&revoked), [(AT, LEN as u64)]);
        assert!(found(&shown, AT, 1, Permissions::READ).is_some());
        lets_go.store(false, Ordering::Relaxed);
        assert!(shown.withhold(slot).is_err());
        shown.withhold(slot + 1).unwrap();
    }

    #[test]
    fn slot_goes_after_its_memory_was_taken_away() {
        let Rig { shown, slots, revoked, lets_go } = rig();
        let (slot, _range) = show(&shown, false);
        lets_go.store(false, Ordering::Relaxed);
        assert!(shown.remove(slot).is_err());
        assert!(lock(&slots.removed).is_empty());
        assert!(found(&shown, AT, 1, Permissions::READ).is_none(), "it is about to go");
        lets_go.store(true, Ordering::Relaxed);
        let count = lock(&revoked).len();
        slots.refuse.store(true, Ordering::Relaxed);
        assert!(shown.remove(slot).is_err());
        slots.refuse.store(false, Ordering::Relaxed);
        shown.remove(slot).unwrap();
        assert_eq!(*lock(&slots.removed), [slot]);
        assert_eq!((count, lock(&revoked).len()), (1, 3));
        assert!(found(&shown, AT, 1, Permissions::READ).is_none());
    }

    #[test]
    fn memory_can_be_looked_up_while_it_is_mapped() {
        let Rig { shown, .. } = rig();
        let (slot, range) = show(&shown, false);
        let address = range.host().address;
        let mut offset = None;
        shown.with(AT + 0x1000, 0x1000, Permissions::READ, &mut |slice, _| {
            let at = slice.ptr_guard().as_ptr().addr();
            offset = shown.at_host(at, slice.len()).map(|(_, offset)| offset);
        });
        assert_eq!(offset, Some(0x1000));
        assert!(shown.at_host(address, LEN + 1).is_none() && shown.at_host(address - 1, 1).is_none());
        shown.remove(slot).unwrap();
        assert!(shown.at_host(address, 1).is_none());
    }

    #[test]
    fn piece_keeps_its_memory_until_the_slot_is_gone() {
        let Rig { shown, slots, .. } = rig();
        let (range, mapped) = pages(LEN);
        // SAFETY: The piece itself keeps a clone.
        let slot = unsafe { shown.insert_device(AT, &range) }.unwrap();
        drop(range);
        slots.refuse.store(true, Ordering::Relaxed);
        assert!(shown.remove(slot).is_err());
        assert!(mapped.upgrade().is_some(), "the guest may see it still");
        slots.refuse.store(false, Ordering::Relaxed);
        shown.remove(slot).unwrap();
        assert!(mapped.upgrade().is_none());
    }

    #[test]
    fn plain_slots_are_for_no_device() {
        let Rig { shown, .. } = rig();
        let (range, _) = pages(LEN);
        // SAFETY: The range outlives the slot.
        let slot = unsafe { shown.insert(AT, range.host(), false) }.unwrap();
        assert_eq!(found(&shown, AT, 1, Permissions::READ), None);
        shown.remove(slot).unwrap();
    }
}
