// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a virtio device is to its transport, and the other way round.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::EventFd;

use super::last_requests::LastRequests;
use crate::dma::DeviceMemory;
use crate::state::{DeviceState, StateError};

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
    /// The host gave no thread to serve a queue with.
    #[error("queue {queue}: starting its thread: {source}")]
    Thread {
        /// The queue.
        queue: u16,
        /// What the host said.
        source: std::io::Error,
    },
    /// The host's kernel still reads or writes memory that was taken away from the device.
    #[error("queue {queue}: the host goes on with I/O to memory that is no longer mapped")]
    Stuck {
        /// The queue.
        queue: u16,
    },
    /// The host does not take requests any more.
    #[error("queue {queue}: the host takes no I/O: {source}")]
    Io {
        /// The queue.
        queue: u16,
        /// What the host said.
        source: std::io::Error,
    },
    /// The process of the host that serves the device.
    #[error("the vhost-user server {reason}")]
    Server {
        /// What became of it.
        reason: String,
    },
    /// The thread that serves a queue has panicked.
    #[error("queue {queue}: its thread panicked")]
    Panicked {
        /// The queue.
        queue: u16,
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
    /// The event that tells the driver the same when anybody writes it, without a way through this process. `None` while the driver
    /// has set up no interrupt that is one: [`queue_used`](Self::queue_used) is to be called then.
    fn queue_event(&self, queue: u16) -> Option<EventFd> {
        let _ = queue;
        None
    }
    /// The device configuration has changed: a new generation, and if `notify`, a notification to the driver, provided
    /// that it runs (virtio 1.3, section 2.4).
    fn config_changed(&self, notify: bool);
    /// The device cannot go on, found on a thread other than a vCPU's: the driver is told as if
    /// [`notify`](VirtioDevice::notify) had returned the error. Takes no lock that is held while a device is reset or paused.
    fn failed(&self, error: &DeviceError);
}

/// A driver that is ready: it has set `DRIVER_OK`.
#[derive(Clone)]
pub struct Driver {
    /// Memory as the device sees it, in which the queues lie.
    pub memory: DeviceMemory,
    /// The way to the driver.
    pub interrupt: Arc<dyn Interrupt>,
    /// The negotiated features, the transport's bits among them.
    pub features: u64,
    /// Where the last requests are kept.
    pub requests: Arc<LastRequests>,
}

/// How far a queue was served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueueState {
    /// Index of the next element of the available ring that is to be served.
    pub next_avail: u16,
    /// Index of the next element of the used ring that is to be written.
    pub next_used: u16,
}

impl QueueState {
    /// Of `queue`.
    pub fn of(queue: &Queue) -> Self {
        Self { next_avail: queue.next_avail(), next_used: queue.next_used() }
    }
}

/// Queues of a device, as [`VirtioDevice`] uses them. Its methods of the same names say what each does.
pub trait DeviceQueues: Send + Sync {
    /// A driver is ready.
    fn activate(&self, driver: Driver);
    /// Starts to serve a queue.
    ///
    /// # Errors
    /// The host gives no thread.
    fn start(&self, index: u16, queue: Queue) -> std::io::Result<()>;
    /// Stops to serve a queue. Returns how far it was served.
    fn stop(&self, index: u16) -> Option<QueueState>;
    /// Returns how far a queue was served, of a device that is paused.
    fn state(&self, index: u16) -> Option<QueueState>;
    /// Returns the doorbell of a queue.
    fn doorbell(&self, index: u16) -> Option<&EventFd>;
    /// Forgets the driver. All queues are stopped.
    fn reset(&self);
    /// Pauses the thread.
    fn pause(&self);
    /// Resumes the thread.
    fn resume(&self);
}

/// Fixed properties of a virtio device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceProperties<'d> {
    /// The device type (virtio 1.3, section 5), such as 23 for an IOMMU.
    pub device_type: u16,
    /// PCI class, subclass and programming interface, as 24 bits.
    pub pci_class: u32,
    /// The features that the device offers: bits of its own type, and bits 28 (`INDIRECT_DESC`) and 29 (`EVENT_IDX`) if
    /// it keeps to them. The transport adds `VERSION_1`.
    pub features: u64,
    /// The largest size of each queue, powers of two.
    pub queue_sizes: &'d [u16],
    /// The size of the device configuration in bytes.
    pub config_len: usize,
}

impl<'d> DeviceProperties<'d> {
    /// Properties of a device of this type and class.
    pub fn new(device_type: u16, pci_class: u32, features: u64, queue_sizes: &'d [u16], config_len: usize) -> Self {
        Self { device_type, pci_class, features, queue_sizes, config_len }
    }
}

/// Copies what `config` has from `offset` on to `data`. Bytes beyond its end stay as they are.
pub(super) fn read_bytes(config: &[u8], offset: usize, data: &mut [u8]) {
    for (value, byte) in data.iter_mut().zip(config.iter().skip(offset)) {
        *value = *byte;
    }
}

/// A virtio device, whatever the transport.
///
/// All calls may come from any vCPU at any time; the device locks what it must.
pub trait VirtioDevice: Send + Sync {
    /// Fixed properties of the device.
    fn properties(&self) -> DeviceProperties<'_>;
    /// Features that the device offers, without those of the transport.
    fn features(&self) -> u64 {
        self.properties().features
    }
    /// The largest size of each queue.
    fn queue_sizes(&self) -> &[u16] {
        self.properties().queue_sizes
    }
    /// Reads the device configuration at `offset`. Bytes beyond its end stay as they are.
    fn read_config(&self, offset: usize, data: &mut [u8]);
    /// Writes the device configuration at `offset`; read-only fields stay as they are.
    fn write_config(&self, _offset: usize, _data: &[u8]) {}
    /// Queues of a device with one thread for all of them. `None` if the device overrides all methods that use this one.
    fn queues(&self) -> Option<&dyn DeviceQueues> {
        None
    }
    /// A driver is ready. The queues that it has enabled are started next.
    fn activate(&self, driver: Driver) {
        self.queues().into_iter().for_each(|queues| queues.activate(driver.clone()));
    }
    /// `queue`, which the driver has set up, may be used from now on; it stands where it was stopped, if it ever was. In a device
    /// that is paused it is used once that is resumed.
    ///
    /// # Errors
    /// The host gives no thread for it.
    fn start_queue(&self, index: u16, queue: Queue) -> std::io::Result<()> {
        self.queues().map_or(Ok(()), |queues| queues.start(index, queue))
    }
    /// When it returns, the device touches the queue no more. `None` if it was not started.
    fn stop_queue(&self, index: u16) -> Option<QueueState> {
        self.queues()?.stop(index)
    }
    /// How far a queue is served, of a device that is paused. `None` if it is not started.
    fn queue_state(&self, index: u16) -> Option<QueueState> {
        self.queues()?.state(index)
    }
    /// The event by which the driver may tell of buffers in `queue` without a vCPU that waits for the device. Without one,
    /// [`notify`](Self::notify) is called.
    fn doorbell(&self, queue: u16) -> Option<&EventFd> {
        self.queues()?.doorbell(queue)
    }
    /// The driver has put buffers into `queue`. Comes on the thread of the vCPU that told so, which does not run on
    /// before this returns; so the work of one call must be bounded.
    ///
    /// # Errors
    /// A driver's mistake that the device cannot recover from without a reset.
    fn notify(&self, queue: u16) -> Result<(), DeviceError> {
        if let Some(doorbell) = self.doorbell(queue) {
            // It fails where it was rung 2^64 times already.
            let _ = doorbell.write(1);
        }
        Ok(())
    }
    /// Back to the state before the driver came. All queues are stopped.
    fn reset(&self) {
        self.queues().into_iter().for_each(DeviceQueues::reset);
    }
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
    /// The region is shown nowhere from now on, until [`shared_region_moved`](Self::shared_region_moved) says where.
    ///
    /// # Errors
    /// It keeps its place. As that of the virtio-iommu does: chunks may be shown there, and their memory slots are not made anew for a
    /// place that is not decoded.
    fn shared_region_released(&self) -> std::io::Result<()> {
        Err(std::io::Error::other("the shared memory region keeps its place"))
    }
    /// Stops all queues, until [`resume`](Self::resume): because the VM is paused, or because the driver took the bus away from
    /// the device, while vCPUs run. When it returns, no request is half served, except for what the device saves, and the device
    /// touches no memory of the guest. The time that it takes is bounded as that of a reset is.
    fn pause(&self) {
        self.queues().into_iter().for_each(DeviceQueues::pause);
    }
    /// Lets the queues go on. Buffers that came meanwhile are served without another notification.
    fn resume(&self) {
        self.queues().into_iter().for_each(DeviceQueues::resume);
    }
    /// The VM goes on after a pause, whether or not the queues do.
    fn vm_resumed(&self) {}
    /// The device's own state: what is in no register and no ring.
    ///
    /// # Errors
    /// It has state that cannot be saved.
    fn save(&self) -> Result<DeviceState, StateError>;
    /// Makes a device that was just made or reset, and activated if its driver was ready, what `state` says. Its queues are
    /// started afterwards.
    ///
    /// # Errors
    /// What of the state is refused. The device is good for a reset only then.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError>;
}
