// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-blk: disks backed by an image on the host (virtio 1.4, section 5.2).
//!
//! `device` is the interface to the transport. Each `queue` has a thread, which turns the guest's requests into operations on an `image`.
//! The host kernel runs these operations (`io`).
//!
//! The kernel reads and writes the guest's buffers directly ([`HostIo`](crate::dma::HostIo)). The device copies the data if direct I/O does
//! not accept a buffer's alignment, or if the image is a qcow2 image.

mod config_space;
mod counters;
mod device;
mod disk;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod image;
mod io;
#[cfg(feature = "fuzzing")]
mod load;
mod queue;
pub mod spec;
mod state;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use self::counters::BlockCounters;
use self::counters::Counts;
pub use self::device::{ROLE, VirtioBlock};
use self::disk::Disk;
pub use self::image::disk_image::{Image, ImageFormat, ImageOptions};
pub use self::image::error::{ImageError, ResizeError};
pub use self::image::host_file::is_read_only_device;
pub use self::io::engine::IoMode;
#[cfg(feature = "fuzzing")]
pub use self::load::ReadLoad;
use self::spec::ID_BYTES;
use super::{TransportError, VirtioPciDevice, VirtioPciParams};
use crate::dma::DeviceMemory;
use crate::platform::{DeviceObserver, Doorbells, MsiAllocator};
use crate::rate_limit::RateLimiter;
use crate::sandbox::HostCpus;

/// Parameters of a disk.
pub struct BlockParams {
    /// Name of the device in logs, thread names and the API.
    pub id: String,
    /// Content of the disk.
    pub image: Image,
    /// Serial number that the guest reads. Only its first 20 bytes are used.
    pub serial: String,
    /// Number of queues, at least 1.
    pub queues: u16,
    /// Size of each queue: a power of two, at least 4.
    pub queue_size: u16,
    /// I/O method.
    pub mode: IoMode,
    /// Rate limiter, which several disks can share. `None` means no limit.
    pub limiter: Option<Arc<RateLimiter>>,
    /// Host CPUs for the queues' threads. The key is the queue's index. If a queue has no entry, its thread may run on any CPU.
    pub affinity: BTreeMap<u16, HostCpus>,
    /// Guest memory that the device can access.
    pub memory: DeviceMemory,
    /// Allocator of interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Platform interface that lets notifications wake the queues' threads without exits. `None` if each notification exits to the VMM.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Observer that is notified when the device is activated, fails or is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Creates a disk. Returns the PCI function and the device. The caller uses the device to read the counters and to change the disk's size.
///
/// # Errors
/// The process has no free file descriptor, or the platform has no free interrupt vector.
pub fn create(params: BlockParams) -> Result<(Arc<VirtioPciDevice>, Arc<VirtioBlock>), TransportError> {
    let mut serial = [0; ID_BYTES];
    for (byte, of_serial) in serial.iter_mut().zip(params.serial.bytes()) {
        *byte = of_serial;
    }
    let disk = Disk {
        id: params.id.clone(),
        image: Arc::new(params.image),
        serial,
        counts: Counts::default(),
        mode: params.mode,
        limiter: params.limiter,
        affinity: params.affinity,
    };
    let device = VirtioBlock::new(disk, params.queues, params.queue_size).map_err(TransportError::Descriptors)?;
    let device = Arc::new(device);
    let BlockParams { id, memory, msi, doorbells, observer, .. } = params;
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    Ok((Arc::new(function), device))
}
