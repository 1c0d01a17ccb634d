// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a virtio device is to its transport, and the other way round.

use std::sync::Arc;

use thiserror::Error;
use virtio_queue::Queue;

use crate::ram::Ram;

/// Why a device cannot go on. The transport answers with `DEVICE_NEEDS_RESET` (virtio 1.3, section 2.1).
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The driver put something in a queue that no driver may.
    #[error("queue {queue}: {rule}")]
    Queue {
        /// The queue.
        queue: u16,
        /// The rule that was broken.
        rule: &'static str,
    },
    /// The queue's rings cannot be used.
    #[error("queue {queue}: {source}")]
    Ring {
        /// The queue.
        queue: u16,
        /// What the queue found.
        source: virtio_queue::Error,
    },
}

/// A shared memory region that a device shows to its driver (virtio 1.3, section 2.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedRegion {
    /// The region's `shmid`.
    pub id: u8,
    /// Size in bytes, a multiple of the page size. The BAR around it is the next power of two.
    pub size: u64,
}

/// How a device tells its driver something. The transport implements it.
pub trait Interrupt: Send + Sync {
    /// Tells the driver that buffers of `queue` were used.
    fn queue_used(&self, queue: u16);
    /// The device configuration has changed: a new generation, and if `notify`, a notification to the driver, provided
    /// that it runs (virtio 1.3, section 2.4).
    fn config_changed(&self, notify: bool);
    /// The device cannot go on, found on a thread other than a vCPU's: the driver is told as if
    /// [`notify`](VirtioDevice::notify) had returned the error. The device holds no lock that its `reset` takes.
    fn failed(&self, error: &DeviceError);
}

/// What a driver has set up, handed to the device when it sets `DRIVER_OK`.
pub struct Activation {
    /// Guest memory, in which the queues lie.
    pub memory: Arc<Ram>,
    /// All queues, those checked that the driver enabled and `None` for the others.
    pub queues: Vec<Option<Queue>>,
    /// The way to the driver.
    pub interrupt: Arc<dyn Interrupt>,
    /// The negotiated features, the transport's bits among them.
    pub features: u64,
}

/// A virtio device, whatever the transport.
///
/// All calls may come from any vCPU at any time; the device locks what it must.
pub trait VirtioDevice: Send + Sync {
    /// The device type (virtio 1.3, section 5), such as 23 for an IOMMU.
    fn device_type(&self) -> u16;
    /// PCI class, subclass and programming interface, as 24 bits.
    fn pci_class(&self) -> u32;
    /// The features that the device offers: bits of its own type, and bits 28 (`INDIRECT_DESC`) and 29 (`EVENT_IDX`) if
    /// it keeps to them. The transport adds `VERSION_1`.
    fn features(&self) -> u64;
    /// The largest size of each queue, powers of two.
    fn queue_sizes(&self) -> &[u16];
    /// The size of the device configuration in bytes; it does not change.
    fn config_len(&self) -> usize;
    /// Reads the device configuration at `offset`. Bytes beyond its end stay as they are.
    fn read_config(&self, offset: usize, data: &mut [u8]);
    /// Writes the device configuration at `offset`; read-only fields stay as they are.
    fn write_config(&self, offset: usize, data: &[u8]);
    /// The driver is ready: queues may be used from now on.
    fn activate(&self, activation: Activation);
    /// The driver has put buffers into `queue`. Comes on the thread of the vCPU that told so, which does not run on
    /// before this returns; so the work of one call must be bounded.
    ///
    /// # Errors
    /// A driver's mistake that the device cannot recover from without a reset.
    fn notify(&self, queue: u16) -> Result<(), DeviceError>;
    /// Back to the state before the driver came. When it returns, the device touches no queue any more.
    fn reset(&self);
    /// As [`reset`](Self::reset), when the whole VM is reset: no vCPU runs, and every device above this one on the bus was
    /// reset before.
    fn system_reset(&self) {
        self.reset();
    }
    /// The shared memory region, if the device has one; it does not change.
    fn shared_region(&self) -> Option<SharedRegion> {
        None
    }
    /// The shared memory region appears at guest-physical `address` from now on, and no longer where it was.
    ///
    /// # Errors
    /// What the platform refused; the guest does not see the region's memory then.
    fn shared_region_moved(&self, address: u64) -> std::io::Result<()> {
        let _ = address;
        Ok(())
    }
}
