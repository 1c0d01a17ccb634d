// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the guest sees of devices' memory, so that other devices can be let at it.

use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use iommu_bounce::Permissions;
use vm_memory::VolatileSlice;

use crate::platform::{HostRange, MemorySlots};
use crate::sync::lock;

/// Takes a range, by guest-physical address and length, away from all devices behind the virtual IOMMU. `false` if the host
/// refuses.
pub type Revoke = Box<dyn Fn(u64, u64) -> bool + Send + Sync>;

/// Something of a device that the guest sees.
struct Piece {
    gpa: u64,
    slot: u32,
    host: HostRange,
    read_only: bool,
    /// It is about to go: no device is let at it any more.
    going: bool,
}

/// Memory slots for BARs, which knows what is in them: [`GuestRam::device`](iommu_bounce::GuestRam::device) is served from
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
    pub(crate) fn with(&self, gpa: u64, len: u64, permissions: Permissions, then: &mut dyn FnMut(VolatileSlice<'_>)) {
        if self.revoke.get().is_none() {
            return;
        }
        // The lock is held until `then` returns: a piece goes only after it was marked as going.
        let pieces = lock(&self.pieces);
        let found = pieces.iter().find_map(|piece| {
            let offset = gpa.checked_sub(piece.gpa).and_then(|offset| usize::try_from(offset).ok())?;
            let len = usize::try_from(len).ok()?;
            let fits = offset.checked_add(len).is_some_and(|end| end <= piece.host.len);
            let allowed = !piece.going && (!piece.read_only || permissions == Permissions::READ);
            (fits && allowed).then(|| HostRange { address: piece.host.address + offset, len })
        });
        if let Some(HostRange { address, len }) = found {
            // SAFETY: The range lies in one that `insert` was promised to stay mapped until its slot is removed, which
            // waits for the lock. Nobody has a reference to its bytes, as `insert` was promised, too.
            then(unsafe { VolatileSlice::new(std::ptr::with_exposed_provenance_mut(address), len) });
        }
    }
}

impl ShownMemory {
    /// Takes what is in a slot away from devices; for good, if it is `going`.
    fn take_away(&self, slot: u32, going: bool) -> io::Result<()> {
        let place = lock(&self.pieces).iter_mut().find(|piece| piece.slot == slot).map(|piece| {
            piece.going |= going;
            (piece.gpa, piece.host.len as u64)
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
    unsafe fn insert(&self, gpa: u64, host: HostRange, read_only: bool) -> io::Result<u32> {
        // SAFETY: The caller promises what this asks for.
        let slot = unsafe { self.slots.insert(gpa, host, read_only) }?;
        lock(&self.pieces).push(Piece { gpa, slot, host, read_only, going: false });
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
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;

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

    /// Shows `memory` at `AT`; returns the slot.
    fn show(shown: &ShownMemory, memory: &mut [u8], read_only: bool) -> u32 {
        let host = HostRange { address: memory.as_mut_ptr().expose_provenance(), len: memory.len() };
        // SAFETY: The memory outlives the test's use of the slot, and is not touched.
        unsafe { shown.insert(AT, host, read_only) }.unwrap()
    }

    fn found(shown: &ShownMemory, gpa: u64, len: u64, permissions: Permissions) -> Option<(usize, usize)> {
        let mut found = None;
        shown.with(gpa, len, permissions, &mut |slice| {
            found = Some((slice.ptr_guard().as_ptr().addr(), slice.len()));
        });
        found
    }

    #[test]
    fn what_is_shown_is_found_and_nothing_beyond() {
        let Rig { shown, .. } = rig();
        let mut memory = vec![0; LEN];
        show(&shown, &mut memory, false);
        let (all, address) = (Permissions::READ | Permissions::WRITE, memory.as_ptr().addr());
        assert_eq!(found(&shown, AT, LEN as u64, all), Some((address, LEN)));
        assert_eq!(found(&shown, AT + 0x1000, 0x1000, all), Some((address + 0x1000, 0x1000)));
        for (gpa, len) in [(AT - 1, 2), (AT + 1, LEN as u64), (AT + LEN as u64, 1), (AT, u64::MAX), (u64::MAX, 1)] {
            assert_eq!(found(&shown, gpa, len, all), None, "{gpa:#x}");
        }
    }

    #[test]
    fn read_only_pieces_can_be_read_only() {
        let Rig { shown, .. } = rig();
        let mut memory = vec![0; LEN];
        show(&shown, &mut memory, true);
        assert!(found(&shown, AT, 1, Permissions::READ).is_some());
        assert!(found(&shown, AT, 1, Permissions::WRITE).is_none());
        assert!(found(&shown, AT, 1, Permissions::READ | Permissions::WRITE).is_none());
    }

    #[test]
    fn nothing_is_found_that_nobody_could_take_away() {
        let shown = ShownMemory::new(Arc::new(Slots::default()));
        let mut memory = vec![0; LEN];
        let slot = show(&shown, &mut memory, false);
        assert!(found(&shown, AT, 1, Permissions::READ).is_none());
        shown.remove(slot).unwrap();
    }

    #[test]
    fn what_is_withheld_is_taken_away_and_stays() {
        let Rig { shown, revoked, lets_go, .. } = rig();
        let mut memory = vec![0; LEN];
        let slot = show(&shown, &mut memory, false);
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
        let mut memory = vec![0; LEN];
        let slot = show(&shown, &mut memory, false);
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
}
