// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM's memory slots.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use devices::platform::{HostRange, MemorySlots};
use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;

/// Hands out KVM memory slots.
pub struct KvmSlots {
    vm: Arc<VmFd>,
    limit: u32,
    used: Mutex<BTreeMap<u32, kvm_userspace_memory_region>>,
}

impl KvmSlots {
    /// Slots of `vm`, of which there are `limit`.
    pub fn new(vm: Arc<VmFd>, limit: usize) -> Self {
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        Self { vm, limit, used: Mutex::new(BTreeMap::new()) }
    }
}

impl MemorySlots for KvmSlots {
    unsafe fn insert(&self, gpa: u64, host: HostRange, read_only: bool) -> io::Result<u32> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = (0..self.limit)
            .find(|slot| !used.contains_key(slot))
            .ok_or_else(|| io::Error::other(format!("all {} memory slots of KVM are in use", self.limit)))?;
        let region = kvm_userspace_memory_region {
            slot,
            flags: if read_only { KVM_MEM_READONLY } else { 0 },
            guest_phys_addr: gpa,
            memory_size: host.len as u64,
            userspace_addr: host.address as u64,
        };
        // SAFETY: the caller promises that the range stays mapped until the slot is removed and that no Rust reference
        // to it exists; KVM refuses overlapping and unaligned slots.
        unsafe { self.vm.set_user_memory_region(region) }?;
        used.insert(slot, region);
        Ok(slot)
    }

    fn remove(&self, slot: u32) -> io::Result<()> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(region) = used.get(&slot).copied() else { return Ok(()) };
        let gone = kvm_userspace_memory_region { memory_size: 0, ..region };
        // SAFETY: size 0 takes the slot away; no memory is shown to the guest.
        unsafe { self.vm.set_user_memory_region(gone) }?;
        used.remove(&slot);
        Ok(())
    }
}
