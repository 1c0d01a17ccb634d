// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What devices need of the machine around them, as traits that the VMM implements.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use crate::host_range::DeviceRange;
pub use crate::host_range::HostRange;

/// A handler of accesses to a range of port or memory-mapped I/O.
///
/// Both calls come on the thread of the vCPU that made the access, so a device handles its registers synchronously and
/// several vCPUs may be in it at once.
pub trait BusDevice: Send + Sync {
    /// Reads `data.len()` bytes at `offset` from the start of the range. Bytes that the device has no register for are
    /// left as the caller preset them (all ones).
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Writes `data` at `offset` from the start of the range.
    fn write(&self, offset: u64, data: &[u8]);
    /// True if the guest sees ordinary memory in the range, by a memory slot. An access there that comes to the VMM anyway may be one to
    /// a page that the host cannot supply.
    fn is_memory(&self) -> bool {
        false
    }
}

/// The two address spaces of an x86 machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// I/O ports.
    Port,
    /// Guest-physical memory.
    Memory,
}

/// The guest's address spaces, in which devices claim ranges.
pub trait AddressSpace: Send + Sync {
    /// Claims `[base, base + len)` for `device`. Fails when the range is empty, wraps, or overlaps a claimed one.
    fn insert(&self, space: Space, base: u64, len: u64, device: Arc<dyn BusDevice>) -> io::Result<()>;
    /// Gives the range that starts at `base` back. A base that nothing was claimed at is ignored.
    fn remove(&self, space: Space, base: u64);
}

/// A level-triggered interrupt line of the guest.
pub trait InterruptLine: Send + Sync {
    /// Raises or lowers the line. It stays so.
    fn set(&self, active: bool) -> io::Result<()>;
}

/// A level-triggered interrupt line of the guest that several devices of the host share, each by events of its own, with no exit to
/// the VMM.
pub trait SharedLine: Send + Sync {
    /// Number of the line, as the interrupt line register of configuration space has it.
    fn number(&self) -> u8;
    /// Has a write to `raise` raise the line. Once the guest has served the interrupt the line is lowered and `served` is written, for
    /// whoever wants to raise it again. `served` is written for the interrupts of others on the line too.
    ///
    /// # Errors
    /// The host refuses; nothing is connected.
    fn connect(&self, raise: &EventFd, served: &EventFd) -> io::Result<()>;
    /// Ends what [`connect`](Self::connect) began. The line is lowered if no other device is connected with it.
    ///
    /// # Errors
    /// There is no such connection.
    fn disconnect(&self, raise: &EventFd) -> io::Result<()>;
}

/// KVM's list of the files of VFIO that the VM uses (`Documentation/virt/kvm/devices/vfio.rst`). It keeps them open.
pub trait VfioFiles: Send + Sync {
    /// Puts an open file on the list.
    ///
    /// # Errors
    /// KVM refuses; it is on the list already, or is none of VFIO.
    fn add(&self, file: BorrowedFd<'_>) -> io::Result<()>;
    /// Takes it off the list.
    ///
    /// # Errors
    /// It is not on it.
    fn remove(&self, file: BorrowedFd<'_>) -> io::Result<()>;
}

/// A message-signalled interrupt: what the device writes, and where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Guest-physical address of the write.
    pub address: u64,
    /// Value written.
    pub data: u32,
}

/// The interrupt vectors of one device, each an event that injects an MSI into the guest while it is routed.
pub trait MsiVectors: Send + Sync {
    /// How many vectors there are.
    fn count(&self) -> u16;
    /// The event behind `vector`: whoever writes it raises the interrupt with no exit to the VMM. An event written
    /// while the vector is unrouted (masked) stays pending and fires once the vector is routed again. Nobody reads it
    /// while the vector is routed. Another process may have it, and have it block.
    fn event(&self, vector: u16) -> Option<&EventFd>;
    /// Routes `vector` to `message`, or unroutes (masks) it with `None`.
    fn route(&self, vector: u16, message: Option<MsiMessage>) -> io::Result<()>;
    /// Raises `vector` from the VMM's side.
    fn trigger(&self, vector: u16) -> io::Result<()>;
}

/// Hands out interrupt vectors.
pub trait MsiAllocator: Send + Sync {
    /// Allocates `count` vectors, all unrouted. They are given back when the last reference is dropped.
    fn allocate(&self, count: u16) -> io::Result<Arc<dyn MsiVectors>>;
}

/// Connects writes of the guest with events, so that whoever waits for an event is woken without an exit to the VMM.
pub trait Doorbells: Send + Sync {
    /// Has the host's kernel write `event` for each write of the guest, of any width, at `address`. Who has claimed the address
    /// sees them no more.
    ///
    /// # Errors
    /// The kernel refuses; writes go to whoever has claimed the address.
    fn connect(&self, space: Space, address: u64, event: &EventFd) -> io::Result<()>;
    /// Ends what [`connect`](Self::connect) began.
    ///
    /// # Errors
    /// There is no such connection.
    fn disconnect(&self, space: Space, address: u64, event: &EventFd) -> io::Result<()>;
}

/// Hands out KVM-style memory slots: ranges of this process's memory shown to the guest without exits.
pub trait MemorySlots: Send + Sync {
    /// Shows `host` to the guest at guest-physical address `gpa`; returns the slot.
    ///
    /// # Safety
    /// The range must stay mapped in this process (any mapping will do) until the slot is removed, and nothing in this
    /// process may hold a Rust reference to its bytes: the guest reads and writes them at any time.
    unsafe fn insert(&self, gpa: u64, host: HostRange, read_only: bool) -> io::Result<u32>;
    /// As [`insert`](Self::insert), for memory of a device. Slots that know what they hold let other devices of the guest at it.
    ///
    /// # Safety
    /// A clone of `range` must exist until the slot is removed.
    unsafe fn insert_device(&self, gpa: u64, range: &DeviceRange) -> io::Result<u32> {
        // SAFETY: The range stays mapped as long as a clone of it exists, and there is no reference to its bytes.
        unsafe { self.insert(gpa, range.host(), range.is_read_only()) }
    }
    /// What is in the slot does not answer for a while: nobody else is to reach it, until it is mapped for them anew.
    ///
    /// # Errors
    /// Somebody may reach it still.
    fn withhold(&self, slot: u32) -> io::Result<()> {
        let _ = slot;
        Ok(())
    }
    /// Takes the slot away. Costly for the whole VM: KVM drops all its shadow entries.
    fn remove(&self, slot: u32) -> io::Result<()>;
}

/// What a guest does with a device that the VMM emulates, and that whoever watches the VM may want to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// The driver of a virtio device has set it up: it serves its queues from now on.
    Activated,
    /// A virtio device that was activated is reset, by its driver or with the whole VM.
    Reset,
    /// A virtio device cannot go on until its driver resets it: the driver broke a rule.
    Failed,
    /// The guest's kernel has panicked.
    Panicked,
    /// The guest's kernel has panicked and goes on with a kernel that it keeps for that case.
    CrashLoaded,
    /// The guest did not reload its watchdog in time, and is reset.
    WatchdogExpired,
}

/// Whoever watches.
pub trait DeviceObserver: Send + Sync {
    /// The guest did this with the device of this name. Comes on a vCPU's thread or the device's, from within the device: it must
    /// not wait, nor call the device. A guest can bring it about as often as it likes.
    fn observe(&self, id: &str, event: DeviceEvent);
}

/// What the host tells of a device of its own that the guest has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostNotice {
    /// The device had an uncorrectable error: what it read and wrote since cannot be relied on.
    Failed,
    /// The host wants it back, and waits until it is closed. It says so again from time to time.
    Requested,
}

/// Whoever acts on that.
pub trait HostListener: Send + Sync {
    /// The host told this of the device of this name, which has this address in the host. Comes on a thread of the device's, for
    /// which closing the device waits: it must not wait, nor call the device.
    fn notify(&self, id: &str, host: &str, notice: HostNotice);
}

#[cfg(test)]
pub(crate) mod test_support {
    use std::io;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    use super::{DeviceEvent, DeviceObserver, InterruptLine};
    use crate::sync::lock;

    /// An interrupt line that keeps its level.
    #[derive(Clone, Default)]
    pub(crate) struct FakeLine(Arc<AtomicBool>);

    impl FakeLine {
        /// True if the line is active.
        pub(crate) fn is_up(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }

    impl InterruptLine for FakeLine {
        fn set(&self, active: bool) -> io::Result<()> {
            self.0.store(active, Ordering::Relaxed);
            Ok(())
        }
    }

    /// An observer that keeps what it sees.
    #[derive(Default)]
    pub(crate) struct Witness(Mutex<Vec<DeviceEvent>>);

    impl Witness {
        /// What it saw since the last call.
        pub(crate) fn take(&self) -> Vec<DeviceEvent> {
            std::mem::take(&mut lock(&self.0))
        }
    }

    impl DeviceObserver for Witness {
        fn observe(&self, _: &str, event: DeviceEvent) {
            lock(&self.0).push(event);
        }
    }
}
