// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Traits that describe what devices need from the machine. The VMM implements these traits.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use crate::host_range::DeviceRange;
pub use crate::host_range::HostRange;

/// Handler of accesses to a range of port or memory-mapped I/O.
///
/// [`BusDevice::read`] and [`BusDevice::write`] run on the thread of the vCPU that made the access. So a device handles its registers
/// synchronously, and several vCPUs may call the device at the same time.
pub trait BusDevice: Send + Sync {
    /// Reads `data.len()` bytes at `offset` from the start of the range. Bytes for which the device has no register keep the caller's
    /// preset value (all ones).
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Writes `data` at `offset` from the start of the range.
    fn write(&self, offset: u64, data: &[u8]);
    /// True if the range is ordinary memory, which the guest accesses through a memory slot. If such an access exits to the VMM instead,
    /// the host may be unable to supply the page.
    fn is_memory(&self) -> bool {
        false
    }
}

/// Address spaces of an x86 machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// I/O ports.
    Port,
    /// Guest-physical memory.
    Memory,
}

/// Guest address spaces. Devices claim ranges of them.
pub trait AddressSpace: Send + Sync {
    /// Claims `[base, base + len)` for `device`. Fails if the range is empty, wraps, or overlaps a claimed range.
    fn insert(&self, space: Space, base: u64, len: u64, device: Arc<dyn BusDevice>) -> io::Result<()>;
    /// Releases the claimed range that starts at `base`. Does nothing if no range starts at `base`.
    fn remove(&self, space: Space, base: u64);
}

/// Level-triggered interrupt line of the guest.
pub trait InterruptLine: Send + Sync {
    /// Raises or lowers the line. The level lasts until the next call.
    fn set(&self, active: bool) -> io::Result<()>;
}

/// Level-triggered interrupt line of the guest that several host devices share. Each device has its own events for the line, so interrupts
/// cause no exits to the VMM.
pub trait SharedLine: Send + Sync {
    /// Returns the number of the line, as in the interrupt line register of configuration space.
    fn number(&self) -> u8;
    /// Connects two events to the line. A write to `raise` raises the line. When the guest has served an interrupt of the line, the host
    /// kernel lowers the line and writes `served`, even if another device raised the line. The device can then raise the line again.
    ///
    /// # Errors
    /// The host kernel rejects the connection. Then neither event is connected.
    fn connect(&self, raise: &EventFd, served: &EventFd) -> io::Result<()>;
    /// Undoes [`connect`](Self::connect). If no other device is connected to the line, the line is lowered.
    ///
    /// # Errors
    /// No such connection exists.
    fn disconnect(&self, raise: &EventFd) -> io::Result<()>;
}

/// KVM's list of the VFIO files that the VM uses (`Documentation/virt/kvm/devices/vfio.rst`). KVM keeps the files open.
pub trait VfioFiles: Send + Sync {
    /// Adds an open file to the list.
    ///
    /// # Errors
    /// KVM refuses: the file is on the list already, or is not a VFIO file.
    fn add(&self, file: BorrowedFd<'_>) -> io::Result<()>;
    /// Removes a file from the list.
    ///
    /// # Errors
    /// The file is not on the list.
    fn remove(&self, file: BorrowedFd<'_>) -> io::Result<()>;
}

/// Message-signalled interrupt: the value that the device writes, and the address of the write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Guest-physical address of the write.
    pub address: u64,
    /// Value written.
    pub data: u32,
}

/// Interrupt vectors of one device. Each vector has an event that injects an MSI into the guest while the vector is routed.
pub trait MsiVectors: Send + Sync {
    /// Returns the number of vectors.
    fn count(&self) -> u16;
    /// Returns the event of `vector`. A write to the event raises the interrupt without an exit to the VMM. If the vector is unrouted
    /// (masked), a written event stays pending, and fires once the vector is routed again. While the vector is routed, only the host's
    /// kernel reads the event. Another process may share the event, and may clear its `O_NONBLOCK` flag. So ordinary reads and writes of
    /// the event may block.
    fn event(&self, vector: u16) -> Option<&EventFd>;
    /// Routes `vector` to `message`. If `message` is `None`, unroutes (masks) the vector.
    fn route(&self, vector: u16, message: Option<MsiMessage>) -> io::Result<()>;
    /// Raises `vector` on behalf of the VMM.
    fn trigger(&self, vector: u16) -> io::Result<()>;
}

/// Allocates interrupt vectors.
pub trait MsiAllocator: Send + Sync {
    /// Allocates `count` vectors, all unrouted. The vectors are freed when the last reference is dropped.
    fn allocate(&self, count: u16) -> io::Result<Arc<dyn MsiVectors>>;
}

/// Connections of guest writes to events. A connected write wakes the thread that waits for the event, without an exit to the VMM.
pub trait Doorbells: Send + Sync {
    /// Makes the host's kernel write `event` for each guest write at `address`, of any width. The device that has claimed the address no
    /// longer handles these writes.
    ///
    /// # Errors
    /// The kernel rejects the connection. Then the device that has claimed the address still handles the writes.
    fn connect(&self, space: Space, address: u64, event: &EventFd) -> io::Result<()>;
    /// Undoes [`connect`](Self::connect).
    ///
    /// # Errors
    /// No such connection exists.
    fn disconnect(&self, space: Space, address: u64, event: &EventFd) -> io::Result<()>;
}

/// Allocator of KVM memory slots. A slot is a range of this process's memory that the guest accesses without exits.
pub trait MemorySlots: Send + Sync {
    /// Maps `host` into the guest at guest-physical address `gpa`. Returns the slot.
    ///
    /// # Safety
    /// Until the slot is removed, memory must be mapped at all addresses of the range in this process. This mapping may be replaced by
    /// another mapping. Nothing in this process may hold a Rust reference to the bytes of the range, because the guest reads and writes
    /// these bytes at any time.
    unsafe fn insert(&self, gpa: u64, host: HostRange, read_only: bool) -> io::Result<u32>;
    /// Like [`insert`](Self::insert), but for memory of a device. An implementation that tracks the contents of slots lets other devices of
    /// the guest access this memory.
    ///
    /// # Safety
    /// A clone of `range` must exist until the slot is removed.
    unsafe fn insert_device(&self, gpa: u64, range: &DeviceRange) -> io::Result<u32> {
        // SAFETY: The range stays mapped as long as a clone of it exists. No reference to its bytes exists.
        unsafe { self.insert(gpa, range.host(), range.is_read_only()) }
    }
    /// Revokes the access of other devices to the memory of the slot. Call this function before the memory stops responding for a while.
    /// Other devices can access the memory again after the guest maps it again.
    ///
    /// # Errors
    /// Other devices may still have access.
    fn withhold(&self, slot: u32) -> io::Result<()> {
        let _ = slot;
        Ok(())
    }
    /// Removes the slot. The removal is expensive for the whole VM, because KVM drops all shadow page table entries of the VM.
    fn remove(&self, slot: u32) -> io::Result<()>;
}

/// Event of an emulated device that an observer of the VM may want to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// The driver of a virtio device has set the device up. The device serves its queues from now on.
    Activated,
    /// An activated virtio device is reset, by its driver or with the whole VM.
    Reset,
    /// The driver of a virtio device broke a rule. The device stops until its driver resets it.
    Failed,
    /// The guest's kernel has panicked.
    Panicked,
    /// The guest's kernel has panicked and continues in a crash kernel.
    CrashLoaded,
    /// The guest did not reload its watchdog in time, so the guest is reset.
    WatchdogExpired,
}

/// Observer of device events.
pub trait DeviceObserver: Send + Sync {
    /// Reports an event of the device with this name. The device calls this function on a vCPU's thread or on its own thread. The
    /// function must not wait, and must not call the device. A guest can cause any number of events.
    fn observe(&self, id: &str, event: DeviceEvent);
}

/// Notice of the host about a host device that the guest uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostNotice {
    /// The device had an uncorrectable error. Reads from the device and writes to the device are unreliable from then on.
    Failed,
    /// The host wants the device back, and waits until this process closes the device. The host repeats this notice from time to time.
    Requested,
}

/// Handler of the host's notices.
pub trait HostListener: Send + Sync {
    /// Reports a notice about the device with this name and this host address. A thread of the device calls this function. Closing the
    /// device waits for this thread, so the function must not wait, and must not call the device.
    fn notify(&self, id: &str, host: &str, notice: HostNotice);
}

#[cfg(test)]
pub(crate) mod test_support {
    use std::io;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    use super::{DeviceEvent, DeviceObserver, InterruptLine};
    use crate::sync::lock;

    /// Interrupt line that keeps its level.
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

    /// Observer that records events.
    #[derive(Default)]
    pub(crate) struct EventRecorder(Mutex<Vec<DeviceEvent>>);

    impl EventRecorder {
        /// Returns the events since the last call.
        pub(crate) fn take(&self) -> Vec<DeviceEvent> {
            std::mem::take(&mut lock(&self.0))
        }
    }

    impl DeviceObserver for EventRecorder {
        fn observe(&self, _: &str, event: DeviceEvent) {
            lock(&self.0).push(event);
        }
    }
}
