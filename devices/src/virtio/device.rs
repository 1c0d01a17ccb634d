// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interfaces between a virtio device and its transport.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::EventFd;

use super::last_requests::LastRequests;
use crate::dma::DeviceMemory;
use crate::state::{DeviceState, StateError};

/// Fatal error of a device. The transport reports the error to the driver as `DEVICE_NEEDS_RESET` (virtio 1.3, section 2.1).
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The driver put an invalid request into a queue.
    #[error("queue {queue}: {rule}")]
    Queue {
        /// Index of the queue.
        queue: u16,
        /// Rule that the driver broke.
        rule: &'static str,
    },
    /// The queue's rings are unusable.
    #[error("queue {queue}: {source}")]
    Ring {
        /// Index of the queue.
        queue: u16,
        /// Error of the virtio-queue library.
        source: virtio_queue::Error,
    },
    /// The host cannot start the thread that serves a queue.
    #[error("queue {queue}: cannot start the queue's thread: {source}")]
    Thread {
        /// Index of the queue.
        queue: u16,
        /// Error of the host kernel.
        source: std::io::Error,
    },
    /// The host kernel still reads or writes memory that was unmapped from the device.
    #[error("queue {queue}: the host kernel still does I/O in memory that the guest has unmapped")]
    Stuck {
        /// Index of the queue.
        queue: u16,
    },
    /// The host kernel rejects I/O requests.
    #[error("queue {queue}: the host kernel rejects I/O requests: {source}")]
    Io {
        /// Index of the queue.
        queue: u16,
        /// Error of the host kernel.
        source: std::io::Error,
    },
    /// The vhost-user server of the device failed.
    #[error("the vhost-user server {reason}")]
    Server {
        /// Failure of the server, such as "closed the connection". The text continues the sentence "the vhost-user server …".
        reason: String,
    },
    /// The thread that serves a queue panicked.
    #[error("queue {queue}: the queue's thread panicked")]
    Panicked {
        /// Index of the queue.
        queue: u16,
    },
}

/// Shared memory region of a device (virtio 1.3, section 2.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedRegion {
    /// The region's `shmid`.
    pub id: u8,
    /// Size in bytes, a multiple of the page size. The region's BAR has this size, rounded up to a power of two.
    pub size: u64,
}

/// Notifications from a device to its driver. The transport implements this trait.
pub trait Interrupt: Send + Sync {
    /// Notifies the driver that the device has used buffers of `queue`.
    fn queue_used(&self, queue: u16);
    /// Returns the eventfd of the queue's interrupt. Another process can write the eventfd to notify the driver without the help of this
    /// process.
    ///
    /// Returns `None` if the driver has set up no interrupt for the queue. The caller then calls [`queue_used`](Self::queue_used) instead.
    fn queue_event(&self, queue: u16) -> Option<EventFd> {
        let _ = queue;
        None
    }
    /// Increments the generation of the device configuration (virtio 1.3, section 2.4). If `notify` is true and the driver is running,
    /// notifies the driver too.
    fn config_changed(&self, notify: bool);
    /// Reports a fatal error that was found outside a vCPU thread. The effect is as if [`notify`](VirtioDevice::notify) had returned the
    /// error. Takes no lock that is held while a device is reset or paused, because the reset or pause may wait for the calling thread.
    fn failed(&self, error: &DeviceError);
}

/// Driver that has set `DRIVER_OK`.
#[derive(Clone)]
pub struct Driver {
    /// Memory that the device can access. The queues lie in this memory.
    pub memory: DeviceMemory,
    /// Notifications to the driver.
    pub interrupt: Arc<dyn Interrupt>,
    /// Negotiated features, including the transport's features.
    pub features: u64,
    /// Record of the last requests.
    pub requests: Arc<LastRequests>,
}

/// Position of a queue: the next element of each of its rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueueState {
    /// Index of the next element of the available ring to serve.
    pub next_avail: u16,
    /// Index of the next element of the used ring to write.
    pub next_used: u16,
}

impl QueueState {
    /// Returns the position of `queue`.
    pub fn of(queue: &Queue) -> Self {
        Self { next_avail: queue.next_avail(), next_used: queue.next_used() }
    }
}

/// Queues of a device. The default methods of [`VirtioDevice`] call these methods. For details, see [`VirtioDevice`].
pub trait DeviceQueues: Send + Sync {
    /// Stores the driver, which has set `DRIVER_OK`.
    fn activate(&self, driver: Driver);
    /// Starts serving a queue.
    ///
    /// # Errors
    /// The host cannot create a thread or a descriptor for the queue, or the thread cannot use its host CPUs.
    fn start(&self, index: u16, queue: Queue) -> std::io::Result<()>;
    /// Stops serving a queue. Returns the queue's position.
    fn stop(&self, index: u16) -> Option<QueueState>;
    /// Returns the position of a queue of a paused device.
    fn state(&self, index: u16) -> Option<QueueState>;
    /// Returns the doorbell of a queue.
    fn doorbell(&self, index: u16) -> Option<&EventFd>;
    /// Drops the driver. The caller has stopped all queues.
    fn reset(&self);
    /// Pauses the threads.
    fn pause(&self);
    /// Resumes the threads.
    fn resume(&self);
}

/// Fixed properties of a virtio device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceProperties<'d> {
    /// The device type (virtio 1.3, section 5), such as 23 for an IOMMU.
    pub device_type: u16,
    /// PCI class, subclass and programming interface, as 24 bits.
    pub pci_class: u32,
    /// Features that the device offers: feature bits of its device type, and ring features. The ring features are bits 28 (`INDIRECT_DESC`)
    /// and 29 (`EVENT_IDX`). The transport adds `VERSION_1`.
    pub features: u64,
    /// Maximum size of each queue. Each size is a power of two.
    pub queue_sizes: &'d [u16],
    /// Size of the device configuration in bytes.
    pub config_len: usize,
}

impl<'d> DeviceProperties<'d> {
    /// Returns the properties of a device with this device type and PCI class.
    pub fn new(device_type: u16, pci_class: u32, features: u64, queue_sizes: &'d [u16], config_len: usize) -> Self {
        Self { device_type, pci_class, features, queue_sizes, config_len }
    }
}

/// Copies the bytes of `config` that start at `offset` to `data`. Bytes of `data` beyond the end of `config` keep their value.
pub(super) fn read_bytes(config: &[u8], offset: usize, data: &mut [u8]) {
    for (value, byte) in data.iter_mut().zip(config.iter().skip(offset)) {
        *value = *byte;
    }
}

/// Virtio device, independent of the transport.
///
/// Any vCPU may call any method at any time. The device does its own locking.
pub trait VirtioDevice: Send + Sync {
    /// Returns the fixed properties of the device.
    fn properties(&self) -> DeviceProperties<'_>;
    /// Returns the features that the device offers, without the transport's features.
    fn features(&self) -> u64 {
        self.properties().features
    }
    /// Returns the maximum size of each queue.
    fn queue_sizes(&self) -> &[u16] {
        self.properties().queue_sizes
    }
    /// Reads the device configuration at `offset`. Bytes of `data` beyond the end of the configuration keep their value.
    fn read_config(&self, offset: usize, data: &mut [u8]);
    /// Writes the device configuration at `offset`. Read-only fields keep their value.
    fn write_config(&self, _offset: usize, _data: &[u8]) {}
    /// Returns the queues. By default, several methods of this trait call the methods of these queues. Returns `None` if the device
    /// overrides all these methods.
    fn queues(&self) -> Option<&dyn DeviceQueues> {
        None
    }
    /// Activates the device for a driver that is ready. The transport then starts each queue that the driver has enabled.
    fn activate(&self, driver: Driver) {
        self.queues().into_iter().for_each(|queues| queues.activate(driver.clone()));
    }
    /// Starts serving `queue`, which the driver has set up. If the queue was stopped before, `queue` contains the position at which the
    /// queue was stopped. A paused device serves the queue only after it is resumed.
    ///
    /// # Errors
    /// The host cannot create a thread or a descriptor for the queue, or the thread cannot use its host CPUs.
    fn start_queue(&self, index: u16, queue: Queue) -> std::io::Result<()> {
        self.queues().map_or(Ok(()), |queues| queues.start(index, queue))
    }
    /// Stops a queue, and returns its position. When this method returns, the device no longer accesses the queue. Returns `None` if the
    /// queue was not started.
    fn stop_queue(&self, index: u16) -> Option<QueueState> {
        self.queues()?.stop(index)
    }
    /// Returns the position of a queue of a paused device, or `None` if the queue was not started.
    fn queue_state(&self, index: u16) -> Option<QueueState> {
        self.queues()?.state(index)
    }
    /// Returns the doorbell of `queue`: an eventfd that notifies the device of new buffers while the vCPU continues. If the queue has no
    /// doorbell, the transport calls [`notify`](Self::notify) instead.
    fn doorbell(&self, queue: u16) -> Option<&EventFd> {
        self.queues()?.doorbell(queue)
    }
    /// Notifies the device that the driver has added buffers to `queue`.
    ///
    /// A vCPU thread calls this method, and the vCPU does not run until the method returns. So the work of this method must be bounded.
    ///
    /// # Errors
    /// The driver made a mistake, and the device cannot recover without a reset.
    fn notify(&self, queue: u16) -> Result<(), DeviceError> {
        if let Some(doorbell) = self.doorbell(queue) {
            // The write fails only if the eventfd's counter would overflow. A notification is then already pending.
            let _ = doorbell.write(1);
        }
        Ok(())
    }
    /// Resets the device to its state before activation. The transport has stopped all queues.
    fn reset(&self) {
        self.queues().into_iter().for_each(DeviceQueues::reset);
    }
    /// Resets the device as part of a reset of the whole VM. No vCPU runs. The bus resets its devices from the highest device number to the
    /// lowest.
    fn system_reset(&self) {
        self.reset();
    }
    /// Returns the shared memory region, if the device has one. The region never changes.
    fn shared_region(&self) -> Option<SharedRegion> {
        None
    }
    /// Moves the shared memory region to the guest-physical address `address`.
    ///
    /// # Errors
    /// The platform rejected the move. The region's memory is then not visible to the guest.
    fn shared_region_moved(&self, address: u64) -> std::io::Result<()> {
        let _ = address;
        Ok(())
    }
    /// Removes the shared memory region from the guest's address space, until the next
    /// [`shared_region_moved`](Self::shared_region_moved).
    ///
    /// # Errors
    /// The region stays at its address. The default implementation always fails. The virtio-iommu uses the default implementation, because
    /// its region may contain guest-visible chunks. The virtio-iommu does not remove and recreate the memory slots of chunks when the guest
    /// turns decoding of the BAR off and on.
    fn shared_region_released(&self) -> std::io::Result<()> {
        Err(std::io::Error::other("the shared memory region cannot be removed from its address"))
    }
    /// Stops all queues until [`resume`](Self::resume).
    ///
    /// The transport calls this method when the VM is paused, and when the driver of a running VM forbids bus use. A driver forbids bus use
    /// when it turns bus mastering off, or selects a power state other than D0. When this method returns, the device accesses no guest
    /// memory. The device has completed all requests that it began, except requests that are part of its saved state. Like a reset, this
    /// method must return within a bounded time.
    fn pause(&self) {
        self.queues().into_iter().for_each(DeviceQueues::pause);
    }
    /// Resumes the queues. The device also serves buffers that the driver added during the pause. The driver need not notify the device of
    /// these buffers again.
    fn resume(&self) {
        self.queues().into_iter().for_each(DeviceQueues::resume);
    }
    /// Notifies the device that the VM runs again after a pause. The queues stay paused while the driver forbids bus use.
    fn vm_resumed(&self) {}
    /// Returns the device's own state: everything that is neither in a register nor in a ring.
    ///
    /// # Errors
    /// Part of the device's state cannot be saved.
    fn save(&self) -> Result<DeviceState, StateError>;
    /// Restores `state` in a device that is new or was just reset. If the saved device had a driver, the transport has already activated
    /// this device. The transport starts the queues after this method.
    ///
    /// # Errors
    /// The device rejects part of the state. The device must be reset before further use.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError>;
}
