// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM's memory slots.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use devices::host_memory::{Cause, Loss, populate_page};
use devices::platform::{HostRange, MemorySlots};
use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use vm_memory::{Bytes, VolatileSlice};

use crate::address_space::{Access, SlotMemory};

#[derive(Default)]
struct Used {
    /// Regions by slot number.
    regions: BTreeMap<u32, kvm_userspace_memory_region>,
    /// Slot numbers by the first guest-physical address of the slot. KVM rejects overlapping slots, so at most one slot contains an
    /// address.
    places: BTreeMap<u64, u32>,
}

impl Used {
    /// Returns the region that contains all of `[gpa, gpa + len)`, and the offset of `gpa` in the region.
    fn find(&self, gpa: u64, len: usize) -> Option<(&kvm_userspace_memory_region, u64)> {
        let (start, slot) = self.places.range(..=gpa).next_back()?;
        let (region, offset) = (self.regions.get(slot)?, gpa - start);
        (offset.checked_add(len as u64)? <= region.memory_size).then_some((region, offset))
    }
}

fn loss_at(region: &kvm_userspace_memory_region, offset: u64, cause: Cause) -> Loss {
    let address = usize::try_from(region.userspace_addr + offset).ok();
    Loss { address, gpa: Some(region.guest_phys_addr + offset), cause }
}

fn cause_of(error: &io::Error) -> Cause {
    if error.raw_os_error() == Some(libc::EHWPOISON) { Cause::Poisoned } else { Cause::Missing }
}

/// Allocator of KVM memory slots.
pub struct KvmSlots {
    vm: Arc<VmFd>,
    limit: u32,
    used: Mutex<Used>,
}

impl KvmSlots {
    /// Creates the allocator of `vm`, which has `limit` slots.
    pub fn new(vm: Arc<VmFd>, limit: usize) -> Self {
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        Self { vm, limit, used: Mutex::default() }
    }
}

impl MemorySlots for KvmSlots {
    unsafe fn insert(&self, gpa: u64, host: HostRange, read_only: bool) -> io::Result<u32> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = (0..self.limit).find(|slot| !used.regions.contains_key(slot)).ok_or_else(|| {
            io::Error::other(format!(
                "all {} memory slots of KVM are in use: use fewer devices or memory zones",
                self.limit
            ))
        })?;
        let region = kvm_userspace_memory_region {
            slot,
            flags: if read_only { KVM_MEM_READONLY } else { 0 },
            guest_phys_addr: gpa,
            memory_size: host.len as u64,
            userspace_addr: host.address as u64,
        };
        // SAFETY: the caller promises that the range stays mapped until the slot is removed and that no Rust reference to it exists. KVM
        // rejects overlapping and unaligned slots.
        unsafe { self.vm.set_user_memory_region(region) }?;
        used.regions.insert(slot, region);
        used.places.insert(gpa, slot);
        Ok(slot)
    }

    fn remove(&self, slot: u32) -> io::Result<()> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(region) = used.regions.get(&slot).copied() else { return Ok(()) };
        let gone = kvm_userspace_memory_region { memory_size: 0, ..region };
        // SAFETY: size 0 removes the slot. No memory becomes visible to the guest.
        unsafe { self.vm.set_user_memory_region(gone) }?;
        used.regions.remove(&slot);
        used.places.remove(&region.guest_phys_addr);
        Ok(())
    }
}

impl SlotMemory for KvmSlots {
    /// The slots stay locked during the access. KVM does not repeat an access that it has reported as MMIO, so this function performs the
    /// access. The access succeeds if the host can now supply the page, or if the slot was created after KVM's report.
    fn access(&self, address: u64, access: Access<'_>) -> Result<bool, Loss> {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let (len, writes) = match &access {
            Access::Read(data) => (data.len(), false),
            Access::Write(data) => (data.len(), true),
        };
        let Some((region, offset)) = used.find(address, len) else { return Ok(false) };
        if writes && region.flags & KVM_MEM_READONLY != 0 {
            return Ok(false);
        }
        let lost = |cause| loss_at(region, offset, cause);
        let host = usize::try_from(region.userspace_addr + offset).map_err(|_| lost(Cause::Missing))?;
        populate_page(host, writes).map_err(|error| lost(cause_of(&error)))?;
        // SAFETY: The caller of `insert` promised that the range stays mapped until its slot is removed, and that no Rust reference to its
        // bytes exists. A removal of the slot waits for the lock, which is held here.
        let memory = unsafe { VolatileSlice::new(std::ptr::with_exposed_provenance_mut(host), len) };
        match access {
            Access::Read(data) => memory.read_slice(data, 0),
            Access::Write(data) => memory.write_slice(data, 0),
        }
        .map_err(|_| lost(Cause::Missing))?;
        Ok(true)
    }

    fn loss(&self, address: u64) -> Loss {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let nowhere = Loss { address: None, gpa: Some(address), cause: Cause::Missing };
        used.find(address, 1).map_or(nowhere, |(region, offset)| {
            let loss = loss_at(region, offset, Cause::Missing);
            let error = loss.address.and_then(|host| populate_page(host, false).err());
            Loss { cause: error.as_ref().map_or(Cause::Missing, cause_of), ..loss }
        })
    }
}
